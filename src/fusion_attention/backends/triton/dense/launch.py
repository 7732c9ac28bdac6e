"""Launches of the dense kernels: compile-time constants, lists of tiles, and arguments.

Common parameters: `tile` is the tile shape of the named kernel, `align` the alignment of rows, in elements of q;
`views` are strided views by name ("q", ...), and `given` tensors and numbers by kernel argument name, of a call.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fusion_attention.backends.triton.common import bias, layout_table, shapes
from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common.launching import Constants, Family, Launch, Ready, Schedule, Scratch
from fusion_attention.backends.triton.common.layout_table import CallMemory
from fusion_attention.backends.triton.decode.kernel import decode, join
from fusion_attention.backends.triton.dense import select_gluon
from fusion_attention.backends.triton.dense.backward import backward_key, backward_query, prepare
from fusion_attention.backends.triton.dense.forward import forward
from fusion_attention.backends.triton.dense.not_finite import recompute_key, recompute_out, recompute_query
from fusion_attention.ir import dropout, tiles
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem

DEQUANTS = {"none": 0, "channel": 1, "token": 2}
MEANS = {"zero": 0, "mean": 1, "mean_in_band": 2}
PLANES = 2  # number of arrays that prepare() writes, with one number per row
_NOTES = 4  # float32 numbers in 16 bytes, the alignment of a sequence's rows in these arrays
FAMILY = Family(
    forward, prepare, backward_query, backward_key, decode, join, recompute_out, recompute_query, recompute_key
)
# Values of arguments that a problem does not use.
ABSENT: dict[str, Any] = dict.fromkeys(
    ("q_rope", "k_rope", "bias", "slopes", "blocked", "bits", "sink", "dlse", "dq_rope", "dk_rope", "dbias", "partials",
     "large", "table", "scale_k", "offset_k", "scale_v", "offset_v")
) | {"width": 0, "step": 0, "last": 0}  # fmt: skip
DRAWS = ("seed", "offset")
LEAST_KEEP = 2.0**-60  # smallest keep_prob in kernels; the remaining factor is applied afterwards


def constants(problem: Problem, tile: shapes.Tile, align: int) -> Constants:
    """Returns the compile-time arguments of the dense and decode kernels by name, of which each takes its own; tile: a
    kernel's tile shape; align: alignment of rows, in elements of q. MEAN (rows without visible keys return the mean of
    V) depends on the problem, not on the batch, so that a later batch of a training needs no other kernel. ALIGN_KV is
    the alignment of a KV cache's rows in its own elements. D0 to D2, V0 to V2 and R are the widths of column blocks of
    q and k, of values and of the rotary part."""
    p = problem
    d, v = shapes.parts(p.dim_qk), shapes.parts(p.dim_v)
    widths = {f"{name}{n}": width for name, all_widths in (("D", d), ("V", v)) for n, width in enumerate(all_widths)}
    return widths | {
        "DIM": p.dim_qk,
        "DIM_V": p.dim_v,
        "R": shapes.power(p.dim_rope) if p.dim_rope else 0,
        "DIM_ROPE": p.dim_rope,
        "GROUP": p.group,
        "BIAS": bias.BIASES[p.bias],
        "CAP": p.softcap,
        "BLOCKED": p.has_blocked,
        "DROPOUT": common.DROPOUTS[p.dropout],
        "MEAN": MEANS[p.empty_rows],
        "RAW": raw(p),
        "SINK": p.has_sink,
        "PAGE": p.page_size,
        "DEQUANT_K": DEQUANTS[p.dequant_k],
        "DEQUANT_V": DEQUANTS[p.dequant_v],
        "ALIGN": align,
        "ALIGN_KV": align * 16 // shapes.widest(p) if p.kv_dtype == "int8" and align > 1 else align,
        "BM": tile.BM,
        "BN": tile.BN,
        "TMA": tile.TMA,
    }


def raw(problem: Problem) -> bool:
    """Returns True if the softmax may read unscaled products q . k: no bias, no softcap, and a positive scale."""
    return problem.bias == "none" and problem.softcap == 0 and problem.scale > 1e-30


def forward_tiles(problem: Problem, extents: Extents, tile: shapes.Tile) -> np.ndarray:
    """Returns the forward kernel's tiles of query rows, int32 [tiles, 8], the longest first.

    Columns: sequence, first row, end, and the tiles of keys that the tile reads: `begin` and `left`, first key and
    number of masked tiles; `full` and `again`, first key and end of unmasked tiles; `right`, masked tiles from `again`
    on. tile: BM rows, BN keys.
    """
    t, size = tiles.by_query(extents, tile.BM), tile.BN
    begin = t.begin // size * size
    end = np.where(t.end > t.begin, t.end, begin)
    full, again = -(-t.full_begin // size) * size, t.full_end // size * size
    complete = (again > full) & (not problem.has_blocked)
    left = np.where(complete, full - begin, end - begin)
    full = np.where(complete, full, begin)
    again = np.where(complete, again, begin)
    right = np.where(complete, end - again, 0)
    fields = (t.seq, t.row0, t.row1, begin, -(-left // size), full, again, -(-right // size))
    order = np.argsort(begin - end, kind="stable")
    return np.stack(fields, 1)[order].astype(np.int32)


def query_tiles(extents: Extents, tile: shapes.Tile) -> np.ndarray:
    """Returns the tiles of query rows for prepare() and backward_query(), int32 [tiles, 8], the longest first.

    Columns: sequence, first row, end, first key, number of tiles of keys, three zeros. tile: BM rows, BN keys.
    """
    t = tiles.by_query(extents, tile.BM)
    begin = t.begin // tile.BN * tile.BN
    return _turns(t, begin, np.where(t.end > t.begin, t.end, begin), tile.BN)


def key_tiles(extents: Extents, tile: shapes.Tile, mean: bool) -> np.ndarray:
    """Returns the tiles of keys for the kernel backward_key(), int32 [tiles, 8], the longest first.

    Columns: sequence, first key, end, first query row that sees it, number of tiles of rows from there on, and, if
    `mean`, number of tiles of all rows, as the mean of V includes every key. tile: BM rows, BN keys.
    """
    t = tiles.by_key(extents, tile.BN)
    begin = t.begin // tile.BM * tile.BM
    means = -(-extents.q_len[t.seq] // tile.BM) if mean else 0
    return _turns(t, begin, np.where(t.end > t.begin, t.end, begin), tile.BM, means)


def _turns(t: tiles.Tiles, begin: np.ndarray, end: np.ndarray, size: int, means: np.ndarray | int = 0) -> np.ndarray:
    """Returns int32 [tiles, 8], the longest first: t's sequence, first row (or key) and end, first key (or row) that
    the tile reads, number of tiles of `size` from begin to end, `means`, two zeros."""
    none = np.zeros_like(begin)
    turns = -(-(end - begin) // size)
    order = np.argsort(-turns, kind="stable")
    return np.stack((t.seq, t.row0, t.row1, begin, turns, none + means, none, none), 1)[order].astype(np.int32)


def may_be_empty(problem: Problem, extents: Extents) -> bool:
    """Returns True if the band or a mask matrix may hide all keys from a query row of a sequence that has keys."""
    if problem.has_blocked:
        return True
    t = tiles.by_query(extents, 1)
    return bool(((t.full_end <= t.full_begin) & (extents.kv_len[t.seq] > 0)).any())


def workspace_bytes(problem: Problem, schedule: Schedule) -> int:
    """Returns the bytes of scratch that a dense backward allocates (lse, D, ...); 0 for a forward."""
    if schedule.op_kind == "attention_forward":
        return 0
    sinks = -(-schedule.rows // shapes.NARROWEST) + len(schedule.device_tables.extents) if problem.has_sink else 0
    flags = 4 * len(schedule.device_tables.extents) * problem.heads_kv if problem.dtype == "float16" else 0
    return 4 * problem.heads_q * (PLANES * int(noted(schedule.device_tables.extents).sum()) + sinks) + flags


def noted(extents: Extents) -> np.ndarray:
    """Returns int [sequences]: the floats that each sequence occupies in prepare()'s arrays (lse and D per row),
    rounded up so that every sequence begins at a multiple of 16 bytes."""
    return -(-extents.q_len // _NOTES) * _NOTES


# ------------------------------------------------------------------------------------------------------------ memory


def views_of(problem: Problem, o: Operands) -> dict[str, layout_table.View | None]:
    """Returns the strided views of q, k, v, out, max and sum by name, and those of rope parts, bias, mask matrix and
    dropout bits, None for those that the problem lacks."""
    p = problem
    return {
        "q": o.q, "k": o.k, "v": o.v, "out": o.out, "max": o.stats.max, "sum": o.stats.sum,
        "q_rope": o.q_rope if p.dim_rope else None,
        "k_rope": o.k_rope if p.dim_rope else None,
        "bias": o.bias if p.bias in ("matrix", "table") else None,
        "blocked": o.blocked if p.has_blocked else None,
        "drop_bits": o.drop_bits if p.dropout == "bits" else None,
    }  # fmt: skip


def drawn(problem: Problem, extents: Extents) -> tuple[np.ndarray, ...] | None:
    """Returns (random stream of head 0, first row, first key) of each sequence, int [sequences], for dropout drawn from
    a seed; None for other dropout."""
    if problem.dropout != "philox":
        return None
    if (origin := extents.chunk_origin) is not None:
        return origin.stream, origin.first_row, origin.first_key
    count = np.arange(len(extents), dtype=np.int64)
    return count * problem.heads_q, np.zeros_like(count), np.zeros_like(count)


def given_by(problem: Problem, o: Operands, views: dict[str, layout_table.View | None]) -> dict[str, Any]:
    """Returns {kernel argument name: tensor} for the operands `o`; views: strided views by name, None if absent."""
    p = problem
    given = layout_table.tensors(views)
    if p.has_blocked:
        given["blocked"] = given["blocked"].view(torch.uint8)
    if p.bias in ("slopes", "slopes_sqrt"):
        given["slopes"] = float32(o.slopes)
    if p.has_sink:
        given["sink"] = float32(o.sink)
    return given


def draws(o: Operands) -> dict[str, int]:
    """Returns dropout's seed and offset by kernel argument name, as signed int64 and int32 of the same bits."""
    seed = o.seed & (1 << 64) - 1
    return {
        "seed": seed - (1 << 64) if seed >> 63 else seed,
        "offset": ((o.offset & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000,
    }


def float32(values: torch.Tensor | None) -> torch.Tensor | None:
    """Returns values as a contiguous float32 tensor, copied only if they are not; None for None."""
    return None if values is None else values.to(torch.float32).contiguous()


def numbers(problem: Problem) -> dict[str, Any]:
    """Returns {kernel argument name: number} for the numbers that the problem alone determines, such as the scale."""
    p = problem
    unit = p.scale if raw(p) else 1.0
    return {
        "heads_q": p.heads_q,
        "unit": unit,
        "exponent": unit * common.LOG2E.value,
        "scale": p.scale,
        "factor": p.scale if p.bias_scaled else 1.0,
        "keep_prob": max(p.keep_prob, LEAST_KEEP),
        "threshold": dropout.threshold(p.keep_prob),
    }


def launch_recompute(
    kernel: Any, p: Problem, lengths: np.ndarray, heads: int, fixed: dict[str, Any], given: Iterable[str], align: int
) -> list[Launch]:  # fmt: skip
    """Returns a list with the prepared launch of a kernel that recomputes query rows (or keys) with NaN or infinite
    results; [] if there are no rows. lengths, heads: of the rows (or keys). fixed, given: arguments of all runs by
    name, and names of those of each run. align: alignment of rows, in elements of q."""
    tile = shapes.recompute_tile(kernel.__name__, p)
    blocks = -(-int(lengths.max(initial=0)) // (tile.BN if kernel is recompute_key else tile.BM))
    grid = blocks * len(lengths), heads
    constexprs = constants(p, tile, align)
    return [FAMILY.launch(kernel, grid, fixed | {"blocks": blocks}, given, constexprs, tile)] if blocks else []


def keep_rest(problem: Problem) -> float:
    """Returns max(1, 2^-60 / keep_prob): kernels use at least 2^-60 as keep_prob, and results are then multiplied by
    this factor."""
    return LEAST_KEEP / problem.keep_prob if problem.keep_prob < LEAST_KEEP else 1.0


def enlarge(tensor: torch.Tensor, by: float) -> None:
    """Multiplies a tensor in place by `by` >= 1, in steps that do not overflow float32, so that 0 stays 0."""
    while by > 1:
        step = min(by, 2.0**120)
        tensor.mul_(step)
        by /= step


def enlarge_rows(view: RowView | None, heads: int, lengths: np.ndarray, by: float) -> None:
    """Multiplies the rows of a view (None: none) in place by `by` >= 1; lengths: rows of each sequence."""
    for b, length in enumerate(lengths.tolist() if view is not None else ()):
        assert view is not None
        enlarge(view.sequence(b, heads, length), by)


def reduced(view: RowView, heads: int, lengths: np.ndarray, by: float) -> RowView:
    """Returns a contiguous float32 copy of the rows of a view, divided by `by`; lengths: rows of each sequence."""
    rows = [(view.sequence(b, heads, n).double() / by).float().flatten() for b, n in enumerate(lengths.tolist())]
    sizes = heads * lengths * view.dim
    return RowView((torch.cat(rows),), np.cumsum(sizes) - sizes, view.dim, lengths * view.dim, view.dim)


def run_forward(problem: Problem, extents: Extents, schedule: Schedule, o: Operands) -> None:
    """Writes out, max and sum of dense attention to the views in `o`; rows with NaN or infinities are recomputed."""
    views = views_of(problem, o)
    given = given_by(problem, o, views)

    def make() -> Ready:
        m = CallMemory(views, given, schedule.device_tables, positions=drawn(problem, extents))
        return ready_forward(problem, extents, m)

    schedule.once(layout_table.layout(views, given), make).run(given | draws(o))
    enlarge_rows(o.out, problem.heads_q, extents.q_len, keep_rest(problem))


def ready_forward(p: Problem, e: Extents, m: CallMemory) -> Ready:
    """Returns the prepared kernel launches of a dense forward, for one memory layout (strides, alignments, device)."""
    device, align, names = m.device, m.align, [*m.given, *DRAWS]
    tile = shapes.on(device, partial(shapes.tile_of, "forward"), p, align if layout_table.apart(m.views) else 1)
    kernel, constexprs, options = forward, constants(p, tile, align), dict[str, Any]()
    if select_gluon.serves(p, device, tile):
        kernel, tile, options = select_gluon.kernel(), select_gluon.TILE, select_gluon.OPTIONS
        constexprs = select_gluon.constants(p, align)
    tiled = m.on(f"forward {tile}", lambda e: forward_tiles(p, e, tile))
    arguments = ABSENT | numbers(p) | m.fixed | {"tiles": tiled.tensor}
    grid = len(tiled.tensor), p.heads_q
    launches = [FAMILY.launch(kernel, grid, arguments, names, constexprs, tile, **options)]
    launches += launch_recompute(recompute_out, p, e.q_len, p.heads_q, arguments, names, align)
    return Ready(launches, (m.strides, m.lengths, tiled))


def run_backward(problem: Problem, extents: Extents, schedule: Schedule, o: Operands, g: Grads) -> None:
    """Writes the gradients `g` of dense attention; rows with NaN or infinities are recomputed.

    For keep_prob below 2^-60, kernels divide gradients by keep_rest(), because dP / keep_prob - D would overflow.
    """
    p, by = problem, keep_rest(problem)
    if g.dbias is not None and g.owns_dbias:  # kernels add to dbias
        summed = torch.zeros_like(g.dbias.keep, dtype=torch.float32)
        added = replace(g, dbias=replace(g.dbias, keep=summed), owns_dbias=False)
        run_backward(problem, extents, schedule, o, added)
        g.dbias.keep.copy_(summed)
        return
    if by == 1:
        launch_backward(p, extents, schedule, o, g)
        return
    out = reduced(o.out, p.heads_q, extents.q_len, by)
    dlse = None if g.dlse is None else reduced(g.dlse, p.heads_q, extents.q_len, by)
    before = None if g.dbias is None else g.dbias.keep.clone()
    if g.dbias is not None:
        g.dbias.keep.zero_()
    launch_backward(p, extents, schedule, replace(o, out=out), replace(g, dlse=dlse))
    for view in (g.dq, g.dq_rope):
        enlarge_rows(view, p.heads_q, extents.q_len, by)
    for view in (g.dk, g.dv, g.dk_rope):
        enlarge_rows(view, p.heads_kv, extents.kv_len, by)
    if g.dsink is not None:
        enlarge(g.dsink, by)
    if g.dbias is not None and before is not None:
        enlarge(g.dbias.keep, by)
        g.dbias.keep.add_(before)


def launch_backward(problem: Problem, extents: Extents, schedule: Schedule, o: Operands, g: Grads) -> None:
    """Launches the kernels that write the gradients `g`, divided by keep_rest() if keep_prob is below 2^-60."""
    p = problem
    views = views_of(p, o) | {
        "dout": g.dout, "dlse": g.dlse, "dq": g.dq, "dk": g.dk, "dv": g.dv,
        "dq_rope": g.dq_rope if p.dim_rope else None,
        "dk_rope": g.dk_rope if p.dim_rope else None,
        "dbias": g.dbias if p.bias in ("matrix", "table") else None,
    }  # fmt: skip
    given = given_by(p, o, views)
    ready = schedule.once(layout_table.layout(views, given), lambda: ready_backward(p, extents, schedule, views, given))
    ready.run(given := given | draws(o))
    if g.dsink is not None:
        partials = given.get("partials")
        g.dsink.copy_(torch.zeros_like(g.dsink) if partials is None else partials.sum(0))


def ready_backward(
    p: Problem, e: Extents, schedule: Schedule, views: dict[str, layout_table.View | None], given: dict[str, Any]
) -> Ready:
    """Returns the prepared kernel launches of a dense backward, for the memory layout of `views` and `given`."""
    rows, count = noted(e), len(e)
    buffer = int(rows.sum())
    # Only the strides of this view are used.
    flat = RowView((given["q"],), np.cumsum(rows) - rows, 1, np.full(count, buffer, np.int64), 1)
    m = CallMemory(views, given, schedule.device_tables, {"flat": flat}, drawn(p, e))
    device, align, apart = m.device, m.align, layout_table.apart(views)
    query = shapes.on(device, partial(shapes.tile_of, "query"), p, align if apart else 1)
    apart = apart and layout_table.heads_apart(views)
    key = shapes.on(device, partial(shapes.tile_of, "key"), p, align if apart else 1)
    of_query, of_key = constants(p, query, align), constants(p, key, align)
    mean = p.empty_rows != "zero"
    by_query = m.on(f"query {query}", lambda e: query_tiles(e, query))
    by_key = m.on(f"key {key}", lambda e: key_tiles(e, key, mean and may_be_empty(p, e)))
    scratch = {"flat": Scratch((PLANES * p.heads_q * buffer,))}
    if p.dtype == "float16":
        scratch["large"] = Scratch((count * p.heads_kv,), torch.int32, cleared=True)
    tiles_of_rows, tiles_of_keys = len(by_query.tensor), len(by_key.tensor)
    if p.has_sink:
        scratch["partials"] = Scratch((tiles_of_rows, p.heads_q))
    names = [*given, *DRAWS, *scratch]
    shared = ABSENT | numbers(p) | m.fixed | {"plane": p.heads_q * buffer}
    launches: list[Launch] = []
    if tiles_of_rows:
        grid, of_rows = (tiles_of_rows, p.heads_q), shared | {"tiles": by_query.tensor}
        launches += (
            FAMILY.launch(prepare, grid, of_rows, names, of_query, query),
            FAMILY.launch(backward_query, grid, of_rows, names, of_query, query),
            *launch_recompute(recompute_query, p, e.q_len, p.heads_q, shared, names, align),
        )
    if tiles_of_keys:
        of_keys = shared | {"tiles": by_key.tensor}
        launches.append(FAMILY.launch(backward_key, (tiles_of_keys, p.heads_kv), of_keys, names, of_key, key))
        launches += launch_recompute(recompute_key, p, m.capacity.kv_len, p.heads_kv, shared, names, align)
    return Ready(launches, (m.strides, m.lengths, by_query, by_key), scratch)
