"""Reading of lists of selected blocks, for attention and for the indexer's gradients."""

import numpy as np
import torch

from fusion_attention.ir.kv import RowView


def scanned(view: RowView, end: np.ndarray, b: int, heads: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(entries int64, read bool) of sequence b, both [heads, q_len, entries of a list]; read: the row reads the entry.

    A row whose visible keys are before `end` reads at most the first ceil(end / block) entries, and stops at the first
    negative one.
    """
    entries = view.sequence(b, heads, len(end)).long()
    blocks = torch.from_numpy(-(-np.maximum(end, 0) // block)).to(entries.device)[:, None]
    slot = torch.arange(entries.shape[2], device=entries.device)
    return entries, (slot < blocks) & (entries >= 0).cumprod(-1).bool()


def added_up(values: torch.Tensor, entries: torch.Tensor, read: torch.Tensor, places: int) -> torch.Tensor:
    """Sums values [.., entries] by index: result [.., places], where element j sums the values of read entries j.

    Entries beyond the last index are dropped.
    """
    counted = read & (entries < places)
    total = values.new_zeros(*values.shape[:-1], places + 1)  # the last element collects entries that do not count
    total.scatter_add_(-1, entries.where(counted, places), values.where(counted, 0))
    return total[..., :places]
