"""Reads lists of selected blocks of keys, for attention and for the indexer's gradients."""

import numpy as np
import torch

from fusion_attention.ir.memory_views import RowView


def scanned(view: RowView, end: np.ndarray, b: int, heads: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (entries int64, read bool), both [heads, q_len, entries], of sequence b's lists of selected key blocks.

    read is true for the entries that a row reads: those before its first negative entry, at most the first ceil(end /
    block); end: of the row's visible keys; block: keys per block.
    """
    entries = view.sequence(b, heads, len(end)).long()
    blocks = torch.from_numpy(-(-np.maximum(end, 0) // block)).to(entries.device)[:, None]
    slot = torch.arange(entries.shape[2], device=entries.device)
    return entries, (slot < blocks) & (entries >= 0).cumprod(-1).bool()


def added_up(values: torch.Tensor, entries: torch.Tensor, read: torch.Tensor, size: int) -> torch.Tensor:
    """Returns [..., size]: element j is the sum of `values` [..., n] over the n with entries[..., n] == j and
    read[..., n] true. Entries from `size` on are ignored."""
    counted = read & (entries < size)
    total = values.new_zeros(*values.shape[:-1], size + 1)  # the last element collects ignored entries
    total.scatter_add_(-1, entries.where(counted, size), values.where(counted, 0))
    return total[..., :size]
