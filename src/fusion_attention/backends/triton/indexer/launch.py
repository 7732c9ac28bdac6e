"""Launches of the lightning indexer: the choice of keys, chunk of rows by chunk of rows, and the values' gradient.

A chunk's scores and candidates lie in a workspace of bounded size. A row's choice depends on its own scores alone, and
sums per key are taken up where they were left, so the number of chunks changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusion_attention.backends.triton.common import launching, layout_table, shapes
from fusion_attention.backends.triton.common import layout_index as all_views
from fusion_attention.backends.triton.common.shapes import Tile
from fusion_attention.backends.triton.decode import launch as launch_decode
from fusion_attention.backends.triton.indexer.choice import NO_ENTRY, index_choice, index_write
from fusion_attention.backends.triton.indexer.gradient import index_gradient, recompute_gradient
from fusion_attention.backends.triton.indexer.scores import index_scores
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.backends.triton.selected.launch import tokens
from fusion_attention.backends.triton.selected.launch_key_sum import (
    BYTES_OF_ENTRY,
    KeySum,
    Where,
    key_tiles,
    numbered,
    whole_blocks,
)
from fusion_attention.backends.triton.selected.launch_key_sum import workspace_bytes as sum_bytes
from fusion_attention.backends.triton.selected.selection import read_lists
from fusion_attention.backends.triton.selected.shapes import Sizes
from fusion_attention.backends.triton.selected.shapes_backward import ENTRIES, LISTS
from fusion_attention.contract import BackendError
from fusion_attention.ir.kv import PagedView
from fusion_attention.ir.problem import Extents, IndexerGrads, IndexerOperands, IndexerProblem
from fusion_attention.memory import empty

Constants = launching.Constants
CHUNK = 1 << 27  # bytes of a chunk's scores and candidates, or of the rows that it gives to keys; at least one tile's
MOST = 65535  # programs along the second axis of a grid
CHOICE = launching.Family(index_scores, index_choice, index_write)
RENAMED = {"q": "index_q", "k": "index_k", "dvalues": "dscores"}  # as the gradient's kernels call them
GRADIENT = launching.Family(read_lists, index_gradient, recompute_gradient)


# ---------------------------------------------------------------------------------------------------------- the choice


def candidates(top_k: int, block: int) -> int:
    """How many candidates of a row there is memory for: it is sorted out once so many of its scores are larger."""
    return -(-(top_k + max(shapes_sparse.CANDIDATES, top_k // 2, block)) // block) * block


def row_tiles(extents: Extents) -> np.ndarray:
    """[tiles, 8] int32: seq, row0 and row1 of every few rows."""
    size = shapes_sparse.SCORED
    turns = -(-extents.q_len // size)
    seq = np.repeat(np.arange(len(extents)), turns)
    row0 = (np.arange(len(seq)) - np.repeat(np.cumsum(turns) - turns, turns)) * size
    table = np.zeros((len(seq), layout_table.TILE_FIELDS), np.int32)
    table[:, 0], table[:, 1], table[:, 2] = seq, row0, np.minimum(row0 + size, extents.q_len[seq])
    return table


def ends_of(extents: Extents, tiles: np.ndarray, ratio: int) -> np.ndarray:
    """The end of the keys that some row of a tile sees."""
    e, seq = extents, tiles[:, 0]
    return np.clip(np.maximum((tiles[:, 2] - 1 + e.hi[seq]) // ratio, e.prefix[seq]), 0, e.kv_len[seq])


def tiles_per_chunk(problem: IndexerProblem, pitch: int) -> int:
    """Tiles of rows whose scores and candidates a chunk holds."""
    each = shapes_sparse.SCORED * (4 * pitch + 8 * candidates(problem.top_k, shapes_sparse.CHOICE.BN))
    return min(max(1, CHUNK // each), MOST)


def constants(problem: IndexerProblem, tile: Tile, align: int) -> tuple[Constants, Constants, Constants]:
    """The compile-time values of index_scores, index_choice and index_write."""
    p, block = problem, shapes_sparse.CHOICE.BN
    d = {f"D{n}": w for n, w in enumerate(shapes.parts(p.dim))}
    of_all, resident_heads = {"BT": shapes_sparse.SCORED}, shapes_sparse.heads_held(p.heads, tile.BM)
    of_scores = of_all | d | {
        "HEADS": p.heads, "H": resident_heads, "ADDS": False, "DIM": p.dim, "PAGE": p.page_size, "RATIO": p.ratio,
        "ALIGN": align, "BM": tile.BM, "BN": tile.BN,
    }  # fmt: skip
    buffer = candidates(p.top_k, block)
    of_choice = of_all | {"TOP": p.top_k, "BUFFER": buffer, "PAGE": p.page_size, "RATIO": p.ratio, "BN": block}
    sorts = shapes_sparse.sorts(p.top_k)
    of_write = of_all | {
        "TOP": p.top_k, "BUFFER": buffer if sorts else p.top_k, "SORTS": sorts,
        "BN": shapes.power(p.top_k) if sorts else shapes_sparse.WRITE.BN,
    }  # fmt: skip
    return of_scores, of_choice, of_write


@dataclass(eq=False)
class Choice(launching.Ready):
    """buffer: of scratch, shape and dtype."""

    buffer: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)

    def run(self, given: dict[str, Any]) -> None:
        """As that of any; the scratch has dtypes of its own."""
        given |= {name: empty(given["q"], shape, dtype) for name, (shape, dtype) in self.buffer.items()}
        super().run(given)


@dataclass(eq=False)
class Sorting:
    """A launch of index_write where there are more entries of a list than a program sorts."""

    written: launching.Launch
    top_k: int

    @property
    def scratch(self) -> bool:
        """As Launch.scratch, beside which this one stands in a list."""
        return self.written.scratch

    def start(self, given: dict[str, Any]) -> None:
        """Sorts, and launches."""
        entries, counts = given["entries"][:, : self.top_k], given["counts"]
        there = torch.arange(self.top_k, device=counts.device) < counts[:, None]
        result = entries.where(there, NO_ENTRY.value).sort(dim=-1, descending=True).values
        self.written.start(given | {"entries": result})


def tile_on(table: Callable[..., Tile | None], problem: Any, device: torch.device, *more: int) -> Tile:
    """A tile on a device."""
    chip = shapes.chip_of(device)
    tile = None if chip is None else table(problem, chip, *more)
    assert tile is not None  # reasons_against() has looked
    return tile


def pages_of(k: Any) -> tuple[torch.Tensor | None, int]:
    """(table of pages, last page of the pool; -1: it holds none)."""
    if not isinstance(k, PagedView):
        return None, 0
    if k.fragment:
        raise BackendError("fusion_attention: triton: expected rows in one piece, got pieces for k")
    return k.table, launch_decode.pool_of(k, 1)


def run_topk(problem: IndexerProblem, extents: Extents, schedule: launching.Schedule, o: IndexerOperands) -> None:
    """Launches the scores and the choice of every chunk of rows."""
    views: dict[str, layout_table.View | None] = {
        "q": o.q, "k": o.k, "weights": o.weights, "indices": o.indices, "values": o.values,
    }  # fmt: skip
    given = {name: None if view is None else layout_table.tensor_of(view) for name, view in views.items()}
    given["table"] = o.k.table if isinstance(o.k, PagedView) else None
    layout = layout_table.layout(views, given)
    schedule.once(layout, lambda: ready_topk(problem, extents, schedule.device_tables, views, given)).run(given)


def ready_topk(
    p: IndexerProblem,
    e: Extents,
    device_tables: layout_table.DeviceTables,
    views: dict[str, layout_table.View | None],
    given: dict[str, Any],
) -> Choice:
    """The launches of run_topk() on memory as these views and arguments lie."""
    table, last = pages_of(views["k"])
    device, where = layout_table.one_device(given), layout_table.strides(views, len(e))
    align = layout_table.alignment({name: views[name] for name in ("q", "k")}, where)
    tile = tile_on(shapes_sparse.scores_tile, p, device, align)
    rows, planned = shapes_sparse.SCORED, row_tiles(device_tables.capacity)
    if not len(planned):
        return Choice([], ())
    tiled = device_tables.on(device, "rows", row_tiles)
    strides, lengths = layout_table.Copied.of(where, device), device_tables.on(device, "lengths", layout_table.lengths)
    ends = ends_of(device_tables.capacity, planned, p.ratio)
    pitch = max(-(-int(ends.max()) // tile.BN), 1) * tile.BN
    per = tiles_per_chunk(p, pitch)
    of_scores, of_choice, of_write = constants(p, tile, align)
    width, step = (0, 0) if table is None else (table.shape[1] if last >= 0 else 0, table.stride(0))
    shared = {
        "strides": strides.tensor, "lengths": lengths.tensor, "tiles": tiled.tensor, "count": len(e),
        "width": width, "step": step, "last": last, "pitch": pitch,
    }  # fmt: skip
    names: list[str] = [*given, "scores", "entries", "counts"]
    launches: list[Any] = []
    sorts, pieces = of_write["SORTS"], -(-p.top_k // of_write["BN"])
    for begin in range(0, len(planned), per):
        count, kept_here = min(per, len(planned) - begin), shared | {"begin": begin}
        keys = -(-int(ends[begin : begin + count].max()) // tile.BN)
        for head0 in range(0, p.heads if keys else 0, of_scores["H"]):
            of_heads, constexprs = kept_here | {"head0": head0}, of_scores | {"ADDS": head0 > 0}
            launches.append(CHOICE.launch(index_scores, (keys, count), of_heads, names, constexprs, tile))
        grid = (count * rows,)
        launches.append(CHOICE.launch(index_choice, grid, kept_here, names, of_choice, shapes_sparse.CHOICE))
        written = CHOICE.launch(index_write, (*grid, pieces), kept_here, names, of_write, shapes_sparse.write_tile(p))
        launches.append(written if sorts else Sorting(written, p.top_k))
    chunk = min(per, len(planned)) * rows
    buffer = {
        "scores": ((chunk, pitch), torch.float32),
        "entries": ((chunk, of_choice["BUFFER"]), torch.int64),
        "counts": ((chunk,), torch.int32),
    }
    return Choice(launches, (strides, lengths, tiled), {}, buffer)


def workspace_bytes(problem: IndexerProblem, schedule: launching.Schedule) -> int:
    """The most bytes that the operation kind allocates besides operands and results."""
    p, e = problem, schedule.device_tables.extents
    if schedule.op_kind == "indexer_backward":
        keys, most = int(e.kv_len.sum()), tokens_per_chunk(p, schedule.rows)
        sums = sum_bytes(keys, p.dim, most * p.top_k, p.top_k)
        return sums + most * bytes_of_token(shapes_sparse.sizes_of_gradient(p))
    planned = row_tiles(e)
    if not len(planned):
        return 0
    pitch = -(-int(ends_of(e, planned, p.ratio).max()) // shapes_sparse.WIDEST) * shapes_sparse.WIDEST
    chunk = min(tiles_per_chunk(p, pitch), len(planned)) * shapes_sparse.SCORED
    sorting = 0 if shapes_sparse.sorts(p.top_k) else 4 * 8 * p.top_k  # masked, sorted, and what torch.sort takes
    return chunk * (4 * pitch + 8 * candidates(p.top_k, shapes_sparse.CHOICE.BN) + 4 + sorting)


# -------------------------------------------------------------------------------------------------------- the gradient


def row_type(sizes: Sizes) -> torch.dtype:
    """Of the rows that tokens give to keys: float16 may not hold what their sum does, and heads in several launches add
    to them."""
    full = sizes.heads <= shapes_sparse.ONE_LAUNCH
    return torch.bfloat16 if sizes.dtype == "bfloat16" and full else torch.float32


def bytes_of_token(sizes: Sizes) -> int:
    """What a chunk holds of a token for its gradients: rows, keys, ids; a list's length and note."""
    return sizes.slots * (BYTES_OF_ENTRY + 4 + sizes.dim * row_type(sizes).itemsize) + 8


def tokens_per_chunk(problem: IndexerProblem, tokens: int) -> int:
    """Tokens whose rows a chunk holds."""
    most = CHUNK // bytes_of_token(shapes_sparse.sizes_of_gradient(problem))
    return max(1, min(whole_blocks(most, problem.top_k), tokens))


def gradient_buffers(sizes: Sizes, tokens: int) -> dict[str, tuple[int, torch.dtype]]:
    """Memory of a chunk for its gradients: elements and dtype."""
    entries = tokens * sizes.slots
    lists = {"keys": entries, "ids": entries, "used": tokens, "noted": tokens}
    return {name: (count, torch.int32) for name, count in lists.items()} | {
        "rows": (entries * sizes.dim, row_type(sizes))
    }


def list_constants(slots: int, ratio: int) -> Constants:
    """The compile-time values of read_lists, of lists of tokens."""
    widths = {"SLOTS": slots, "N": min(ENTRIES, shapes.power(slots))}
    return {"SELECT": slots, "BLOCK": 1, "RATIO": ratio, "COMPRESSED": 0, "BAND": 0} | widths


def gradient_constants(sizes: Sizes, tile: Tile, align: int) -> Constants:
    """What index_gradient knows while compiling."""
    q, k = ("q", "k") if sizes.viewed else ("index_q", "index_k")
    d = {f"D{n}": w for n, w in enumerate(shapes.parts(sizes.dim))}
    return d | {
        "Q": all_views.AT[q], "K": all_views.AT[k], "HEADS": sizes.heads, "ADDS": False, "DIM": sizes.dim,
        "SLOTS": sizes.slots, "UNITS": sizes.dtype == "float16", "ALIGN": align, "VIEWED": sizes.viewed,
        "THREADS": 32 * tile.num_warps, "BM": tile.BM, "BN": tile.BN,
    }  # fmt: skip


def recompute_constants(sizes: Sizes, align: int) -> Constants:
    """The compile-time values of recompute_gradient."""
    constexprs = gradient_constants(sizes, shapes_sparse.RECOMPUTE_GRADIENT, align)
    return {name: value for name, value in constexprs.items() if name in recompute_gradient.arg_names}


def gradient_launches(
    family: launching.Family, sizes: Sizes, tile: Tile, align: int, tokens: int, fixed: dict[str, Any], names: list[str]
) -> list[launching.Launch]:
    """From dI of a chunk of tokens to dq, dweights and a row for every slot; read_lists() goes before."""
    constexprs, recompute = gradient_constants(sizes, tile, align), shapes_sparse.RECOMPUTE_GRADIENT
    launches = [
        family.launch(
            index_gradient, (tokens,), fixed | {"head0": head0}, names, constexprs | {"ADDS": head0 > 0}, tile
        )
        for head0 in range(0, sizes.heads, tile.BM)
    ]
    return [
        *launches,
        family.launch(recompute_gradient, (tokens,), fixed, names, recompute_constants(sizes, align), recompute),
    ]


@dataclass(eq=False)
class Gradient(launching.Ready):
    """The launches of chunks of tokens, and what becomes of the rows that they leave."""

    chunks: list[tuple[int, list[launching.Launch]]] = field(default_factory=list)  # tokens, launches
    buffers: dict[str, tuple[int, torch.dtype]] = field(default_factory=dict)
    where: Where | None = None
    keys: int = 0
    slots: int = 0
    dim: int = 0

    def run(self, given: dict[str, Any]) -> None:
        """Launches chunk after chunk, and adds its rows to their keys' sums."""
        for table in self.tables:
            table.read()
        like = given["index_q"]
        total = KeySum(like, self.keys, self.dim)
        given |= {name: empty(like, (count,), dtype) for name, (count, dtype) in self.buffers.items()}
        for each in self.launches:
            each.start(given)
        for count, launches in self.chunks:
            for each in launches:
                each.start(given)
            entries = count * self.slots
            result = given["rows"][: entries * self.dim].view(entries, self.dim)
            total.add(result, given["ids"][:entries], self.slots)
        if self.where is not None:
            total.write(given["dk"], "dk", 0, self.dim, 1, self.where)


def run_backward(
    problem: IndexerProblem, extents: Extents, schedule: launching.Schedule, o: IndexerOperands, g: IndexerGrads
) -> None:
    """Launches the gradient of every chunk of tokens, and the sums per key."""
    views: dict[str, layout_table.View | None] = {
        "q": o.q, "k": o.k, "weights": o.weights, "indices": o.indices, "dvalues": g.dvalues, "dq": g.dq, "dk": g.dk,
        "dweights": g.dweights,
    }  # fmt: skip
    given = {name: None if view is None else layout_table.tensor_of(view) for name, view in views.items()}
    layout = layout_table.layout(views, given)
    ready = schedule.once(layout, lambda: ready_backward(problem, extents, schedule, views, given))
    ready.run({RENAMED.get(name, name): memory_of for name, memory_of in given.items()})


def ready_backward(
    p: IndexerProblem, e: Extents, schedule: launching.Schedule, views: dict[str, layout_table.View | None],
    given: dict[str, Any],
) -> Gradient:  # fmt: skip
    """The launches of run_backward() on memory as these views and arguments lie."""
    device_tables, capacity = schedule.device_tables, schedule.device_tables.capacity
    device = layout_table.one_device(given)
    where = layout_table.strides(views | {"ids": numbered(given["q"], capacity.kv_len, 1)}, len(e))
    align = layout_table.alignment({name: views[name] for name in ("q", "k", "dq")}, where)
    tile, sizes = tile_on(shapes_sparse.gradient_tile, p, device, align), shapes_sparse.sizes_of_gradient(p)
    strides, lengths = layout_table.Copied.of(where, device), device_tables.on(device, "lengths", layout_table.lengths)
    listed, tiles = device_tables.on(device, "tokens", tokens), device_tables.on(device, "keys", key_tiles)
    shared = {"strides": strides.tensor, "lengths": lengths.tensor, "tokens": listed.tensor, "count": len(e)}
    per = tokens_per_chunk(p, schedule.rows)
    buffers = gradient_buffers(sizes, min(per, schedule.rows))
    names = [*(RENAMED.get(name, name) for name in given if name != "dk"), *buffers]
    chunks = []
    for n in range(0, schedule.rows, per):
        count, here = min(per, schedule.rows - n), shared | {"first": n}
        lists = GRADIENT.launch(read_lists, (count, 1), here, names, list_constants(p.top_k, p.ratio), LISTS)
        chunks.append((count, [lists, *gradient_launches(GRADIENT, sizes, tile, align, count, here, names)]))
    return Gradient(
        [], (strides, lengths, listed, tiles), {}, chunks, buffers, Where(strides.tensor, tiles.tensor, len(e)),
        int(capacity.kv_len.sum()), p.top_k, p.dim,
    )  # fmt: skip
