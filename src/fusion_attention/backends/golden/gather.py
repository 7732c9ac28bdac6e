"""Reads lists of selected blocks of keys, for attention and for the indexer's gradients."""

import numpy as np
import torch

from fusion_attention.ir.kv import RowView


def scanned(view: RowView, end: np.ndarray, b: int, heads: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (entries int64, read bool) of sequence b's lists, both [heads, q_len, entries of a list].

    read is true for the entries that a row reads: those before its first negative entry, and only the first
    ceil(end / block), where `end` is the end of the row's visible keys.
    """
    entries = view.sequence(b, heads, len(end)).long()
    blocks = torch.from_numpy(-(-np.maximum(end, 0) // block)).to(entries.device)[:, None]
    slot = torch.arange(entries.shape[2], device=entries.device)
    return entries, (slot < blocks) & (entries >= 0).cumprod(-1).bool()


def added_up(values: torch.Tensor, entries: torch.Tensor, read: torch.Tensor, places: int) -> torch.Tensor:
    """Returns [..., places]: element j is the sum of the `values` [..., n] whose entry (a number in `entries`) is j and
    is read (bool `read`).

    Entries from `places` on are ignored.
    """
    counted = read & (entries < places)
    total = values.new_zeros(*values.shape[:-1], places + 1)  # the last element collects ignored entries
    total.scatter_add_(-1, entries.where(counted, places), values.where(counted, 0))
    return total[..., :places]
