"""Launches of the indexer's loss: over selected keys here, over all keys of a band in launch_dense_kl_loss.py.

For selected keys, four kernels compute dI, the scores' gradient, of a chunk of rows; gradient.py has the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common import launching, layout_table, shapes
from fusion_attention.backends.triton.common.layout_table import CallMemory
from fusion_attention.backends.triton.indexer import launch_dense_kl_loss as of_bands
from fusion_attention.backends.triton.indexer import loss_parts, selected_loss, shapes_loss
from fusion_attention.backends.triton.indexer.gradient import index_gradient, recompute_gradient
from fusion_attention.backends.triton.indexer.launch import gradient_buffers, gradient_launches, list_constants
from fusion_attention.backends.triton.selected import launch as launch_sparse
from fusion_attention.backends.triton.selected import launch_key_sum
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.backends.triton.selected.launch_key_sum import Gradient, Where, key_tiles
from fusion_attention.backends.triton.selected.selection import read_lists
from fusion_attention.backends.triton.selected.shapes_backward import LISTS
from fusion_attention.ir import tiles
from fusion_attention.ir.problem import Extents, IndexerGrads, IndexerLossOperands, IndexerLossProblem, IndexerProblem

run_lse = of_bands.run_lse

BUFFER = 1 << 27  # elements of gradient rows per chunk
ROWS = 64  # rows of a program of note()
SLOTS = 1024  # most entries of a list per iteration of compare()
FAMILY = launching.Family(
    read_lists, selected_loss.target, selected_loss.score, selected_loss.compare, index_gradient, recompute_gradient,
    loss_parts.note,
)  # fmt: skip


def run_loss(
    problem: IndexerLossProblem, extents: Extents, schedule: launching.Schedule, o: IndexerLossOperands, g: IndexerGrads
) -> None:
    """Writes the indexer's KL loss, summed over all rows, to o.loss [1], and its gradients dq, dk, dweights to `g`."""
    p, index = problem, o.index
    stats = o.stats or index.stats  # a given target needs no attention statistics, and note() then reads none
    views: dict[str, layout_table.View | None] = {
        "q": o.q or index.q, "k": o.k, "target": o.target, "values": index.values,
        "max": None if stats is None else stats.max, "sum": None if stats is None else stats.sum,
        "q_rope": o.q_rope if p.dim_rope else None,
        "k_rope": o.k_rope if p.dim_rope else None,
        "index_q": index.q, "index_k": index.k, "weights": index.weights,
        "dq": g.dq, "dk": g.dk, "dweights": g.dweights,
    }  # fmt: skip
    if p.select_count:
        views["indices"] = index.indices
    else:
        assert index.stats is not None
        views |= {"index_max": index.stats.max, "index_sum": index.stats.sum}
    given = layout_table.tensors(views)
    if p.has_sink:
        assert o.sink is not None
        given["sink"] = o.sink.to(torch.float32).contiguous()
    make, tables = ready_selected if p.select_count else of_bands.ready_warm, schedule.device_tables

    def once() -> launching.Ready:
        more = {"ids": launch_key_sum.numbered(given["q"], tables.capacity.kv_len, 1)} if p.select_count else {}
        return make(p, CallMemory(views, given, tables, more))

    schedule.once(layout_table.layout(views, given), once).run(given)
    # The order of this sum does not depend on the chunks.
    o.loss.copy_(given["losses"].sum(dtype=torch.float64).expand(1))


def workspace_bytes(problem: IndexerProblem | IndexerLossProblem, schedule: launching.Schedule) -> int:
    """Returns the most bytes of scratch of the indexer's statistics (IndexerProblem) or loss (IndexerLossProblem)."""
    e = schedule.device_tables.capacity
    if isinstance(problem, IndexerProblem):
        tile = shapes.on(torch.device("cuda"), shapes_loss.warm_tiles, problem).lse
        return launching.bytes_of(of_bands.lse_buffers(problem, e, tile))
    if not problem.select_count:
        return of_bands.warm_bytes(problem, e)
    keys, rows = int(e.kv_len.sum()), min(int(e.q_len.sum()), rows_of_chunk(problem))
    entries = rows * problem.select_count
    sums = launch_key_sum.workspace_bytes(keys, problem.dim_index, entries, problem.select_count)
    return launching.bytes_of(buffers_of(problem, e)) + sums + launch_key_sum.BYTES_OF_ENTRY * entries


# ------------------------------------------------------------------------------------------------- loss of selections


def rows_of_chunk(p: IndexerLossProblem) -> int:
    """Returns the number of query rows whose contributions to dk (one row per selected key) fit the memory limit."""
    return launch_key_sum.whole_blocks(min(BUFFER // (p.select_count * p.dim_index), of_bands.MOST), p.select_count)


def row_table(e: Extents) -> np.ndarray:
    """Returns int32 [tiles, 8], tiles of query rows, each of one sequence, for the kernel note().

    Columns: sequence, first row, end, four zeros, and the first row's number among the rows of all sequences.
    """
    t = tiles.by_query(e, ROWS)
    none = np.zeros_like(t.seq)
    rows = t.seq, t.row0, t.row1, none, none, none, none, e.first_query[t.seq] + t.row0
    return np.stack(rows, 1).astype(np.int32)


def selected_constants(p: IndexerLossProblem, t: shapes_loss.Selected, align: int) -> dict[str, launching.Constants]:
    """Returns {kernel: compile-time arguments} of the indexer's loss over selected keys; align: rows' alignment."""
    index = {"E": shapes.power(p.dim_index), "DIM_INDEX": p.dim_index, "ALIGN": align}
    group, slots = p.heads_q // max(p.heads_kv, 1), min(SLOTS, shapes.power(p.select_count))
    heads = shapes.power(p.heads_index)
    return {
        "note": {"BM": ROWS},
        "read_lists": list_constants(p.select_count, p.ratio),
        "target": {
            "GROUP": group, "DIM": p.dim_qk, "DIM_ROPE": p.dim_rope, "ALIGN": align,
            "BH": min(shapes.power(group), t.target.BN), "BK": t.target.BM, "BC": t.columns,
        },
        "score": index | {"HI": heads, "PADDED": heads != p.heads_index, "BK": t.score.BM},
        "compare": {"BK": slots, "GIVEN": p.has_target},
    }  # fmt: skip


def buffers_of(p: IndexerLossProblem, e: Extents) -> dict[str, launching.Scratch]:
    """Returns {kernel argument name: temporary tensor's shape} of the loss over selected keys, without sums of dk."""
    rows = int(e.q_len.sum())
    tokens = min(rows, rows_of_chunk(p))
    entries = tokens * p.select_count
    return gradient_buffers(shapes_sparse.sizes_of_gradient(p), tokens) | {
        "notes": launching.Scratch((rows * (p.heads_q + 1),)),
        "scores": launching.Scratch((entries,)),
        "dscores": launching.Scratch((entries,)),
        "losses": launching.Scratch((rows,)),
    }


def ready_selected(p: IndexerLossProblem, m: CallMemory) -> Gradient:
    """Returns the prepared kernel launches of the indexer's loss over selected keys, for one memory layout."""
    e, device, given, align = m.capacity, m.device, m.given, m.align
    t = shapes.on(device, shapes_loss.selected_tiles, p)
    constexprs, sizes = selected_constants(p, t, align), shapes_sparse.sizes_of_gradient(p)
    listed, of_rows = m.on("tokens", launch_sparse.tokens), m.on("rows", row_table)
    to_write = m.on("written", key_tiles)
    buffers, rows = buffers_of(p, e), int(e.q_len.sum())
    absent = {"q_rope", "k_rope", "sink", "target", "values"} - given.keys()
    fixed = dict.fromkeys(absent) | m.fixed | {
        "largest": None, "heads_q": p.heads_q, "heads_kv": p.heads_kv, "heads_index": p.heads_index,
        "step_head": 1, "step_row": p.heads_q + 1, "slots": p.select_count,
        "tokens": listed.tensor, "tiles": of_rows.tensor, "exponent": p.scale * common.LOG2E.value,
    }  # fmt: skip
    names = [*(name for name in given if name != "dk"), *buffers]  # KeySum writes dk
    tile = shapes.on(device, shapes_sparse.gradient_tile, p, align)

    def launch(kernel: Any, grid: tuple[int, ...], tile: shapes.Tile, **more: Any) -> launching.Launch:
        return FAMILY.launch(kernel, grid, fixed | more, names, constexprs[kernel.__name__], tile)

    first = (
        [launch(loss_parts.note, (len(of_rows.tensor),), of_bands.NOTE)]
        if len(of_rows.tensor) and not p.has_target
        else []
    )
    chunks = []
    for at in range(0, rows, rows_of_chunk(p)):
        count, here = min(rows - at, rows_of_chunk(p)), {"first": at}
        launches = [
            launch(read_lists, (count, 1), LISTS, **here),
            *(
                []
                if p.has_target
                else [launch(selected_loss.target, (-(-p.select_count // t.target.BM), count), t.target, **here)]
            ),
            launch(selected_loss.score, (count,), t.score, **here),
            launch(selected_loss.compare, (count,), of_bands.NOTE, **here),
        ]
        launches += gradient_launches(FAMILY, sizes, tile, align, count, fixed | here, names)
        chunks.append((count * p.select_count, launches))
    writes = [("dk", 0, p.dim_index, Where(m.strides.tensor, to_write.tensor, len(e)))]
    tables, keys = (m.strides, m.lengths, listed, of_rows, to_write), int(e.kv_len.sum())
    return Gradient(first, tables, buffers, chunks, writes, keys, p.dim_index, of_token=p.select_count)
