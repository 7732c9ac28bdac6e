"""Launches of the decode kernels: how many shares the keys are cut into, the cache's pages, the memory between the two.

Knows caches. Refuses to know who filled them.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from fusion_attention.backends.triton import launch_dense, memory, shapes
from fusion_attention.backends.triton.decode import decode, join
from fusion_attention.backends.triton.mend import mend_out
from fusion_attention.contract import BackendError
from fusion_attention.memory import empty
from fusion_attention.waist.kv import PagedView, RowView
from fusion_attention.waist.problem import Extents, Operands, Problem

# The kernels' programs are meant to fill the chip a few times over; more shares only add to what is joined.
WAVES = 3
MOST_SPLITS = 64
MOST_SEQUENCES = 65535  # programs of a grid along its last axes
INTERPRETED_PROCESSORS = 4
CACHES = ("k", "v", "k_rope", "scale_k", "offset_k", "scale_v", "offset_v")


def serves(problem: Problem, extents: Extents) -> bool:
    """Whether the decode kernels compute a forward: a cache needs them, and few rows with many keys gain by them."""
    p = problem
    if p.page_size or p.kv_dtype:
        return True
    if p.dropout != "none" or p.empty_rows != "zero" or not len(extents):
        return False
    q_len, kv_len = extents.chosen_by
    return int(q_len.max()) * p.group <= 64 and int(kv_len.max()) >= 512


def tile_for(problem: Problem, extents: Extents, device: torch.device, aligned: bool) -> shapes.Tile:
    """The table's tile, as low as the rows allow."""
    tile = launch_dense.tile_on("decode", problem, device, aligned)
    most = int(extents.q_len.max(initial=1)) * problem.group
    return tile._replace(BM=min(tile.BM, shapes.power(most)))


def decode_constants(
    problem: Problem, tile: shapes.Tile, aligned: bool
) -> tuple[launch_dense.Constants, launch_dense.Constants]:
    """What decode and join know while compiling."""
    p = problem
    known = launch_dense.constants(p, tile, 0, aligned)
    special = {"RAW": launch_dense.raw(p)} | launch_dense.cache_constants(p, known["ALIGN"])
    of_join = {name: known[name] for name in ("V0", "V1", "V2", "DIM_V", "ALIGN")} | {"SINK": p.has_sink}
    return {name: value for name, value in known.items() if name not in ("MEAN", "DROPOUT")} | special, of_join


def plan(problem: Problem, extents: Extents) -> launch_dense.Schedule:
    """The decode kernels read lengths on the device: nothing of them is planned but how many rows there may be."""
    return launch_dense.Schedule("attention_forward", 0, memory.Kept(extents), int(extents.q_len.sum()), decodes=True)


@functools.lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def splits_of(programs: int, keys: int, tile: shapes.Tile, device: torch.device) -> int:
    """Into how many shares `keys` keys are cut, given how many programs there are without a cut."""
    wanted = -(-WAVES * processors(device) // max(programs, 1))
    return max(1, min(wanted, -(-keys // (2 * tile.BN)), MOST_SPLITS))


def pool_of(view: PagedView, heads: int) -> int:
    """The last page that lies in a pool's memory as a whole; -1 if none."""
    pool = view.pool
    held = pool.untyped_storage().nbytes() // pool.element_size() - pool.storage_offset()
    row_end = (heads - 1) * view.stride_head + (view.page_size - 1) * view.stride_token + view.dim
    return (held - row_end) // view.stride_page if held >= row_end else -1


def pages(problem: Problem, views: dict[str, memory.View | None]) -> tuple[torch.Tensor | None, int]:
    """(table, last page of every pool; -1: some pool holds none) of the caches.

    Raises:
        BackendError: caches with tables of their own, of another kind than the problem says, or of rows in pieces.
    """
    caches = {name: view for name, view in views.items() if name in CACHES and view is not None}
    paged = {name: view for name, view in caches.items() if isinstance(view, PagedView)}
    if not problem.page_size:
        if paged:
            raise BackendError(
                f"fusion_attention: triton: expected rows at addresses, got pages for {', '.join(paged)}"
            )
        return None, 0
    in_pieces = [name for name, view in paged.items() if view.piece]
    if in_pieces:
        raise BackendError(f"fusion_attention: triton: expected rows in one piece, got pieces for {in_pieces[0]}")
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


def run(problem: Problem, extents: Extents, schedule: launch_dense.Schedule, o: Operands) -> None:
    """Launches decode, join, and the kernel that mends."""
    p, count, kept = problem, len(extents), schedule.kept
    step = np.ones(count, np.int64)
    views = launch_dense.views_of(p, o) | {"flat": RowView((), extents.q_start * p.heads_q, p.heads_q, step, 1)}
    for name, dequant in (("k", o.dequant_k), ("v", o.dequant_v)):
        if dequant is not None and getattr(p, f"dequant_{name}") != "none":
            views |= {f"scale_{name}": dequant.scale, f"offset_{name}": dequant.offset}
    table, last = pages(p, views)
    tensors = launch_dense.tensors_of(p, o, {name: view for name, view in views.items() if name != "flat"})
    device = memory.one_device(tensors | {"table": table})
    if not schedule.rows:
        return
    if count > MOST_SEQUENCES:
        raise BackendError(f"fusion_attention: triton: expected at most {MOST_SEQUENCES} sequences, got {count}")
    addresses = memory.places(views, count)
    aligned = memory.aligned(views, addresses)
    tile = tile_for(p, extents, device, aligned)
    most = int(extents.q_len.max())
    blocks = -(-most * p.group // tile.BM)
    # Without a page no key is read. A graph serves all lengths of its plan: shares are cut from what there may be.
    width, stride, longest = 0, 0, int(kept.capacity.kv_len.max())
    if table is not None:
        width, stride = table.shape[1] if last >= 0 else 0, table.stride(0)
        longest = width * p.page_size
    splits = splits_of(blocks * p.heads_kv * count, longest, tile, device)
    plane = schedule.rows * p.heads_q * (p.dim_v + 2)
    arguments = dict.fromkeys(CACHES) | tensors | launch_dense.numbers(p, o) | {
        "table": table, "width": width, "step": stride, "last": last, "splits": splits, "plane": plane,
        "count": count,
        "part": empty(tensors["q"], (splits * plane,), torch.float32),
        "places": kept.places(addresses, device),
        "lengths": kept.on(device, "lengths", memory.lengths),
    }  # fmt: skip
    known, known_join = decode_constants(p, tile, aligned)
    known_mend = launch_dense.mend_out_constants(p, aligned)
    with launch_dense.on(device):
        launch_dense.launch(decode, (blocks * splits, p.heads_kv, count), arguments, known, tile)
        launch_dense.launch(join, (most * p.heads_q, count), arguments, known_join, tile)
        launch_dense.launch_mend(mend_out, p, extents.q_len, p.heads_q, arguments, known_mend)


def workspace_bytes(problem: Problem, schedule: launch_dense.Schedule) -> int:
    """At most: with every share that the keys could be cut into."""
    return 4 * MOST_SPLITS * schedule.rows * problem.heads_q * (problem.dim_v + 2)
