"""Launches of the lightning indexer for chunks of rows: the selection of keys, and the gradient of its values.

Scores and candidates of a chunk are in a workspace of bounded size. A row's selection depends on its scores only, and
sums per key continue from chunk to chunk in the same order, so results do not depend on the number of chunks.

Common parameters: `align` is the alignment of rows, in elements of q; `given` has the tensors of a call, `fixed` the
arguments that are equal in all runs, by kernel argument name; `names`: names of the arguments of each run.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusion_attention.backends.triton.common import launching, layout_table, shapes
from fusion_attention.backends.triton.common import layout_index as all_views
from fusion_attention.backends.triton.common.launching import Scratch
from fusion_attention.backends.triton.common.layout_table import CallMemory
from fusion_attention.backends.triton.common.shapes import Tile
from fusion_attention.backends.triton.decode import launch as launch_decode
from fusion_attention.backends.triton.indexer.choice import NO_ENTRY, index_choice, index_write
from fusion_attention.backends.triton.indexer.gradient import index_gradient, recompute_gradient
from fusion_attention.backends.triton.indexer.scores import index_scores
from fusion_attention.backends.triton.selected import launch_key_sum
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.backends.triton.selected.launch import tokens
from fusion_attention.backends.triton.selected.launch_key_sum import workspace_bytes as sum_bytes
from fusion_attention.backends.triton.selected.selection import read_lists
from fusion_attention.backends.triton.selected.shapes import Sizes
from fusion_attention.backends.triton.selected.shapes_backward import ENTRIES, LISTS
from fusion_attention.contract import BackendError
from fusion_attention.ir.memory_views import PagedView
from fusion_attention.ir.problem import Extents, IndexerGrads, IndexerOperands, IndexerProblem

Constants = launching.Constants
CHUNK = 1 << 27  # bytes of scores and candidates of a chunk, or of gradient rows; a chunk has at least one tile
MOST = 65535  # most programs along the second axis of a grid
CHOICE = launching.Family(index_scores, index_choice, index_write)
RENAMED = {"q": "index_q", "k": "index_k", "dvalues": "dscores"}  # argument names in the kernels of the gradient
GRADIENT = launching.Family(read_lists, index_gradient, recompute_gradient)


# ---------------------------------------------------------------------------------------------------------- the choice


def candidates(top_k: int, block: int) -> int:
    """Returns the number of candidates (keys) in a query row's buffer during selection; when it is full, the top_k
    largest stay. block: keys that the kernel index_choice scans per iteration."""
    return -(-(top_k + max(shapes_sparse.CANDIDATES, top_k // 2, block)) // block) * block


def row_tiles(extents: Extents) -> np.ndarray:
    """Divides the query rows of each sequence into tiles; returns int32 [tiles, 8]: sequence, first row, end, five
    zeros."""
    return layout_table.tiles_of(extents.q_len, shapes_sparse.SCORED)


def ends_of(extents: Extents, tiles: np.ndarray, ratio: int) -> np.ndarray:
    """Returns int [tiles], for each tile of query rows the end of the keys that its rows see; tiles: the result of
    row_tiles(). ratio: tokens that a (compressed) key represents."""
    e, seq = extents, tiles[:, 0]
    return np.clip(np.maximum((tiles[:, 2] - 1 + e.hi[seq]) // ratio, e.prefix[seq]), 0, e.kv_len[seq])


def tiles_per_chunk(problem: IndexerProblem, pitch: int) -> int:
    """Returns the most tiles of query rows (>= 1) whose scores (`pitch` per row) and candidates fit CHUNK bytes."""
    each = shapes_sparse.SCORED * (4 * pitch + 8 * candidates(problem.top_k, shapes_sparse.CHOICE.BN))
    return min(max(1, CHUNK // each), MOST)


def constants(problem: IndexerProblem, tile: Tile, align: int) -> tuple[Constants, Constants, Constants]:
    """Returns three dictionaries, the compile-time arguments of the kernels index_scores, index_choice and index_write
    (scores of keys, their largest, and the keys' numbers); tile: of index_scores; align: alignment in elements."""
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
class Sorting:
    """A launch that sorts candidates (scores with keys) by torch.sort(), then launches index_write; for long lists."""

    written: launching.Launch
    top_k: int
    scratch: bool = False  # as in Launch

    def start(self, given: dict[str, Any]) -> None:
        """Sorts each row's candidates, given["entries"], descending, then launches index_write with `given`."""
        entries, counts = given["entries"][:, : self.top_k], given["counts"]
        there = torch.arange(self.top_k, device=counts.device) < counts[:, None]
        result = entries.where(there, NO_ENTRY.value).sort(dim=-1, descending=True).values
        self.written.start(given | {"entries": result})


def run_topk(problem: IndexerProblem, extents: Extents, schedule: launching.Schedule, o: IndexerOperands) -> None:
    """Selects each query row's top_k keys by the indexer's scores; writes their indices, and scores, to `o`."""
    views: dict[str, layout_table.View | None] = {
        "q": o.q, "k": o.k, "weights": o.weights, "indices": o.indices, "values": o.values,
    }  # fmt: skip
    given = layout_table.tensors(views) | ({} if o.values else {"values": None})
    given["table"] = o.k.table if isinstance(o.k, PagedView) else None
    layout = layout_table.layout(views, given)
    schedule.once(layout, lambda: ready_topk(problem, CallMemory(views, given, schedule.device_tables))).run(given)


def ready_topk(p: IndexerProblem, m: CallMemory) -> launching.Ready:
    """Returns the prepared kernel launches that select keys, for one memory layout (strides, alignments, device)."""
    k, table, last = m.views["k"], None, 0
    if isinstance(k, PagedView):
        if k.fragment:
            raise BackendError("fusion_attention: triton: expected contiguous rows of k, got format NZ")
        table, last = k.table, launch_decode.pool_of(k, 1)
    device, align, capacity = m.device, m.align, m.capacity
    tile = shapes.on(device, shapes_sparse.scores_tile, p, align)
    rows, planned = shapes_sparse.SCORED, row_tiles(capacity)
    tiled, ends = m.on("rows", row_tiles), ends_of(capacity, planned, p.ratio)
    pitch = max(-(-int(ends.max()) // tile.BN), 1) * tile.BN
    per = tiles_per_chunk(p, pitch)
    of_scores, of_choice, of_write = constants(p, tile, align)
    shared = m.fixed | launch_decode.page_arguments(table, last) | {"tiles": tiled.tensor, "pitch": pitch}
    names: list[str] = [*m.given, "scores", "entries", "counts"]
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
        "scores": Scratch((chunk, pitch)),
        "entries": Scratch((chunk, of_choice["BUFFER"]), torch.int64),
        "counts": Scratch((chunk,), torch.int32),
    }
    return launching.Ready(launches, (m.strides, m.lengths, tiled), buffer)


def workspace_bytes(problem: IndexerProblem, schedule: launching.Schedule) -> int:
    """Returns the most bytes of scratch that the schedule's operation, indexer_topk or indexer_backward, allocates."""
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
    sorting = 0 if shapes_sparse.sorts(p.top_k) else 4 * 8 * p.top_k  # masked and sorted copies, and torch.sort
    return chunk * (4 * pitch + 8 * candidates(p.top_k, shapes_sparse.CHOICE.BN) + 4 + sorting)


# -------------------------------------------------------------------------------------------------------- the gradient


def row_type(sizes: Sizes) -> torch.dtype:
    """Returns the dtype of the contribution of one (token, selected key) pair to dk: bfloat16 for bfloat16 operands
    whose heads fit into one launch; else float32, as float16 may overflow and several launches add up."""
    full = sizes.heads <= shapes_sparse.ONE_LAUNCH
    return torch.bfloat16 if sizes.dtype == "bfloat16" and full else torch.float32


def bytes_of_token(sizes: Sizes) -> int:
    """Returns the bytes of scratch per token in the gradient: for each selected key a row to add to dk, the key, and an
    id with its sort; for the token the length of its list and a flag."""
    return sizes.slots * (launch_key_sum.BYTES_OF_ENTRY + 4 + sizes.dim * row_type(sizes).itemsize) + 8


def tokens_per_chunk(problem: IndexerProblem, tokens: int) -> int:
    """Returns the number of tokens, at most `tokens`, whose scratch in the indexer's gradient fits the limit."""
    most = CHUNK // bytes_of_token(shapes_sparse.sizes_of_gradient(problem))
    return max(1, min(launch_key_sum.whole_blocks(most, problem.top_k), tokens))


def gradient_buffers(sizes: Sizes, tokens: int) -> dict[str, Scratch]:
    """Returns {kernel argument name: shape and dtype} of the gradient's temporary tensors for a chunk of tokens."""
    entries = tokens * sizes.slots
    lists = {"keys": entries, "ids": entries, "used": tokens, "noted": tokens}
    return {name: Scratch((count,), torch.int32) for name, count in lists.items()} | {
        "rows": Scratch((entries * sizes.dim,), row_type(sizes))
    }


def list_constants(slots: int, ratio: int) -> Constants:
    """Returns the compile-time arguments of the kernel read_lists, for lists of `slots` keys of `ratio` tokens each."""
    widths = {"SLOTS": slots, "N": min(ENTRIES, shapes.power(slots))}
    return {"SELECT": slots, "BLOCK": 1, "RATIO": ratio, "COMPRESSED": 0, "BAND": 0} | widths


def gradient_constants(sizes: Sizes, tile: Tile, align: int) -> Constants:
    """Returns compile-time arguments of the indexer's gradient kernels, by name; align: alignment in elements."""
    q, k = ("q", "k") if sizes.viewed else ("index_q", "index_k")
    d = {f"D{n}": w for n, w in enumerate(shapes.parts(sizes.dim))}
    return d | {
        "Q": all_views.AT[q], "K": all_views.AT[k], "HEADS": sizes.heads, "ADDS": False, "DIM": sizes.dim,
        "SLOTS": sizes.slots, "UNITS": sizes.dtype == "float16", "ALIGN": align, "VIEWED": sizes.viewed,
        "THREADS": 32 * tile.num_warps, "BM": tile.BM, "BN": tile.BN,
    }  # fmt: skip


def gradient_launches(
    family: launching.Family, sizes: Sizes, tile: Tile, align: int, tokens: int, fixed: dict[str, Any], names: list[str]
) -> list[launching.Launch]:
    """Returns the prepared launches that compute dq, dweights and, for every selected key of a chunk of tokens, a row
    to add to dk, from dI (the gradient of the scores) and the keys' numbers; tile.BM heads per launch. fixed, names:
    arguments of all runs by name, and names of those of each run. align: alignment of rows, in elements of q."""
    recompute, grid = shapes_sparse.RECOMPUTE_GRADIENT, (tokens,)
    of_gradient, of_recompute = (gradient_constants(sizes, one, align) for one in (tile, recompute))
    launches = [
        family.launch(index_gradient, grid, fixed | {"head0": n}, names, of_gradient | {"ADDS": n > 0}, tile)
        for n in range(0, sizes.heads, tile.BM)
    ]
    return [*launches, family.launch(recompute_gradient, grid, fixed, names, of_recompute, recompute)]


def run_backward(
    problem: IndexerProblem, extents: Extents, schedule: launching.Schedule, o: IndexerOperands, g: IndexerGrads
) -> None:
    """Writes the indexer's dq, dk and dweights to `g` from g.dvalues, gradients of selected keys' scores."""
    views: dict[str, layout_table.View | None] = {
        "q": o.q, "k": o.k, "weights": o.weights, "indices": o.indices, "dvalues": g.dvalues, "dq": g.dq, "dk": g.dk,
        "dweights": g.dweights,
    }  # fmt: skip
    given = layout_table.tensors(views)
    layout = layout_table.layout(views, given)
    ready = schedule.once(layout, lambda: ready_backward(problem, extents, schedule, views, given))
    ready.run({RENAMED.get(name, name): memory_of for name, memory_of in given.items()} | {"q": given["q"]})


def ready_backward(
    p: IndexerProblem, e: Extents, schedule: launching.Schedule, views: dict[str, layout_table.View | None],
    given: dict[str, Any],
) -> launch_key_sum.Gradient:  # fmt: skip
    """Returns the prepared kernel launches of the indexer's backward, for the memory layout of `views` (strided views
    by name) and the tensors `given`."""
    capacity = schedule.device_tables.capacity
    m = CallMemory(
        views, given, schedule.device_tables, {"ids": launch_key_sum.numbered(given["q"], capacity.kv_len, 1)}
    )
    # dk is written by KeySum, whose rows need no alignment.
    align = layout_table.alignment({name: views[name] for name in ("q", "k", "dq")}, m.table)
    tile, sizes = shapes.on(m.device, shapes_sparse.gradient_tile, p, align), shapes_sparse.sizes_of_gradient(p)
    listed, tiles = m.on("tokens", tokens), m.on("keys", launch_key_sum.key_tiles)
    shared = m.fixed | {"tokens": listed.tensor}
    per = tokens_per_chunk(p, schedule.rows)
    buffers = gradient_buffers(sizes, min(per, schedule.rows))
    names = [*(RENAMED.get(name, name) for name in given if name != "dk"), *buffers]
    chunks = []
    for n in range(0, schedule.rows, per):
        count, here = min(per, schedule.rows - n), shared | {"first": n}
        lists = GRADIENT.launch(read_lists, (count, 1), here, names, list_constants(p.top_k, p.ratio), LISTS)
        launches = [lists, *gradient_launches(GRADIENT, sizes, tile, align, count, here, names)]
        chunks.append((count * p.top_k, launches))
    writes = [("dk", 0, p.dim, launch_key_sum.Where(m.strides.tensor, tiles.tensor, len(e)))]
    tables, keys = (m.strides, m.lengths, listed, tiles), int(capacity.kv_len.sum())
    return launch_key_sum.Gradient([], tables, buffers, chunks, writes, keys, p.dim, of_token=p.top_k)
