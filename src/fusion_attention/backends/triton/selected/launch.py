"""Launches of attention to selected keys: one program per token and a few heads.

Several programs share a token if there would otherwise be too few programs for the GPU. A slot is a place for a key
that a token reads: an entry's token in its list, or a key of its band.

Common parameters: `align` is the alignment of rows, in elements of q; `views` and `given` are the views (by their
names in the layout table) and the tensors and numbers (by kernel argument name) of a call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fusion_attention.backends.triton.common import launching, layout_table, shapes
from fusion_attention.backends.triton.common.layout_table import CallMemory
from fusion_attention.backends.triton.decode import launch as launch_decode
from fusion_attention.backends.triton.decode.kernel import MOST_SHARES, join
from fusion_attention.backends.triton.dense import launch as launch_dense
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.backends.triton.selected.forward import PAGES, sparse_forward
from fusion_attention.backends.triton.selected.not_finite import recompute_lists
from fusion_attention.ir.memory_views import PagedView, RowView
from fusion_attention.ir.problem import Extents, Operands, Problem
from fusion_attention.ir.tiles import divided

FAMILY = launching.Family(sparse_forward, join, recompute_lists)
ABSENT: dict[str, Any] = dict.fromkeys(
    ("v", "q_rope", "k_rope", "sink", "indices", "table", "partials", "work", "k_compressed", "v_compressed",
     "table_compressed")
) | dict.fromkeys((*PAGES, "per", "rows"), 0)  # fmt: skip
NEAR = 1 << 31  # elements that int32 offsets can address
KEYS = ("k", "v", "k_rope", "k_compressed", "v_compressed")


def tokens(extents: Extents) -> np.ndarray:
    """Returns int32 [tokens, 2]: (sequence, query row within it) of each token of all sequences."""
    return np.stack(divided(extents.q_len, 1)[:2], 1).astype(np.int32)


def slots(problem: Problem, extents: Extents) -> tuple[int, int]:
    """Returns (most keys of the band, most keys in the list or compressed keys) that one query row reads; the first is
    0 without compressed keys, because the list then selects keys of the sequence itself."""
    p, listed = problem, problem.select_count * problem.select_block
    e, second = extents, extents.compressed
    if second is None:
        return 0, listed
    band = np.minimum(e.kv_len, np.maximum(e.hi - e.lo, e.prefix))
    return max(int(band.max(initial=0)), 0), listed if p.select_count else int(second.kv_len.max(initial=0))


def near(views: dict[str, layout_table.View | None], extents: Extents) -> bool:
    """Returns True if the offsets of keys, in elements, from a sequence's first key or from the first page fit into
    int32."""
    most = int(extents.kv_len.max(initial=0))
    if extents.compressed is not None:
        most = max(most, int(extents.compressed.kv_len.max(initial=0)))
    for view in (views[name] for name in KEYS):
        if isinstance(view, PagedView):
            if view.pool.untyped_storage().nbytes() >= NEAR * view.pool.element_size():
                return False
        elif isinstance(view, RowView) and most * view.stride_token >= NEAR:
            return False
    return True


def views_of(problem: Problem, o: Operands) -> dict[str, layout_table.View | None]:
    """Returns the problem's tensors as strided views by name; "v" is None if values are the first columns of keys."""
    p = problem
    return {
        "q": o.q, "k": o.k, "v": None if shapes_sparse.shared(p) else o.v, "out": o.out,
        "max": o.stats.max, "sum": o.stats.sum,
        "q_rope": o.q_rope if p.dim_rope else None,
        "k_rope": o.k_rope if p.dim_rope else None,
        "indices": o.indices if p.select_count else None,
        "k_compressed": o.k_compressed if p.compressed_ratio else None,
        "v_compressed": o.v_compressed if p.compressed_ratio and not shapes_sparse.shared(p) else None,
    }  # fmt: skip


def constants(
    problem: Problem, tile: shapes.Tile, align: int, is_near: bool, split: bool, page_compressed: int
) -> launching.Constants:
    """Returns the compile-time arguments, by name, of the kernels of the forward over selected keys, of which each
    takes its own. is_near: int32 holds the offsets of keys. split: several programs compute a token. page_compressed:
    tokens of a page of compressed keys, 0 without pages."""
    p = problem
    return launch_dense.constants(p, tile, align) | {
        "SELECT": p.select_count,
        "BLOCK": p.select_block,
        "RATIO": p.compressed_ratio,
        "SHARED": shapes_sparse.shared(p),
        "NEAR": is_near,
        "BUFFER": launch_decode.buffer(p),
        "SPLIT": split,
        "PAGE_COMPRESSED": page_compressed,
    }


def programs(problem: Problem, tile: shapes.Tile) -> int:
    """Returns the number of kernel programs per token: each computes at most BM query heads of one key head."""
    return problem.heads_kv * -(-problem.group // tile.BM)


def slots_per_program(problem: Problem, most: int, rows: int, tile: shapes.Tile, processors: int) -> int:
    """Returns the number of keys (slots) that one program reads, for `rows` tokens that read at most `most` keys each:
    with few tokens less than `most`, so that the programs, which take equal times, fill the GPU's `processors` once."""
    p = problem
    turns = -(-most // tile.BN)
    shares = max(min(processors // max(rows * programs(p, tile), 1), MOST_SHARES.value), 1)
    return max(-(-turns // shares), launch_decode.LEAST_TILES) * tile.BN


def work(problem: Problem, extents: Extents, shares: int) -> np.ndarray:
    """Returns the table by which the kernel join() merges partial results, int32 [tokens * shares, 8]; shares: number
    of ranges into which the list of keys of a token is divided.

    Row t * shares has token t's sequence (column 0), and the first and the end of its rows (1, 2), counted in rows of
    one key head: token * group, with `group` query heads per key head. Columns 6 and 7 of row t, not t * shares, have
    the number of token t's first range and of its ranges. All else is 0.
    """
    listed, group = tokens(extents), problem.group
    result = np.zeros((len(listed) * shares, layout_table.TILE_FIELDS), np.int32)
    result[::shares, 0], result[::shares, 1] = listed[:, 0], listed[:, 1] * group
    result[::shares, 2] = (listed[:, 1] + 1) * group
    result[: len(listed), 6], result[: len(listed), 7] = np.arange(len(listed)) * shares, shares
    return result


def workspace_bytes(problem: Problem, schedule: launching.Schedule) -> int:
    """Returns an upper limit of the bytes of partial results (of tokens that several programs compute), for every tile
    shape and the largest GPU."""
    p = problem
    tile, most = shapes.Tile(64, shapes.NARROWEST, 0, 0), sum(slots(p, schedule.device_tables.capacity))
    shares = -(-most // slots_per_program(p, most, schedule.rows, tile, launch_decode.MOST_PROCESSORS))
    return 4 * schedule.rows * shares * p.heads_q * launch_decode.buffer(p) if shares > 1 else 0


def run(problem: Problem, extents: Extents, schedule: launching.Schedule, o: Operands) -> None:
    """Writes out, and max and sum of the softmax, of attention to selected keys, for all query rows, to `o`."""
    views = views_of(problem, o)
    given = launch_dense.given_by(problem, o, views)
    if isinstance(o.k, PagedView):
        given["table"] = o.k.table
    if isinstance(o.k_compressed, PagedView):
        given["table_compressed"] = o.k_compressed.table
    result = schedule.once(
        layout_table.layout(views, given), lambda: ready(problem, CallMemory(views, given, schedule.device_tables))
    )
    result.run(given)


def pages(problem: Problem, views: dict[str, layout_table.View | None]) -> tuple[dict[str, int], int]:
    """Returns (kernel arguments about the page tables of keys and compressed keys, by name, tokens of a page of
    compressed keys, 0 without pages)."""
    arguments = launch_decode.page_arguments(*launch_decode.pages(problem, views))
    second = views["k_compressed"]
    if not isinstance(second, PagedView):
        return arguments | launch_decode.page_arguments(None, 0, "_compressed"), 0
    of_second = {"k": second, "v": views["v_compressed"]}
    listed = launch_decode.pages(replace(problem, page_size=second.page_size), of_second)
    return arguments | launch_decode.page_arguments(*listed, "_compressed"), second.page_size


def ready(p: Problem, m: CallMemory) -> launching.Ready:
    """Returns the prepared kernel launches of attention to selected keys, for one memory layout (strides, device)."""
    of_pages, page_compressed = pages(p, m.views)
    device, align, listed = m.device, m.align, m.on("tokens", tokens)
    tile = shapes.on(device, shapes_sparse.forward_tile, p, align)
    numbers = launch_dense.numbers(p)
    arguments = ABSENT | {name: numbers[name] for name in ("scale", "exponent", "unit")} | m.fixed
    arguments |= of_pages | {"heads_kv": p.heads_kv, "tokens": listed.tensor}
    is_near, recompute = near(m.views, m.capacity), shapes.recompute_tile("recompute_out", p)
    count = len(listed.tensor)
    most = sum(slots(p, m.capacity))
    keys_per_split = slots_per_program(p, most, count, tile, launch_decode.processors(device))
    tables: tuple[layout_table.Copied, ...] = m.strides, m.lengths, listed
    shares, names = -(-most // keys_per_split), list(m.given)
    of_forward, of_recompute = (
        constants(p, one, align, is_near, shares > 1, page_compressed) for one in (tile, recompute)
    )
    scratch: dict[str, launching.Scratch] = {}
    if shares > 1:
        joined = m.on(f"shares {shares}", lambda e: work(p, e, shares))
        arguments |= {"work": joined.tensor, "rows": p.group, "per": keys_per_split}
        scratch["partials"] = launching.Scratch((count * shares * p.heads_q * launch_decode.buffer(p),))
        tables, names = (*tables, joined), [*names, "partials"]
    grid = count * programs(p, tile), max(shares, 1)
    launches = [FAMILY.launch(sparse_forward, grid, arguments, names, of_forward, tile)]
    if shares > 1:
        grid = count * p.group, p.heads_kv
        launches.append(FAMILY.launch(join, grid, arguments, names, of_forward, launch_decode.JOIN))
    tokens_of = (count * programs(p, recompute),)
    launches.append(FAMILY.launch(recompute_lists, tokens_of, arguments, names, of_recompute, recompute))
    return launching.Ready(launches, tables, scratch)
