"""Launches of the indexer's loss and statistics over all keys of a band: ranges of keys, chunks of rows, scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common import launching, layout_table, shapes
from fusion_attention.backends.triton.common.layout_table import CallMemory
from fusion_attention.backends.triton.indexer import dense_kl_loss, loss_parts, shapes_loss
from fusion_attention.ir import tiles
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import Extents, IndexerLossProblem, IndexerOperands, IndexerProblem

BUFFER = 1 << 25  # (row, key) differences per chunk, in float32: 128 MiB
KEYS_PER_SPLIT = 4096  # keys per program of the statistics
SPLITS = 4  # groups of the indexer's heads whose gradients of keys are summed in parallel
MOST = 1 << 15  # most tiles or rows per chunk: the second axis of a grid has fewer than 65536 programs
FINISH = shapes.Tile(0, 0, 16, 1)  # warps of the kernel that writes keys: fewer spill registers
NOTE = shapes.Tile(0, 0, 4, 1)  # warps and stages of kernels without matrix products
FAMILY = launching.Family(
    dense_kl_loss.warm_lse, dense_kl_loss.join_lse, dense_kl_loss.warm_target, dense_kl_loss.warm_given,
    dense_kl_loss.warm_difference, dense_kl_loss.warm_query, dense_kl_loss.warm_key, loss_parts.note,
    loss_parts.clean_keys, loss_parts.finish_keys,
)  # fmt: skip


def turns_of(e: Extents, tile: shapes.Tile, ratio: int = 1) -> tuple[tiles.Tiles, np.ndarray, np.ndarray]:
    """Returns (tiles of query rows, first key and number of tiles of keys that each reads); ratio: tokens per key."""
    t = tiles.by_query(e, tile.BM, ratio)
    begin = t.begin // tile.BN * tile.BN
    return t, begin, np.where(t.end > t.begin, -(-(t.end - begin) // tile.BN), 0)


def most_turns(capacity: Extents, tile: shapes.Tile, ratio: int = 1) -> np.ndarray:
    """Returns int [tiles]: the most tiles of keys that each tile of query rows reads, for all key lengths up to
    `capacity`, to which a schedule may be updated.

    Bands move with the last key and get no wider, but a band with a lower limit may then touch one more tile.
    """
    t, _, turns = turns_of(capacity, tile, ratio)
    across = np.minimum((t.end - t.begin + 2 * tile.BN - 2) // tile.BN, -(-capacity.kv_len[t.seq] // tile.BN))
    return np.where((capacity.lo[t.seq] > -INFINITE // 2) & (turns > 0), across, turns)


# ---------------------------------------------------------------------------------------------------------- statistics


def run_lse(problem: IndexerProblem, extents: Extents, schedule: launching.Schedule, o: IndexerOperands) -> None:
    """Writes max and sum of the softmax of the indexer's scores, of each row over all keys that it sees, to o.stats."""
    assert o.stats is not None
    views: dict[str, layout_table.View | None] = {
        "q": o.q, "k": o.k, "weights": o.weights, "max": o.stats.max, "sum": o.stats.sum
    }  # fmt: skip
    given = layout_table.tensors(views)
    layout = layout_table.layout(views, given)
    schedule.once(layout, lambda: ready_lse(problem, CallMemory(views, given, schedule.device_tables))).run(given)


def key_ranges(e: Extents, tile: shapes.Tile, ratio: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns two tables, int32 [.., 8]: one with an entry for every range of keys of every tile of query rows, one
    with an entry for every tile of query rows.

    An entry has the sequence, first row and end, first key, number of tiles of keys, number of the range (in the second
    table, number of ranges), 0, and the tile's first row among the rows of all sequences.
    """
    (t, begin, turns), most = turns_of(e, tile, ratio), max(KEYS_PER_SPLIT // tile.BN, 1)
    count = -(-turns // most)
    of = np.repeat(np.arange(len(t)), count)
    split = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    none, flat = np.zeros_like(count), e.first_query[t.seq] + t.row0
    left = np.minimum(turns[of] - split * most, most)
    columns = t.seq[of], t.row0[of], t.row1[of], begin[of] + split * KEYS_PER_SPLIT, left, split, none[of], flat[of]
    order = np.argsort(-left, kind="stable")
    full = t.seq, t.row0, t.row1, begin, turns, count, none, flat
    return np.stack(columns, 1)[order].astype(np.int32), np.stack(full, 1).astype(np.int32)


def most_ranges(capacity: Extents, tile: shapes.Tile, ratio: int) -> np.ndarray:
    """Returns int [tiles]: the most ranges into which the keys of each tile of query rows are split, for all key
    lengths up to `capacity`, to which a schedule may be updated."""
    return -(-most_turns(capacity, tile, ratio) // max(KEYS_PER_SPLIT // tile.BN, 1))


def ready_lse(p: IndexerProblem, m: CallMemory) -> launching.Ready:
    """Returns the prepared kernel launches of the indexer's softmax statistics, for one memory layout."""
    e, device, align = m.capacity, m.device, m.align
    tile = shapes.on(device, shapes_loss.warm_tiles, p, align).lse
    buffer = int(most_ranges(e, tile, p.ratio).sum())
    constexprs = {"E": shapes.power(p.dim), "DIM": p.dim, "RATIO": p.ratio, "ALIGN": align}
    constexprs |= {"BM": tile.BM, "BN": tile.BN}

    def range_table(e: Extents) -> np.ndarray:
        return layout_table.padded(key_ranges(e, tile, p.ratio)[0], buffer)

    of_ranges = m.on(f"ranges {tile}", range_table)
    of_rows = m.on(f"joined {tile}", lambda e: key_ranges(e, tile, p.ratio)[1])
    split_tiles, full, rows = of_ranges.tensor, of_rows.tensor, int(e.q_len.sum())
    numbers = m.fixed | {"heads": p.heads, "plane": rows}
    names = [*m.given, "partial"]
    launches = [
        FAMILY.launch(kernel, (len(listed),), numbers | {"tiles": listed}, names, constexprs, tile)
        for kernel, listed in ((dense_kl_loss.warm_lse, split_tiles), (dense_kl_loss.join_lse, full))
        if len(listed)
    ]
    return launching.Ready(launches, (m.strides, m.lengths, of_ranges, of_rows), lse_buffers(p, e, tile))


def lse_buffers(p: IndexerProblem, capacity: Extents, tile: shapes.Tile) -> dict[str, launching.Scratch]:
    """Returns {"partial": shape}, run_lse()'s temporary tensor: max and sum of every row over every range of keys."""
    most = int(most_ranges(capacity, tile, p.ratio).max(initial=0))
    return {"partial": launching.Scratch((2 * int(capacity.q_len.sum()) * most,))}


# ------------------------------------------------------------------------------------------------ loss without lists


class Chunk(NamedTuple):
    """Adjacent tiles of query rows whose y - p (indexer's minus attention's probabilities, one block per pair of tiles
    of rows and keys) are in scratch memory at the same time."""

    first_tile: int
    tiles: int
    first_block: int
    blocks: int
    turns: int  # most tiles of keys of any of its tiles of rows


def chunks(turns: np.ndarray, most: int) -> list[Chunk]:
    """Divides tiles of query rows, in order, into chunks with at most `most` blocks (pairs with a tile of keys), or of
    one tile; turns: number of blocks of each tile."""
    results: list[Chunk] = []
    first, block = 0, 0
    ends = np.cumsum(turns)
    while first < len(turns):
        end = max(int(np.searchsorted(ends, block + most, side="right")), first + 1)
        end = min(end, first + MOST)
        last = int(ends[end - 1])
        results.append(Chunk(first, end - first, block, last - block, int(turns[first:end].max())))
        first, block = end, last
    return results


@dataclass(eq=False)
class Work:
    """The division of the indexer's loss over all visible keys: chunks of tiles of query rows, for the largest lengths,
    and tables of tiles for current lengths."""

    tile: shapes.Tile
    ratio: int
    buffer: np.ndarray  # per tile of rows: most tiles of keys
    chunks: list[Chunk]
    block: np.ndarray  # per tile of rows: its first block of differences in its chunk
    key_at: np.ndarray  # per sequence: its first row in the sums of keys
    padded_keys: int

    @classmethod
    def of(cls, capacity: Extents, tile: shapes.Tile, ratio: int = 1) -> Work:
        """Returns the Work (chunks, tiles) for the largest lengths, `capacity`; ratio: tokens that a key represents."""
        buffer = most_turns(capacity, tile, ratio)
        ranges = chunks(buffer, BUFFER // (tile.BM * tile.BN))
        block = np.cumsum(buffer) - buffer - np.repeat([c.first_block for c in ranges], [c.tiles for c in ranges])
        lines = -(-capacity.kv_len // tile.BN) * tile.BN
        return cls(tile, ratio, buffer, ranges, block.astype(np.int64), np.cumsum(lines) - lines, int(lines.sum()))

    def rows(self, e: Extents) -> np.ndarray:
        """Returns the table of tiles of query rows, int32 [tiles, 8], for the lengths `e`, at most the planned ones.

        Columns: sequence, first row, end, first key, tiles of keys, first block of y - p in the chunk, index of the
        first key in the buffer of dk, and the first row's number among the rows of all sequences.
        """
        t, begin, turns = turns_of(e, self.tile, self.ratio)
        assert (turns <= self.buffer).all()  # more would write into the blocks of other tiles
        at = self.key_at[t.seq] + begin
        rows = t.seq, t.row0, t.row1, begin, turns, self.block, at, e.first_query[t.seq] + t.row0
        return np.stack(rows, 1).astype(np.int32)

    def keys(self, e: Extents) -> np.ndarray:
        """Returns the table of tiles of keys, int32 [tiles, 8], for the lengths `e`, at most the planned ones.

        Columns: sequence, first key, end, first and end of the tiles of rows that see it, index in dk's buffer, BN, 0.
        """
        t, k = tiles.by_query(e, self.tile.BM, self.ratio), tiles.by_key(e, self.tile.BN, self.ratio)
        stride = np.int64(1) << 32
        starts = t.seq * stride + t.row0
        first, end = (np.searchsorted(starts, k.seq * stride + row, side="right") - 1 for row in (k.begin, k.end - 1))
        some = k.end > k.begin
        lines_of, none = np.full_like(first, self.tile.BN), np.zeros_like(first)
        at = self.key_at[k.seq] + k.row0
        keys = k.seq, k.row0, k.row1, np.where(some, first, 0), np.where(some, end + 1, 0), at, lines_of, none
        return np.stack(keys, 1).astype(np.int32)


def warm_constants(
    p: IndexerLossProblem, t: shapes_loss.Warm, align: int
) -> tuple[launching.Constants, dict[str, launching.Constants]]:
    """Returns compile-time arguments of the indexer's loss over all visible keys: (those of all kernels, of which each
    takes its own; kernel name -> those that only this kernel has). align: alignment of rows, in elements."""
    shared = {
        "E": shapes.power(p.dim_index), "DIM_INDEX": p.dim_index, "GROUP": p.heads_q // max(p.heads_kv, 1),
        "DIM": p.dim_qk, "DIM_ROPE": p.dim_rope, "RATIO": p.ratio, "GIVEN": p.has_target, "SPLITS": SPLITS,
        "ALIGN": align, "BM": t.target.BM, "BN": t.target.BN, "BC": t.columns, "BR": t.key.BM,
    }  # fmt: skip
    unit = loss_parts.UNIT.value if p.dtype == "float16" else 1.0
    given = {"UNIT": float(p.unit_target), "BK": 16}
    return shared, {"warm_given": given, "warm_query": {"UNIT": unit, "BK": t.query.BN}}


def ready_warm(p: IndexerLossProblem, m: CallMemory) -> launching.Ready:
    """Returns the prepared kernel launches of the indexer's loss over all visible keys, for one memory layout."""
    e, device, align, given = m.capacity, m.device, m.align, m.given
    t = shapes.on(device, shapes_loss.warm_tiles, p, align)
    work, (constexprs, of_kernel) = Work.of(e, t.target, p.ratio), warm_constants(p, t, align)
    tables = m.strides, m.lengths, m.on(f"rows {t.target}", work.rows), m.on(f"keys {t.target}", work.keys)
    of_rows, of_keys = (each.tensor for each in tables[2:])
    width, rows = shapes.power(p.dim_index), int(e.q_len.sum())
    plane = {"step_head": rows, "step_row": 1, "plane": rows}
    fixed = m.fixed | plane | {
        "heads_q": p.heads_q, "heads_index": p.heads_index, "tiles": of_rows, "exponent": p.scale * common.LOG2E.value,
        **{name: None for name in ("q_rope", "k_rope", "sink", "largest", "target", "values") if name not in given},
    }  # fmt: skip
    added = {"plane": work.padded_keys * width}
    buffers = buffers_of(p, work, t.target, width, rows)
    if "largest" in buffers:
        del fixed["largest"]
    names = [*given, *buffers]
    launches: list[launching.Launch] = []

    def launch(kernel: Any, grid: tuple[int, ...], tile: shapes.Tile, **more: Any) -> None:
        values = constexprs | of_kernel.get(kernel.__name__, {})
        launches.append(FAMILY.launch(kernel, grid, fixed | more, names, values, tile))

    if len(of_rows) and (not p.has_target or "largest" in buffers):
        launch(loss_parts.note, (len(of_rows),), NOTE)
    if len(of_keys):
        launch(loss_parts.clean_keys, (len(of_keys),), NOTE, tiles=of_keys)
    for c in work.chunks:
        chunk = {"first_tile": c.first_tile, "tiles_of_chunk": c.tiles, "first_block": c.first_block}
        if c.turns:
            if not p.has_target:
                launch(dense_kl_loss.warm_target, (c.turns, c.tiles), t.target, **chunk)
            launch(dense_kl_loss.warm_difference, (c.turns, c.tiles), t.difference, **chunk)
            if p.has_target:
                launch(dense_kl_loss.warm_given, (c.tiles,), NOTE, **chunk)
        launch(dense_kl_loss.warm_query, (c.tiles, p.heads_index), t.query, **chunk)
        if len(of_keys):
            launch(dense_kl_loss.warm_key, (len(of_keys), SPLITS), t.key, key_tiles=of_keys, **chunk, **added)
    if len(of_keys):
        launch(loss_parts.finish_keys, (len(of_keys),), FINISH, **added, tiles=of_keys)
    return launching.Ready(launches, tables, buffers)


def buffers_of(
    p: IndexerLossProblem, work: Work, tile: shapes.Tile, width: int, rows: int
) -> dict[str, launching.Scratch]:
    """Returns {kernel argument name: temporary tensor's shape} for the indexer's loss over all visible keys; tile: BM
    rows and BN keys of a block; width: padded elements of a key; rows: query rows of all sequences."""
    most = max((c.tiles for c in work.chunks), default=0) * tile.BM * p.heads_index
    blocks = max((c.blocks for c in work.chunks), default=0)
    results = {
        "notes": launching.Scratch(((p.heads_q + 1) * rows,)),
        "keys": launching.Scratch((work.padded_keys * width,), p.torch_dtype),
        "differences": launching.Scratch((blocks * tile.BM * tile.BN,)),
        "rows": launching.Scratch((most * width,), p.torch_dtype),
        "factors": launching.Scratch((most,)),
        "added": launching.Scratch((SPLITS * work.padded_keys * width,), cleared=True),
        "losses": launching.Scratch((int(work.buffer.sum()),), cleared=True),
    }
    return results | ({"largest": launching.Scratch((1,), torch.int32, True)} if p.dtype == "float16" else {})


def warm_bytes(p: IndexerLossProblem, e: Extents) -> int:
    """Returns the most bytes of scratch of the indexer's loss over all visible keys, for any alignment of rows (which
    selects tiles) and the largest sequence lengths `e`."""
    width, rows = shapes.power(p.dim_index), int(e.q_len.sum())
    served = {shapes.on(torch.device("cuda"), shapes_loss.warm_tiles, p, align).target for align in (8, 1)}
    return max(launching.bytes_of(buffers_of(p, Work.of(e, tile, p.ratio), tile, width, rows)) for tile in served)
