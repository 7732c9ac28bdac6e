"""Lists of selected key blocks (sparse attention) over sharded keys: validation, and the entries of a rank's keys."""

from collections.abc import Sequence

import numpy as np
import torch

from fusion_attention.distributed.sharded_call import Segment, ShardedCall

Tensor = torch.Tensor
# Rows per step, which limits temporary memory.
_ROWS = 1024


def invalid_entry(indices: Tensor, segments: Sequence[Segment], kv_len: np.ndarray, block: int) -> str:
    """Returns a description of the first entry of `indices` [query tokens, heads, entries], numbers of blocks of
    `block` keys, that is neither -1 nor a block of its sequence; "" if all are valid. segments: the queries' ranges."""
    for b, first, count, at in segments:
        entries, blocks = indices[at : at + count], -(-int(kv_len[b]) // block)
        if not entries.numel():
            continue
        low, high = (int(edge) for edge in entries.aminmax())
        if low < -1 or high >= blocks:
            row, head, slot = ((entries < -1) | (entries >= blocks)).nonzero()[0].tolist()
            where = (
                f"batch {b}, row {first + row}, " + (f"head {head}, " if entries.shape[1] > 1 else "") + f"slot {slot}"
            )
            return f"{int(entries[row, head, slot])} at {where}, outside [-1, {blocks})"
    return ""


def owned(
    sharded: ShardedCall,
    segments: Sequence[Segment],
    indices: Tensor | None,
    block: int,
    beside: Tensor | None = None,
    *,
    own_count: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the selected blocks of all ranks' query tokens that overlap this rank's `segments` of keys, in the same
    order: (block numbers padded with -1, the `beside` of these entries padded with 0). indices: numbers of blocks of
    `block` keys [query tokens of all ranks, heads, entries], -1: none. beside: a number per entry, or None. own_count:
    entries count from the segment's first key, not from the sequence's; requires block 1, one segment per sequence."""
    assert indices is not None
    e, count = sharded.full.extents, indices.shape[-1]
    lists = torch.full_like(indices, -1)
    numbers = indices.new_zeros(0) if beside is None else torch.zeros_like(beside)
    slot = torch.arange(count, device=indices.device)
    for b, start in enumerate(sharded.q.starts.tolist()):
        blocks, before = np.zeros(-(-int(e.kv_len[b]) // block) + 1, bool), 0
        for one in segments:
            if one.sequence == b:
                blocks[one.first // block : (one.first + one.tokens - 1) // block + 1] = True
                before = one.first if own_count else 0
        is_owned = torch.from_numpy(blocks).to(indices.device)
        for first in range(0, int(e.q_len[b]), _ROWS):
            row = np.arange(first, min(first + _ROWS, int(e.q_len[b])))
            _, end = e.row_interval(b, row)
            read = torch.from_numpy(-(-np.maximum(end, 0) // block)).to(indices.device)[:, None, None]
            at = slice(start + int(row[0]), start + int(row[-1]) + 1)
            entries = indices[at].long()
            there = (entries >= 0).cumprod(-1).bool() & (slot < read) & is_owned[entries.clamp(min=0)]
            # Entries that are not selected go to an index after the list.
            place = (there.cumsum(-1) - 1).masked_fill(~there, count)
            lists[at] = _moved(entries - before, place, -1).to(indices.dtype)
            if beside is not None:
                numbers[at] = _moved(beside[at], place, 0)
    return lists, numbers


def _moved(entries: Tensor, place: Tensor, fill: int) -> Tensor:
    buffer = torch.full((*entries.shape[:-1], entries.shape[-1] + 1), fill, dtype=entries.dtype, device=entries.device)
    return buffer.scatter_(-1, place, entries)[..., :-1]
