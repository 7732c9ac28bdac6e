"""Converts a FlexAttention block mask to a band with lengths if it equals one, else to tiles with bits.

A mask becomes a band only after every row was compared with the band; names and code of mask functions are not used.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusion_attention.integrations.flex_attention import mods
from fusion_attention.ir.mask import INFINITE, Band

TILE = 128  # rows, and keys, of a tile
NONE, ALL = -1, -2  # entries for a tile without visible keys, and for one with all keys visible
_CHUNK = 64  # tiles per evaluation: 8 MiB of positions
_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Visible:
    """The visible keys of all queries: as a Band (range around the diagonal) if one equals the mask, and as tiles."""

    band: Band | None  # equals the mask, together with q_len and kv_len; None if there is no such band
    # Lengths of the items, or of the sequences of all items (`packed`), the first item's first; None: all tokens.
    q_len: list[int] | None = None
    kv_len: list[int] | None = None
    packed: bool = False  # items consist of several sequences
    aligned: bool = True  # every sequence's keys begin at the index of its queries, so that distances do not change
    past: bool = False  # no query sees a key after itself
    # The mask in tiles of 128 x 128: tile numbers, and the bits of mixed tiles (the arguments blocked_tiles and
    # blocked_bits of attention()); None if no tile was evaluated.
    tiles: Tensor | None = None
    bits: Tensor | None = None

    def blocked(self, rows: int, keys: int) -> Tensor:
        """Returns the mask as bool [B or 1, N or 1, rows, keys], true for an invisible key, from its tiles."""
        assert self.tiles is not None
        assert self.bits is not None
        full = torch.stack([torch.full((TILE, TILE // 8), fill, dtype=torch.uint8) for fill in (0, 255)])
        bits = torch.cat([self.bits, full])[self.tiles.long()]  # ALL (-2) and NONE (-1) index the last two
        pairs = np.unpackbits(bits.numpy(), axis=5, bitorder="little").astype(bool)
        pairs = pairs.transpose(0, 1, 2, 4, 3, 5)
        b, n, down, _, across, _ = pairs.shape
        return torch.from_numpy(pairs.reshape(b, n, down * TILE, across * TILE)[:, :, :rows, :keys])


# ------------------------------------------------------------------------------------------------------------- masks


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention call (batch, query heads, queries, keys); device on which mask_mod and score_mod run."""

    items: int
    heads: int
    rows: int
    keys: int
    device: torch.device


def of_block_mask(mask: Any, shape: Shape) -> Visible:
    """Returns the keys that torch's BlockMask shows to each query, as a band or as 128 x 128 tiles."""
    grid, block = _grid(mask, shape)
    return _visible_of(_tiled(mask.mask_mod, grid, block, shape), shape)


def of_function(mod: mods.Mod, shape: Shape) -> Visible:
    """Returns the keys that a mask_mod shows to each query, as a band or as 128 x 128 tiles."""
    relative = _relative(mod, shape)
    if relative is not None:
        return relative
    grid = np.ones((1, 1, 1, 1), np.int8)
    return _visible_of(_tiled(mod, grid, (shape.rows, shape.keys), shape), shape)


def _grid(mask: Any, shape: Shape) -> tuple[np.ndarray, tuple[int, int]]:
    """Returns (state of every block [B or 1, N or 1, of queries, of keys], (queries, keys) of a block) of torch's
    BlockMask; states are 0 (no key visible), 1 (the mask function decides) and 2 (all visible)."""
    rows, keys = (max(1, min(size, n)) for size, n in zip(mask.BLOCK_SIZE, (shape.rows, shape.keys), strict=True))
    down, across = -(-shape.rows // rows), -(-shape.keys // keys)
    partial = _blocks(mask.kv_num_blocks, mask.kv_indices, down, across)
    grid = partial.astype(np.int8)
    if mask.full_kv_num_blocks is not None:
        full = _blocks(mask.full_kv_num_blocks, mask.full_kv_indices, down, across)
        grid = np.where(full, np.int8(2), grid)
    from torch.nn.attention.flex_attention import noop_mask  # already loaded with the mask

    if mask.mask_mod is noop_mask:
        grid = np.where(grid == 1, np.int8(2), grid)
    for name, size, expected in (("batch size", grid.shape[0], shape.items), ("heads", grid.shape[1], shape.heads)):
        if size not in (1, expected):
            raise ValueError(
                f"flex_attention: block_mask: expected a mask of 1 or {expected} as its {name}, like the query, "
                f"got {size}; make it with create_block_mask(mask_mod, B, H, ...) for this query, or with None "
                "in that place"
            )
    return grid, (rows, keys)


def _blocks(counts: Tensor, indices: Tensor, down: int, across: int) -> np.ndarray:
    """Returns bool [B or 1, N or 1, down, across], true for the blocks that a BlockMask lists; counts: entries per row
    of `indices`; down, across: numbers of blocks of queries and of keys."""
    numbers, positions = counts.detach().cpu().numpy(), indices.detach().cpu().numpy()
    while numbers.ndim < 3:
        numbers, positions = numbers[None], positions[None]
    if numbers.shape[2] < down or positions.shape[:3] != numbers.shape:
        raise ValueError(
            f"flex_attention: block_mask: expected at least {down} rows of blocks for this query, got kv_num_blocks "
            f"{tuple(counts.shape)} and kv_indices {tuple(indices.shape)}; create the mask again for these lengths"
        )
    numbers, positions = numbers[:, :, :down], positions[:, :, :down]
    valid = np.arange(positions.shape[3]) < numbers[..., None]
    if ((positions < 0) | (positions >= across))[valid].any() or (numbers > positions.shape[3]).any():
        raise ValueError(
            f"flex_attention: block_mask: expected block numbers from 0 to {across - 1}, got others in kv_indices; "
            "create the mask again for these lengths"
        )
    listed = np.zeros((*positions.shape[:3], across + 1), bool)
    np.put_along_axis(listed, np.where(valid, positions, across).astype(np.int64), True, axis=3)
    return listed[..., :across]


# ------------------------------------------------------------------------------------------------------------- tiles


@dataclass
class _Rows:
    """The 128 x 128 tiles of a mask, and the visible keys of each query."""

    tiles: np.ndarray  # int32 [B or 1, N or 1, tiles down, tiles across]: NONE or ALL visible, or the index in bits
    bits: np.ndarray  # uint8 [n, TILE, TILE // 8], bit 1 for hidden, of the distinct tiles with hidden and visible keys
    first: np.ndarray  # int64 [B or 1, N or 1, rows]: a row's first visible key
    end: np.ndarray  # the end after its last one, in the same shape
    count: np.ndarray  # number of its visible keys, in the same shape


def _tiled(mod: mods.Mod, grid: np.ndarray, block: tuple[int, int], shape: Shape) -> _Rows:
    """Returns the 128 x 128 tiles of a mask and each query's visible keys; `mod` runs only in tiles that overlap a
    partial block. grid: states of the blocks; block: (queries, keys) of a block."""
    if (grid == 1).any():  # size 1 of the batch and of the heads becomes the call's if `mod` depends on them
        sizes = list(grid.shape)
        for axis, size in enumerate((shape.items, shape.heads)):
            if sizes[axis] < size and mods.depends(mod, axis, shape.device):
                sizes[axis] = size
        grid = np.broadcast_to(grid, sizes)
    low, high = (_per_tile(grid, block, shape, fold) for fold in (np.minimum, np.maximum))
    tiles = np.where(high == 0, NONE, ALL).astype(np.int32)
    result = _Rows(tiles, np.zeros((0, TILE, TILE // 8), np.uint8), *_of_full_tiles(low == 2, shape))
    number_of: dict[bytes, int] = {}
    distinct: list[np.ndarray] = []
    open_tiles = np.argwhere((low != 2) & (high != 0))
    for at in np.array_split(open_tiles, -(-len(open_tiles) // _CHUNK)) if len(open_tiles) else ():
        visible, inside = _evaluated(mod, at, grid, block, shape)
        _note_rows(result, at, visible)
        hidden = np.packbits(~visible, axis=2, bitorder="little")
        some_seen, all_seen = np.any(visible, (1, 2)).tolist(), np.all(visible | ~inside, (1, 2)).tolist()
        for place, bits, some, every in zip(map(tuple, at), hidden, some_seen, all_seen, strict=True):
            if some and not every:
                text = bits.tobytes()
                if text not in number_of:
                    number_of[text] = len(distinct)
                    distinct.append(bits)
                tiles[place] = number_of[text]
            else:
                tiles[place] = ALL if some else NONE
    if distinct:
        result.bits = np.stack(distinct)
    for name in ("first", "end", "count"):  # the last tile may exceed the rows
        setattr(result, name, getattr(result, name)[..., : shape.rows])
    return result


def _per_tile(grid: np.ndarray, block: tuple[int, int], shape: Shape, fold: Any) -> np.ndarray:
    """Returns [B, N, tiles down, tiles across]: fold (np.minimum or np.maximum) of the states in `grid` of the blocks
    that overlap each 128 x 128 tile; block: (queries, keys) of a block."""
    for axis, size, length in ((2, block[0], shape.rows), (3, block[1], shape.keys)):
        starts = np.arange(0, length, TILE)
        ends = (np.minimum(starts + TILE, length) - 1) // size + 1
        bounds = np.stack([starts // size, ends], 1).ravel()
        padded = np.concatenate([grid, np.take(grid, [-1], axis)], axis)  # an end may be after the last block
        grid = np.take(fold.reduceat(padded, bounds, axis), np.arange(0, len(bounds), 2), axis)
    return grid


def _of_full_tiles(is_full: np.ndarray, shape: Shape) -> tuple[np.ndarray, ...]:
    """Returns (first visible key, end after the last one, number of visible keys) of each query, int64 [B, N, queries],
    counting only keys in full tiles. is_full: bool [B, N, tiles down, tiles across]."""
    starts = np.arange(0, shape.keys, TILE)
    ends = np.minimum(starts + TILE, shape.keys)
    first = np.where(is_full, starts, _FAR).min(-1, initial=_FAR)
    end = np.where(is_full, ends, 0).max(-1, initial=0)
    count = np.where(is_full, ends - starts, 0).sum(-1)
    first, end, count = (np.repeat(a.astype(np.int64), TILE, axis=-1) for a in (first, end, count))
    return first, end, count


def _evaluated(
    mod: mods.Mod, at: np.ndarray, grid: np.ndarray, block: tuple[int, int], shape: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """Returns two bool [n, TILE, TILE]: the visible keys of n tiles, and the entries within the mask's queries and
    keys. at: int [n, 4], (batch, head, tile down, tile across); grid: states of blocks of (queries, keys) `block`."""
    rows, keys = (at[:, axis, None] * TILE + np.arange(TILE) for axis in (2, 3))
    inside = (rows < shape.rows)[:, :, None] & (keys < shape.keys)[:, None, :]
    rows, keys = np.minimum(rows, shape.rows - 1), np.minimum(keys, shape.keys - 1)
    where = grid[
        at[:, 0, None, None], at[:, 1, None, None], (rows // block[0])[:, :, None], (keys // block[1])[:, None, :]
    ]
    item, head, row, key = (torch.from_numpy(a).to(shape.device) for a in (at[:, 0], at[:, 1], rows, keys))
    with torch.no_grad():
        answer = mods.at_pairs(mod, item, head, row, key)
    if answer.shape != inside.shape or answer.dtype != torch.bool:
        raise ValueError(
            "flex_attention: block_mask: expected a mask_mod that returns one bool for four positions, got "
            f"{answer.dtype} of shape {tuple(answer.shape[3:])}"
        )
    return inside & ((where == 2) | (where == 1) & answer.cpu().numpy()), inside


def _note_rows(rows: _Rows, at: np.ndarray, visible: np.ndarray) -> None:
    """Adds the visible keys of n tiles, bool [n, 128, 128], to the first, end and count of visible keys of each query
    in `rows`. at: int [n, 4], the batch item, head, tile row and tile column of each tile."""
    count = visible.sum(2)
    first = visible.argmax(2) + at[:, 3, None] * TILE
    end = (TILE - visible[:, :, ::-1].argmax(2)) + at[:, 3, None] * TILE
    item, head = at[:, 0, None], at[:, 1, None]
    row = at[:, 2, None] * TILE + np.arange(TILE)
    np.add.at(rows.count, (item, head, row), count)
    np.minimum.at(rows.first, (item, head, row), np.where(count > 0, first, _FAR))
    np.maximum.at(rows.end, (item, head, row), np.where(count > 0, end, 0))


# ------------------------------------------------------------------------------------------------------------- bands


def _visible_of(rows: _Rows, shape: Shape) -> Visible:
    """Returns a mask (tiles and visible keys `rows`) as a band if one equals it, padded or packed, else as tiles."""
    row = np.arange(shape.rows)
    past = bool((rows.end <= row + 1).all())
    tiles, bits = torch.from_numpy(rows.tiles), torch.from_numpy(rows.bits)
    fields: dict[str, Any] = {"past": past, "tiles": tiles, "bits": bits}
    empty = rows.count == 0
    first, end = np.where(empty, 0, rows.first), np.where(empty, 0, rows.end)
    alike = (first == first[:, :1]).all() and (end == end[:, :1]).all()
    if alike and bool((empty | (end - first == rows.count)).all()):
        first, end = first[:, 0], end[:, 0]
        for read in (_padded, _packed):
            fields.update(read(first, end, shape) or {})
            if fields.get("band") is not None:
                break
    return Visible(**{"band": None, **fields})


def _padded(first: np.ndarray, end: np.ndarray, shape: Shape) -> dict[str, Any] | None:
    """Returns the band (and lengths) that equal a mask of padded items, as fields of Visible; None if no band does.
    first, end: [B or 1, queries], each query's first visible key and the end after its last."""
    items, rows = first.shape
    item, row = np.divmod(np.arange(items * rows), rows)
    edges = _Edges(first.ravel(), end.ravel(), item, row)
    band = _band(edges, np.full(items, rows), np.full(items, shape.keys))
    if band is not None:
        return {"band": _of_all(band, shape)}
    q_len = np.where(end > 0, np.arange(1, rows + 1), 0).max(1, initial=0)
    kv_len = end.max(1, initial=0)
    band = _band(edges, q_len, kv_len)
    if band is None:
        return None
    lengths = (np.broadcast_to(n, shape.items).tolist() for n in (q_len, kv_len))
    return {"band": _of_all(band, shape), **dict(zip(("q_len", "kv_len"), lengths, strict=True))}


def _of_all(band: Band, shape: Shape) -> Band:
    """Returns one item's band for all items of the batch: repeats the prefix length, which is per item."""
    if len(band.prefix) == 1:
        return Band(band.lo, band.hi, band.align, band.prefix * shape.items)
    return band


def _packed(first: np.ndarray, end: np.ndarray, shape: Shape) -> dict[str, Any] | None:
    """Returns the band and lengths of packed sequences that equal a mask, as fields of Visible; None if no band does.
    first, end: [B or 1, queries], each query's first visible key and the end after its last."""
    sequences = [segment for item in zip(first, end, strict=True) for segment in _sequences_of(*item, shape.keys)]
    begin, q_len, start, kv_len = (np.array(column) for column in zip(*sequences, strict=True))
    sequence = np.repeat(np.arange(len(sequences)), q_len)
    row = np.tile(np.arange(shape.rows), len(first)) - begin[sequence]
    visible = end.ravel() > 0
    local_first, local_end = (np.where(visible, e.ravel() - start[sequence], 0) for e in (first, end))
    edges = _Edges(local_first, local_end, sequence, row)
    band = _band(edges, q_len, kv_len)
    if band is None or band.prefix:
        return None
    repeat = shape.items // len(first)
    aligned = bool((begin == start)[(q_len > 0) & (kv_len > 0)].all())
    lengths = {"q_len": q_len.tolist() * repeat, "kv_len": kv_len.tolist() * repeat}
    return {"band": band, **lengths, "packed": True, "aligned": aligned}


def _sequences_of(first: np.ndarray, end: np.ndarray, keys: int) -> list[tuple[int, int, int, int]]:
    """Splits a batch item into sequences (first query, queries, first key, keys) whose queries see only their own keys.
    Queries without keys, and keys that no query sees, become separate sequences."""
    rows = len(first)
    empty = end == 0
    behind = np.maximum.accumulate(end)
    ahead = np.minimum.accumulate(np.where(empty, keys, first)[::-1])[::-1]
    splits = behind[:-1] <= ahead[1:]
    splits &= ~(empty[:-1] & empty[1:])
    edges = [0, *(np.flatnonzero(splits) + 1).tolist(), rows]
    sequences, key = [], 0
    for begin, stop in pairwise(edges):
        visible = ~empty[begin:stop]
        if not visible.any():
            sequences.append((begin, stop - begin, key, 0))
            continue
        start, last = int(first[begin:stop][visible].min()), int(end[begin:stop].max())
        if start > key:
            sequences.append((begin, 0, key, start - key))
        sequences.append((begin, stop - begin, start, last - start))
        key = last
    if key < keys:
        sequences.append((rows, 0, key, keys - key))
    return sequences


class _Edges(NamedTuple):
    """For each query of all sequences: its visible keys first <= j < end (0, 0: none), the number of its sequence, and
    its index in the sequence; int64 [queries]."""

    first: np.ndarray
    end: np.ndarray
    sequence: np.ndarray
    row: np.ndarray


def _band(edges: _Edges, q_len: np.ndarray, kv_len: np.ndarray) -> Band | None:
    """Returns the band in which every query sees exactly the keys of `edges`, and queries after q_len see none; None if
    no band does. q_len, kv_len: int [sequences]."""
    square = bool((q_len == kv_len).all())
    for align in ("end", "start") if square else ("start", "end"):  # prefers the shorter description
        for band in _candidates(edges, q_len, kv_len, align):
            if _is(band, edges, q_len, kv_len):
                return band
    return None


def _candidates(edges: _Edges, q_len: np.ndarray, kv_len: np.ndarray, align: str) -> Iterator[Band]:
    """Yields the bands that may equal the visible keys `edges`; their limits follow from queries that do not see the
    first or the last key. align: "start" or "end", the corner where the bands' diagonals begin."""
    first, end, sequence, row = edges
    keys = kv_len[sequence]
    diagonal = row + (keys - q_len[sequence] if align == "end" else 0)
    visible = end > first
    left = np.unique((first - diagonal)[visible & (first > 0)])
    right = np.unique((end - diagonal)[visible & (end < keys)])
    lo = int(left[0]) if len(left) else -INFINITE
    if len(left) > 1:
        return
    if len(right) <= 1:
        yield Band(lo, int(right[0]), align) if len(right) else Band(lo, align=align) if len(left) else Band.full()
    elif not len(left):
        prefix = kv_len.copy()
        np.minimum.at(prefix, sequence, np.where(visible, end, keys))
        right = np.unique((end - diagonal)[visible & (end < keys) & (end > prefix[sequence])])
        if len(right) == 1:
            yield Band(-INFINITE, int(right[0]), align, tuple(prefix.tolist()))


def _is(band: Band, edges: _Edges, q_len: np.ndarray, kv_len: np.ndarray) -> bool:
    """True if every query sees exactly the keys `edges` in a band; q_len, kv_len: int [sequences]."""
    first, end, sequence, row = edges
    lo, hi, prefix = (edge[sequence] for edge in band.resolve(q_len, kv_len))
    left = np.maximum(0, row + lo)
    right = np.minimum(kv_len[sequence], np.maximum(prefix, row + hi))
    visible = (right > left) & (row < q_len[sequence])
    return bool((np.where(visible, left, 0) == first).all() and (np.where(visible, right, 0) == end).all())


# ---------------------------------------------------------------------------------------------------------- functions


def _relative(mod: mods.Mod, shape: Shape) -> Visible | None:
    """Returns the band that equals the mask function `mod`; None if `mod` does not depend on row - key alone."""
    distances = torch.arange(1 - shape.keys, shape.rows, device=shape.device)
    zero = torch.zeros(1, dtype=torch.int64, device=shape.device)

    def alone(b: Any, h: Any, row: Any, key: Any) -> Any:
        return mod(_Unreadable(), _Unreadable(), row, key)

    with torch.no_grad():
        answer = mods.by_distance(alone, zero, zero, distances)
    if answer is None or answer.dtype != torch.bool or answer.shape != (1, len(distances)):
        return None
    near = np.flatnonzero(answer[0].cpu().numpy()) + 1 - shape.keys  # distances of visible keys
    if not len(near) or near[-1] - near[0] + 1 != len(near):
        return None
    lo = -INFINITE if near[-1] == shape.rows - 1 else -int(near[-1])
    hi = INFINITE if near[0] == 1 - shape.keys else 1 - int(near[0])
    return Visible(Band(lo, hi, "end" if shape.rows == shape.keys else "start"), past=hi <= 1)


class _Unreadable(mods.Position):
    """Stands for a batch or head index on which a mask function may not depend: any operation on it raises an error."""

    def __init__(self) -> None:
        super().__init__(None)

    __add__ = __radd__ = __sub__ = mods.Position.__getattr__
