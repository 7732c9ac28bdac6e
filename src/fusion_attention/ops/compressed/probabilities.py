"""Probabilities of the keys of one source in a softmax over all sources, as a mean of heads: an indexer's target."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fusion_attention.ir.call import buffer
from fusion_attention.ir.memory_views import RowView
from fusion_attention.memory import empty
from fusion_attention.ops.shared.lowered_call import TensorCall
from fusion_attention.ops.sparse.lowered_call import grouped

Tensor = torch.Tensor
PAIRS = 1 << 22  # products per step: rows * keys * heads


@dataclass(frozen=True, eq=False)
class ListedRows:
    """Query rows and their visible keys of one source.

    Args:
        call: the call, whose methods make views of tensors with a row per query token.
        scale: factor on q . k.
        query: [B, S1, N1, D] or [T1, N1, D].
        lengths: query rows of every sequence.
        keys: keys of the source.
        keys_of: their number in every sequence.
        ends: per sequence, an array with the number of visible keys of each row.
        lse: log(sum(exp(s))) over all sources and the sink, in CANN's order of statistics.
        lists: selected keys of each row, ended by -1; None: all visible keys.
        counts: number of entries of each row's list; None: up to its first -1.
    """

    call: TensorCall
    scale: float
    query: Tensor
    lengths: Sequence[int]
    keys: RowView
    keys_of: np.ndarray
    ends: Sequence[np.ndarray]
    lse: Tensor
    lists: Tensor | None = None
    counts: Tensor | None = None


def write_probabilities(rows: ListedRows, out: Tensor) -> None:
    """Writes the mean over heads h of exp(scale * q_h . k - lse_h) for the keys that rows read, and 0 for others.
    out: [B, S1, 1, W] or [T1, 1, W], with a column for each entry of a list, or without lists for each key."""
    written = buffer(out).zero_()
    heads = rows.query.shape[-2]
    dtype = torch.float64 if rows.query.dtype == torch.float64 else torch.float32
    saved = empty(rows.query, rows.query.shape[:-1], dtype)
    grouped(saved, 1, rows.call.layout).copy_(rows.lse)
    queries, statistics = rows.call.rows(rows.query, heads), rows.call.rows(saved.unsqueeze(-1), heads)
    targets = rows.call.rows(written)
    for b, count in enumerate(rows.lengths):
        k = rows.keys.sequence(b, 1, int(rows.keys_of[b]))[0].to(dtype)
        if not count or not len(k):
            continue
        entry, read = _entries(rows, b, count, out.shape[-1], len(k))
        target = targets.sequence(b, 1, count)[0]
        q, lse = queries.sequence(b, heads, count).transpose(0, 1), statistics.sequence(b, heads, count).transpose(0, 1)
        width = min(out.shape[-1], len(k)) if rows.lists is None else out.shape[-1]
        step = max(1, PAIRS // max(heads * width, 1))
        for first in range(0, count, step):
            at = slice(first, first + step)
            listed = k[:width] if rows.lists is None else k[entry[at].clamp(0, len(k) - 1)]
            scores = rows.scale * (q[at].to(dtype) @ listed.mT) - lse[at]
            target[at, :width] = scores.exp().mean(1).where(read[at, :width], 0).to(out.dtype)
    if written is not out:
        out.copy_(written)


def _entries(rows: ListedRows, b: int, count: int, width: int, keys: int) -> tuple[Tensor, Tensor]:
    """Returns two tensors [count, width] for sequence b: the key of each row's column, and True if the row reads it."""
    device = rows.query.device
    visible = torch.from_numpy(rows.ends[b]).to(device)[:, None]
    slot = torch.arange(width, device=device).expand(count, -1)
    read = slot < visible.clamp(max=keys)
    if rows.lists is None:
        return slot, read
    if rows.counts is not None:
        read = read & (slot < rows.call.rows(rows.counts.unsqueeze(-1)).sequence(b, 1, count)[0])
    entry = rows.call.rows(rows.lists).sequence(b, 1, count)[0].long()
    return entry, read & (entry >= 0).cumprod(-1).bool() & (entry < visible)
