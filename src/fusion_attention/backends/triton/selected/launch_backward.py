"""Launches of the backward over selected keys: chunks of tokens, and the memory between the kernels.

A chunk has P, dS and a row of gradients for each slot of its tokens. BUDGET determines its number of tokens, on which
results do not depend: tokens are computed separately, and key_sum.py adds rows to sums of keys in the order of tokens.

A slot is a place for a key that a token reads (launch.py). A gradient row is what a slot adds to its key's gradients:
the columns of dk, dk_rope and dv, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common import layout_index, layout_table, shapes
from fusion_attention.backends.triton.common.launching import Constants, Family, Launch, Schedule, Scratch, bytes_of
from fusion_attention.backends.triton.common.layout_table import CallMemory
from fusion_attention.backends.triton.dense.backward import prepare
from fusion_attention.backends.triton.dense.launch import PLANES, constants, float32, query_tiles
from fusion_attention.backends.triton.selected import launch_key_sum
from fusion_attention.backends.triton.selected import shapes_backward as cuts
from fusion_attention.backends.triton.selected.backward import backward_rows, backward_slots, weigh_slots
from fusion_attention.backends.triton.selected.launch import slots
from fusion_attention.backends.triton.selected.launch import tokens as listed_tokens
from fusion_attention.backends.triton.selected.launch_key_sum import Gradient, Where
from fusion_attention.backends.triton.selected.not_finite_gradients import recompute_rows, recompute_slots
from fusion_attention.backends.triton.selected.selection import read_lists
from fusion_attention.backends.triton.selected.shapes_backward import SlotTile
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem

BUDGET = 1 << 30  # bytes of a chunk, unless a single token takes more
PREPARE = shapes.Tile(16, 16, 8, 1)
RECOMPUTE = SlotTile(0, 16, 32, 4, 1)
ABSENT = frozenset(
    ("v", "q_rope", "k_rope", "indices", "k_compressed", "v_compressed", "dlse", "sink", "partials", "large")
)
FAMILY = Family(
    prepare, read_lists, weigh_slots, backward_rows, backward_slots, recompute_rows, recompute_slots,
    sources=("dq", "dq_rope", "dk", "dk_rope", "dv", "dk_compressed", "dv_compressed"),
)  # fmt: skip
MOST_PROGRAMS = 65535  # limit of the second and third axis of a grid
ALIGNED_COLUMNS = 16  # the sections of a row (dk, dk_rope, dv) begin at multiples of this number of columns


def columns_of(problem: Problem) -> tuple[dict[str, int], int]:
    """Returns ({"dk", "dk_rope", "dv": first column}, number of columns) of a row that holds the three gradients of one
    key side by side; dv is absent if values are the first columns of keys."""
    p = problem
    dims = {"dk": p.dim_qk} | ({"dk_rope": p.dim_rope} if p.dim_rope else {}) | ({} if p.shares_kv else {"dv": p.dim_v})
    result, columns = {}, 0
    for name, dim in dims.items():
        result[name] = columns
        columns += -(-dim // ALIGNED_COLUMNS) * ALIGNED_COLUMNS
    return result, columns


def slots_of(problem: Problem, extents: Extents, tiles: dict[str, SlotTile]) -> tuple[int, int]:
    """Returns (places for keys of the band, for all keys) per token, multiples of the largest BN of `tiles`.

    Both are compile-time values; those from lengths are rounded up to powers of two, so that few kernels are compiled.
    """
    size = max(tile.BN for tile in tiles.values())
    band, others = (-(-most // size) for most in slots(problem, extents))
    if problem.compressed_ratio:
        band, others = (
            1 << (tiles_of_source - 1).bit_length() if tiles_of_source else 0 for tiles_of_source in (band, others)
        )
    return band * size, (band + others) * size


def rows_dtype(problem: Problem, float32_rows: bool) -> torch.dtype:
    """Returns the dtype of a token's contributions to dk and dv: bfloat16 or float32 (float16 would overflow with a
    scaled loss); float32 if `float32_rows`, because the gradients of keys are float32."""
    return torch.bfloat16 if problem.dtype == "bfloat16" and not float32_rows else torch.float32


def bytes_of_token(problem: Problem, slots: int, row: torch.dtype) -> int:
    """Returns the bytes of scratch per token with up to `slots` keys; row: dtype of its contributions to dk, dv."""
    sums = problem.heads_kv * slots * launch_key_sum.BYTES_OF_ENTRY
    return sums + bytes_of(buffers_of(problem, 1, slots, row))


def buffers_of(problem: Problem, tokens: int, slots: int, row: torch.dtype) -> dict[str, Scratch]:
    """Returns {kernel argument name: temporary tensor's shape and dtype} for a chunk of `tokens` tokens with up to
    `slots` selected keys (slots) each.

    keys, ids: key (in its sequence) and id (in the sums of dk and dv) of every slot, -1 for none. used: end of the
    slots with a key, and noted: 1 if results are not finite, per token and key head. weights, ds: P and dS of every
    slot and query head. rows: contributions to dk and dv, of dtype `row`.
    """
    p, lists, token_heads = problem, tokens * problem.heads_kv * slots, tokens * problem.heads_kv
    numbers = {"keys": lists, "ids": lists, "used": token_heads, "noted": token_heads}
    results = {name: Scratch((count,), torch.int32) for name, count in numbers.items()}
    results |= dict.fromkeys(("weights", "ds"), Scratch((tokens * p.heads_q * slots,), p.torch_dtype))
    return results | {"rows": Scratch((lists, columns_of(p)[1]), row)}


def tokens_of(problem: Problem, tokens: int, slots: int, row: torch.dtype) -> int:
    """Returns the number of tokens, at most `tokens`, whose scratch fits the memory limit; slots: keys per token; row:
    dtype of a token's contributions to dk and dv."""
    most = min(BUDGET // bytes_of_token(problem, slots, row), MOST_PROGRAMS // problem.heads_kv)
    return max(1, min(launch_key_sum.whole_blocks(most, problem.heads_kv * slots), tokens))


def workspace_bytes(problem: Problem, schedule: Schedule) -> int:
    """Returns the bytes of scratch of the backward of attention to selected keys, without results and tables."""
    p, e = problem, schedule.device_tables.extents
    if not schedule.rows:
        return 0
    row = rows_dtype(p, float32_rows=True)
    capacity = schedule.device_tables.capacity
    _, slots = slots_of(p, capacity, {kernel: table[80, 2][-1] for kernel, table in cuts.TABLES.items()})
    tokens_in_chunk, of_token = tokens_of(p, schedule.rows, slots, row), p.heads_kv * slots
    chunk = tokens_in_chunk * bytes_of_token(p, slots, row)
    notes = 4 * p.heads_q * (PLANES * schedule.rows + (len(e) + schedule.rows // PREPARE.BM if p.has_sink else 0))
    keys = keys_of(capacity) * p.heads_kv
    flags = 4 * len(e) * p.heads_kv if p.dtype == "float16" else 0
    return (
        chunk
        + notes
        + flags
        + launch_key_sum.workspace_bytes(keys, columns_of(p)[1], tokens_in_chunk * of_token, of_token)
    )


def keys_of(extents: Extents) -> int:
    """Returns the total number of keys and compressed keys of all sequences."""
    return sum(extents.all_keys(b) for b in range(len(extents)))


def views_of(problem: Problem, o: Operands, g: Grads) -> dict[str, Any]:
    """Returns the strided views of operands and gradients that the backward's kernels use, by name ("q", "dk", ...)."""
    p = problem
    results = {
        "q": o.q, "k": o.k, "out": o.out, "max": o.stats.max, "sum": o.stats.sum,
        "indices": o.indices if p.select_count else None,
        "dout": g.dout, "dlse": g.dlse, "dq": g.dq, "dk": g.dk,
    }  # fmt: skip
    if not p.shares_kv:
        results |= {"v": o.v, "dv": g.dv}
    if p.dim_rope:
        results |= {"q_rope": o.q_rope, "k_rope": o.k_rope, "dq_rope": g.dq_rope, "dk_rope": g.dk_rope}
    if p.compressed_ratio:
        results |= {"k_compressed": o.k_compressed, "dk_compressed": g.dk_compressed}
        results |= {} if p.shares_kv else {"v_compressed": o.v_compressed, "dv_compressed": g.dv_compressed}
    return results


def run(problem: Problem, extents: Extents, schedule: Schedule, o: Operands, g: Grads) -> None:
    """Writes the gradients `g` of attention to selected keys, from g.dout and the saved out, max and sum in `o`."""
    views = views_of(problem, o, g)
    given = layout_table.tensors(views)
    if problem.has_sink:
        given["sink"] = float32(o.sink)
    layout = layout_table.layout(views, given)
    schedule.once(layout, lambda: ready(problem, extents, schedule, views, given)).run(given)
    if g.dsink is not None:
        g.dsink.copy_(given["partials"].sum(0) if "partials" in given else torch.zeros_like(g.dsink))


def ready(
    p: Problem, e: Extents, schedule: Schedule, views: dict[str, layout_table.View | None], given: dict[str, Any]
) -> Gradient:
    """Returns the prepared kernel launches of a backward, for the memory layout of `views` and the tensors `given`."""
    like, rows, capacity, count = given["q"], schedule.rows, schedule.device_tables.capacity, len(e)
    more = {"ids": launch_key_sum.numbered(like, capacity.kv_len, p.heads_kv)}
    if capacity.compressed is not None:
        first = int(capacity.kv_len.sum())
        more["ids_compressed"] = launch_key_sum.numbered(like, capacity.compressed.kv_len, p.heads_kv, first)
    more["flat"] = RowView((like,), e.first_query * p.heads_q, p.heads_q, np.full(count, 1, np.int64), 1)
    m = CallMemory(views, given, schedule.device_tables, more)
    chip = shapes.chip_of(m.device)
    assert chip is not None  # reasons_against() ensures it
    tiles = {kernel: cuts.tile_of(kernel, p, chip, m.align) for kernel in cuts.KERNELS}
    slots = slots_of(p, capacity, tiles)
    row = rows_dtype(p, given["dk"].dtype == torch.float32)
    by_row, listed = m.on(f"query {PREPARE}", lambda e: query_tiles(e, PREPARE)), m.on("tokens", listed_tokens)
    scratch = {"flat": Scratch((PLANES * rows * p.heads_q,))}
    if p.dtype == "float16":
        scratch["large"] = Scratch((count * p.heads_kv,), torch.int32, cleared=True)
    if p.has_sink and len(by_row.tensor):
        scratch["partials"] = Scratch((len(by_row.tensor), p.heads_q))
    per = tokens_of(p, rows, slots[1], row) if rows else 1
    scratch |= buffers_of(p, per, slots[1], row) if rows else {}
    names = [*given, *scratch]
    fixed = dict.fromkeys(ABSENT - {*names}) | m.fixed | {
        "tokens": listed.tensor, "tiles": by_row.tensor, "plane": rows * p.heads_q, "scale": p.scale,
        "exponent": p.scale * common.LOG2E.value,
    }  # fmt: skip

    def launched(step: Step, **numbers: int) -> Launch:
        return FAMILY.launch(step.kernel, step.grid, fixed | numbers, names, step.constexprs, step.tile, step.renamed)

    of_rows = Step(prepare, (len(by_row.tensor), p.heads_q), constants(p, PREPARE, m.align), PREPARE, {})
    chunks = []
    for first in range(0, rows, per):
        steps = launches(p, tiles, m.align, slots, min(per, rows - first))
        entries = min(per, rows - first) * p.heads_kv * slots[1]
        chunks.append((entries, [launched(step, first=first) for step in steps]))
    by_key = m.on("keys", launch_key_sum.key_tiles)
    tables: tuple[layout_table.Copied, ...] = m.strides, m.lengths, by_row, listed, by_key
    sources = {"": Where(m.strides.tensor, by_key.tensor, count)}
    if capacity.compressed is not None:
        by_compressed = m.on("compressed keys", lambda e: launch_key_sum.key_tiles(e, True))
        sources["_compressed"] = Where(m.strides.tensor, by_compressed.tensor, count, "ids_compressed")
        tables = *tables, by_compressed
    starts, columns = columns_of(p)
    dims = {"dk": p.dim_qk, "dk_rope": p.dim_rope, "dv": p.dim_v}
    writes = [(f"{n}{s}", first, dims[n], where) for n, first in starts.items() for s, where in sources.items()]
    return Gradient(
        [launched(of_rows)] if len(by_row.tensor) else [], tables, scratch, chunks, writes,
        keys_of(capacity) * p.heads_kv, columns, p.heads_kv, p.heads_kv * slots[1],
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One kernel launch for a chunk of tokens: kernel, grid, compile-time arguments, tile shape, renamed arguments."""

    kernel: Any
    grid: tuple[int, ...]
    constexprs: Constants
    tile: Any
    renamed: dict[str, str]


def launches(
    problem: Problem, tiles: dict[str, SlotTile], align: int, slots: tuple[int, int], tokens: int
) -> list[Step]:
    """Returns the kernel launches, in order, of the backward for a chunk of `tokens` tokens. tiles: tile shape by
    kernel name. slots: (places for keys of the band, all places) per token."""
    p, (band, slots_of_token), token_heads = problem, slots, tokens * problem.heads_kv
    shared = {"GROUP": p.group, "HEADS_KV": p.heads_kv, "SLOTS": slots_of_token, "ALIGN": align}
    sources = {"RATIO": p.compressed_ratio, "BAND": band}
    lists = {"SELECT": p.select_count, "BLOCK": p.select_block, "SLOTS": slots_of_token, "N": cuts.ENTRIES}
    lists |= {"RATIO": 1, "COMPRESSED": p.compressed_ratio, "BAND": band}
    tile = tiles["weigh_slots"]
    sizes = {"SHARED": p.shares_kv, "DIM": p.dim_qk, "DIM_ROPE": p.dim_rope, "DIM_V": p.dim_v}
    grid = slots_of_token // tile.BN, -(-p.group // tile.BH), token_heads
    results = [
        Step(read_lists, (tokens, p.heads_kv), lists, cuts.LISTS, {}),
        Step(weigh_slots, grid, shared | sources | sizes | known_of(tile), tile, {}),
    ]
    tile = tiles["backward_rows"]
    for read, written, dim in (("k", "dq", p.dim_qk), ("k_rope", "dq_rope", p.dim_rope)):
        for first, width, count in cuts.panels(dim, tile.BC):
            panel = tile._replace(BC=width)
            constexprs = {
                "DIM": dim,
                "READ": layout_index.AT[read],
                "WRITTEN": layout_index.AT[written],
                "FIRST": first,
            } | known_of(panel)
            grid = count, -(-p.group // tile.BH), token_heads
            step = Step(backward_rows, grid, shared | sources | constexprs, panel, {"k": read, "out": written})
            results.append(step)
    results += slot_launches(p, tiles["backward_slots"], shared, slots_of_token, token_heads)
    recomputes = {backward_rows: recompute_rows, backward_slots: recompute_slots}  # for tokens flagged as not finite
    return results + [
        Step(recomputes[one.kernel], (token_heads,), one.constexprs | known_of(RECOMPUTE), RECOMPUTE, one.renamed)
        for one in results
        if one.kernel in recomputes and one.constexprs["FIRST"] == 0
    ]


def slot_launches(p: Problem, tile: SlotTile, shared: Constants, slots: int, token_heads: int) -> list[Step]:
    """Returns the launches that write each token's contributions to dk, dk_rope and dv of each of its keys (`slots` per
    token); if values are the first columns of keys, dk is the sum of dk and dv."""
    (starts, columns), result = columns_of(p), []
    parts = [("dk", "q", "ds", p.dim_qk), ("dk_rope", "q_rope", "ds", p.dim_rope)]
    if not p.shares_kv:
        parts.append(("dv", "dout", "weights", p.dim_v))
    for name, x, weights, dim in parts:
        for first, width, count in cuts.panels(dim, tile.BC):
            both, panel = name == "dk" and p.shares_kv and first < p.dim_v, tile._replace(BC=width)
            constexprs: Constants = {
                "DIM": dim,
                "DIM_ALSO": p.dim_v,
                "VIEW": layout_index.AT[x],
                "VIEW_ALSO": layout_index.AT["dout"],
                "COLUMNS": columns,
                "FIRST": first,
                "AT": starts[name] + first,
            }
            renamed = {"x": x, "weights": weights, "also": "dout", "weights_also": "weights"}
            constexprs |= {} if both else {"also": None, "weights_also": None}
            constexprs |= {"large": None} if name == "dv" else {}
            grid = slots // tile.BN, count, token_heads
            result.append(Step(backward_slots, grid, shared | constexprs | known_of(panel), panel, renamed))
    return result


def known_of(tile: SlotTile) -> Constants:
    """Returns the compile-time arguments that describe a tile: BH (heads), BN (slots) and BC (columns)."""
    return {"BH": tile.BH, "BN": tile.BN, "BC": tile.BC}
