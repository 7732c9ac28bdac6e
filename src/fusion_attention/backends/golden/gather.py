"""Lists of selected blocks: which of their entries a row reads.

The one statement of the scan, for attention and for the indexer's gradient.
"""

from __future__ import annotations

import numpy as np
import torch

from fusion_attention.ir.kv import RowView


def scanned(view: RowView, end: np.ndarray, b: int, heads: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(entries, read) of sequence b, both [heads, q_len, entries of a list]: int64, and whether a row reads them.

    A row that sees the keys before its `end` reads the first ceil(end / block) entries at most, and none from the first
    negative one on.
    """
    entries = view.sequence(b, heads, len(end)).long()
    blocks = torch.from_numpy(-(-np.maximum(end, 0) // block)).to(entries.device)[:, None]
    slot = torch.arange(entries.shape[2], device=entries.device)
    return entries, (slot < blocks) & (entries >= 0).cumprod(-1).bool()


def added_up(values: torch.Tensor, entries: torch.Tensor, read: torch.Tensor, places: int) -> torch.Tensor:
    """[.., places]: the sum of the values of all entries read that name a place; those beyond the last are dropped."""
    counted = read & (entries < places)
    total = values.new_zeros(*values.shape[:-1], places + 1)  # the last place takes what does not count
    total.scatter_add_(-1, entries.where(counted, places), values.where(counted, 0))
    return total[..., :places]
