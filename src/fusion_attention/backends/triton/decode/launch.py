"""Launches of the decode kernels: the work list of key ranges, page tables, and scratch of partial results.

A row here is a pair (query row, query head of a key head), numbered row * group + head: all of them read the same keys.
"""

import functools

import numpy as np
import torch

from fusion_attention.backends.triton.common import launching, layout_table, shapes
from fusion_attention.backends.triton.common.layout_table import CallMemory
from fusion_attention.backends.triton.decode.kernel import MOST_SHARES, decode, join
from fusion_attention.backends.triton.dense import launch as launch_dense
from fusion_attention.backends.triton.dense.not_finite import recompute_out
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.contract import BackendError
from fusion_attention.ir.memory_views import PagedView, RowView
from fusion_attention.ir.problem import Extents, Operands, Problem
from fusion_attention.ir.tiles import divided

# The number of programs is about WAVES times what the GPU runs at once; more ranges only add partial results to merge.
WAVES = 3
LEAST_TILES = 2  # tiles of keys in a range
INTERPRETED_PROCESSORS = 4
MOST_PROCESSORS = 256
FEW_ROWS, HIGHEST = 32, 128  # rows per tile, from the query heads of a key head
JOIN = shapes.Tile(0, 0, 4, 1)
LAST_PAGE = (1 << 31) - 1  # highest page number in an int32 page table
CACHES = ("k", "v", "k_rope", "scale_k", "offset_k", "scale_v", "offset_v")
FACTORS = CACHES[3:]  # scales and offsets of int8 caches


def serves(problem: Problem, extents: Extents) -> bool:
    """Returns True if the decode kernels compute an attention forward on these lengths: a KV cache in pages or int8
    requires them, and they are faster for few query rows with many keys."""
    p = problem
    if p.page_size or p.kv_dtype:
        return True
    if p.dropout != "none" or p.empty_rows != "zero" or not len(extents):
        return False
    q_len, kv_len = extents.chosen_by
    return int(q_len.max()) * p.group <= 64 and int(kv_len.max()) >= 512


def tables_for(problem: Problem, rows: int) -> tuple[str, ...]:
    """Returns the names of tables of the decode kernel's tile shapes, best first; rows: query rows per key head."""
    int8 = problem.kv_dtype == "int8"
    if shapes_sparse.shared(problem) and not int8:
        return "latent", "decode"
    many = ("prefill int8" if int8 else "prefill",) if rows > FEW_ROWS else ()
    return *many, "decode"


def buffer(problem: Problem) -> int:
    """Returns the number of floats in a row's partial result: dim_v values, max and sum, padded to 16 bytes."""
    return -(-(problem.dim_v + 2) // 4) * 4


def paired(problem: Problem) -> bool:
    """Returns True if the decode kernel loads int8 values in pairs, as it transposes tiles in units of 16 bits."""
    first, second, _ = shapes.parts(problem.dim_v)
    return (
        problem.kv_dtype == "int8"
        and not shapes_sparse.shared(problem)
        and not (second or problem.dim_v % 2)
        and first >= 32
    )


@functools.lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of a device."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def work(problem: Problem, extents: Extents, tile: shapes.Tile, wanted: int) -> np.ndarray:
    """Returns the decode kernel's work list, int32 [wanted + tiles, 8]: an entry per range of keys of a tile of rows.

    An entry has the sequence, first row and end, first key and end, and the number of ranges of its tile. The last two
    columns of entry n have the first entry and the number of ranges of the n-th tile with several ranges. Entries whose
    results are merged are first, then the longest. Ranges have about equal numbers of keys, so only long sequences are
    split. Unused entries have no rows; they are used by other key lengths of the same rows. tile: BM rows and BN keys;
    wanted: the desired number of ranges of all sequences.
    """
    e, size = extents, tile.BN
    seq, row0, row1 = divided(e.q_len * problem.group, tile.BM)
    first, last = row0 // problem.group, (row1 - 1) // problem.group
    begin = np.clip(first + e.lo[seq], 0, e.kv_len[seq]) // size * size
    end = np.clip(np.maximum(last + e.hi[seq], e.prefix[seq]), begin, np.maximum(e.kv_len[seq], begin))
    turns = -(-(end - begin) // size)
    each = max(-(-int(turns.sum()) // wanted), LEAST_TILES, -(-int(turns.max(initial=0)) // MOST_SHARES.value))
    shares = np.maximum(-(-turns // each), 1)
    order = np.lexsort((-turns, shares == 1))
    of, shares = np.repeat(order, shares[order]), shares[order]
    at = np.cumsum(shares) - shares
    split, count = np.arange(len(of)) - np.repeat(at, shares), np.repeat(shares, shares)
    per = -(-turns[of] // count) * size
    start = np.minimum(begin[of] + split * per, end[of])
    listed = np.zeros((wanted + len(seq), layout_table.TILE_FIELDS), np.int32)
    fields = (seq[of], row0[of], row1[of], start, np.minimum(start + per, end[of]), count)
    listed[: len(of), : len(fields)] = np.stack(fields, 1)
    many = shares > 1
    listed[: many.sum(), len(fields) :] = np.stack((at[many], shares[many]), 1)
    return listed


def buffer_for_shares(problem: Problem, extents: Extents, tile: shapes.Tile, wanted: int) -> tuple[int, int]:
    """Returns (most tiles of query rows whose keys are split into several ranges, most ranges of these tiles); wanted:
    the desired number of ranges of all sequences."""
    tiles = len(divided(extents.q_len * problem.group, tile.BM)[0])
    split_tiles = min(wanted, tiles)
    return split_tiles, min(wanted + split_tiles, tiles * MOST_SHARES.value)


def within(problem: Problem, views: dict[str, layout_table.View | None], tile: shapes.Tile) -> bool:
    """Returns True if each tile of BN keys lies in one page of the KV cache, and its offsets are below 2^31 elements;
    views: of the cache, by name."""
    token_strides = [
        abs(view.stride_token) for name in CACHES if isinstance(view := views.get(name), RowView | PagedView)
    ]
    return problem.page_size % tile.BN == 0 and max(token_strides) * tile.BN < 1 << 31


def pool_of(view: PagedView, heads: int) -> int:
    """Returns the number of the last page that lies completely in the memory of a paged view's pool, -1 for none;
    LAST_PAGE if the pool is an expanded tensor, in which all pages are one. heads: key heads in a page."""
    pool = view.pool
    elements = pool.untyped_storage().nbytes() // pool.element_size() - pool.storage_offset()
    row_end = (heads - 1) * view.stride_head + (view.page_size - 1) * view.stride_token + view.dim
    if elements < row_end:
        return -1
    return (elements - row_end) // view.stride_page if view.stride_page else LAST_PAGE


def pages(problem: Problem, views: dict[str, layout_table.View | None]) -> tuple[torch.Tensor | None, int]:
    """Returns (page table, last page that is completely in all pools, -1: none) of the KV caches among `views`; (None,
    0) without pages.

    Raises:
        BackendError: caches with different tables, with pages that contradict the problem, or with fragmented rows.
    """
    caches = {name: view for name, view in views.items() if name in CACHES and view is not None}
    paged = {name: view for name, view in caches.items() if isinstance(view, PagedView)}
    if not problem.page_size:
        if paged:
            raise BackendError(f"fusion_attention: triton: expected contiguous rows, got pages for {', '.join(paged)}")
        return None, 0
    in_pieces = [name for name, view in paged.items() if view.fragment]
    if in_pieces:
        raise BackendError(f"fusion_attention: triton: expected contiguous rows, got format NZ for {in_pieces[0]}")
    first = paged.get("k")
    rows = ("k", "v", "k_rope", *(f"scale_{side}" for side in "kv" if getattr(problem, f"dequant_{side}") == "token"))
    strangers = [name for name in rows if name in caches and name not in paged]
    if first is None or strangers:
        raise BackendError(f"fusion_attention: triton: expected pages for k and v, got rows for {', '.join(strangers)}")
    table = first.table
    others = [
        name
        for name, view in paged.items()
        if view.table.data_ptr() != table.data_ptr() or view.table.stride() != table.stride()
    ]
    if others:
        raise BackendError(f"fusion_attention: triton: expected one page table, got another for {', '.join(others)}")
    return table, min(pool_of(view, problem.heads_kv) for view in paged.values())


def page_arguments(table: torch.Tensor | None, last: int, suffix: str = "") -> dict[str, int]:
    """Returns the kernel arguments about a page table, their names followed by `suffix`: pages per sequence, elements
    from a sequence's row to the next one's, and the last page number in the pool's memory.

    Without a table, or a complete page (last: -1), sequences have no pages, and no key is read.
    """
    width, step = (0, 0) if table is None else (table.shape[1] if last >= 0 else 0, table.stride(0))
    return {f"width{suffix}": width, f"step{suffix}": step, f"last{suffix}": last}


def run(problem: Problem, extents: Extents, schedule: launching.Schedule, o: Operands) -> None:
    """Writes out and the softmax's max and sum of all rows, by the decode kernels; rows with NaN or infinities are
    recomputed."""
    p = problem
    views = launch_dense.views_of(p, o) | dict.fromkeys(FACTORS)
    for name, dequant in (("k", o.dequant_k), ("v", o.dequant_v)):
        if dequant is not None and getattr(p, f"dequant_{name}") != "none":
            views |= {f"scale_{name}": dequant.scale, f"offset_{name}": dequant.offset}
    given = launch_dense.given_by(p, o, views)
    if isinstance(o.k, PagedView):
        given["table"] = o.k.table
    result = schedule.once(
        layout_table.layout(views, given), lambda: ready(p, extents, CallMemory(views, given, schedule.device_tables))
    )
    result.run(given | launch_dense.draws(o))


def ready(p: Problem, e: Extents, m: CallMemory) -> launching.Ready:
    """Returns the prepared kernel launches of a decode forward, for one memory layout (strides, alignments, device)."""
    table, last = pages(p, m.views)
    device, align = m.device, m.align
    chip, most = shapes.chip_of(device), int(e.q_len.max(initial=1)) * p.group
    assert chip is not None  # reasons_against() has looked
    tiles = (shapes.tile_of(table, p, chip, align) for table in tables_for(p, most))
    tile = next(tile for tile in tiles if tile is not None)
    tile = tile._replace(BM=min(tile.BM, shapes.power(most)))
    wanted = max(1, WAVES * processors(device) // p.heads_kv)  # ranges of all keys per key head, which fill the GPU
    split_tiles, shares = buffer_for_shares(p, e, tile, wanted)
    constexprs = launch_dense.constants(p, tile, align) | {
        "PAIRED": align == shapes.widest(p) and paired(p), "BUFFER": buffer(p), "WITHIN": within(p, m.views, tile),
        "SHARED": shapes_sparse.shared(p),
    }  # fmt: skip
    listed = m.on(f"work {tile} {wanted}", lambda e: work(p, e, tile, wanted))
    rows = min(tile.BM, int(e.q_len.max()) * p.group)
    arguments = launch_dense.ABSENT | launch_dense.numbers(p) | m.fixed | page_arguments(table, last)
    arguments |= {"rows": rows, "work": listed.tensor}
    scratch = {"partials": launching.Scratch((shares * p.heads_kv * rows * buffer(p),))}
    names = [*m.given, *launch_dense.DRAWS, *scratch]
    launches = [
        launch_dense.FAMILY.launch(decode, (len(listed.tensor), p.heads_kv), arguments, names, constexprs, tile),
        launch_dense.FAMILY.launch(join, (split_tiles * rows, p.heads_kv), arguments, names, constexprs, JOIN),
        *launch_dense.launch_recompute(recompute_out, p, e.q_len, p.heads_q, arguments, names, align),
    ]
    return launching.Ready(launches, (m.strides, m.lengths, listed), scratch)


def workspace_bytes(problem: Problem, schedule: launching.Schedule) -> int:
    """Returns an upper limit of the bytes of partial results, for the largest GPU and every tile shape."""
    p, extents = problem, schedule.device_tables.extents
    wanted = max(1, WAVES * MOST_PROCESSORS // p.heads_kv)
    most = min(HIGHEST, int(extents.q_len.max(initial=0)) * p.group)
    tiles = int((-(-extents.q_len * p.group // shapes.NARROWEST)).sum())
    return 4 * min(2 * wanted, tiles * MOST_SHARES.value) * p.heads_kv * most * buffer(p)
