"""Launches of the backward over selected keys: chunks of tokens, and the memory between the kernels.

A chunk has P, dS and a row of gradients for each slot of its tokens. BUDGET determines its number of tokens, on which
results do not depend: tokens are computed separately, and key_sum.py adds rows to sums of keys in the order of tokens.

A slot is a place for a key that a token reads (launch.py). A gradient row is what a slot adds to its key's gradients:
the columns of dk, dk_rope and dv, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common import layout_index, layout_table, shapes
from fusion_attention.backends.triton.common.launching import Constants, Schedule, Scratch, bytes_of, launch_some
from fusion_attention.backends.triton.dense.backward import prepare
from fusion_attention.backends.triton.dense.launch import PLANES, query_tiles, widths
from fusion_attention.backends.triton.selected import launch_key_sum
from fusion_attention.backends.triton.selected import shapes_backward as cuts
from fusion_attention.backends.triton.selected.backward import backward_rows, backward_slots, weigh_slots
from fusion_attention.backends.triton.selected.launch import slots
from fusion_attention.backends.triton.selected.launch import tokens as listed_tokens
from fusion_attention.backends.triton.selected.launch_key_sum import KeySum, Where
from fusion_attention.backends.triton.selected.recompute_gradients import recompute_rows, recompute_slots
from fusion_attention.backends.triton.selected.selection import read_lists
from fusion_attention.backends.triton.selected.shapes_backward import SlotTile
from fusion_attention.ir.kv import RowView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem
from fusion_attention.memory import empty

BUDGET = 1 << 30  # bytes of a chunk, unless a single token takes more
# True: slots are added to sums of keys by atomic additions, in no fixed order, instead of rows that are sorted and
# summed (and that recompute_slots() can compute again).
ATOMIC = False
PREPARE = shapes.Tile(16, 16, 8, 1)
RECOMPUTE = SlotTile(0, 16, 32, 4, 1)
MOST_PROGRAMS = 65535  # limit of the second and third axis of a grid
ALIGNED_COLUMNS = 16  # the sections of a row (dk, dk_rope, dv) begin at multiples of this number of columns


def columns_of(problem: Problem) -> tuple[dict[str, int], int]:
    """Returns ({gradient: its first column}, number of columns) of a gradient row: dk, dk_rope and dv that a token adds
    to one key, side by side."""
    p = problem
    dims = {"dk": p.dim_qk} | ({"dk_rope": p.dim_rope} if p.dim_rope else {}) | ({} if p.shares_kv else {"dv": p.dim_v})
    result, columns = {}, 0
    for name, dim in dims.items():
        result[name] = columns
        columns += -(-dim // ALIGNED_COLUMNS) * ALIGNED_COLUMNS
    return result, columns


def slots_of(problem: Problem, extents: Extents, tiles: dict[str, SlotTile]) -> tuple[int, int]:
    """Returns (places for keys of the band, places for all keys) that each token has in the backward, rounded up to the
    largest BN of `tiles` (by kernel name).

    Both numbers are compile-time values. Numbers that follow from lengths are rounded up to powers of two, so that few
    kernels are compiled.
    """
    size = max(tile.BN for tile in tiles.values())
    band, others = (-(-most // size) for most in slots(problem, extents))
    if problem.compressed_ratio:
        band, others = (
            1 << (tiles_of_source - 1).bit_length() if tiles_of_source else 0 for tiles_of_source in (band, others)
        )
    return band * size, (band + others) * size


def rows_dtype(problem: Problem, float32_rows: bool) -> torch.dtype:
    """Returns the dtype in which a token's contributions to gradients of keys are stored: bfloat16 or float32 (float16
    would overflow with a scaled loss).

    float32_rows: True if the gradients of keys are float32; the contributions then are too.
    """
    return torch.bfloat16 if problem.dtype == "bfloat16" and not float32_rows else torch.float32


def bytes_of_token(problem: Problem, slots: int, row: torch.dtype) -> int:
    """Returns the bytes of scratch per query token with `slots` keys; row: dtype of its contributions to gradients of
    keys."""
    sums = 0 if ATOMIC else problem.heads_kv * slots * launch_key_sum.BYTES_OF_ENTRY
    return sums + bytes_of(buffers_of(problem, 1, slots, row))


def buffers_of(problem: Problem, tokens: int, slots: int, row: torch.dtype) -> dict[str, Scratch]:
    """Returns kernel argument name -> scratch tensor, through which the kernels of a chunk of `tokens` tokens with
    `slots` slots each pass results to each other; row: dtype of gradient rows.

    keys, ids: key (in its sequence) and id (in the sums) of every slot, -1 for none. used: end of the slots with a key,
    and noted: flag of a recomputation, per token and key head. weights, ds: P and dS of every slot and query head.
    rows: gradient rows; absent if ATOMIC.
    """
    p, lists, token_heads = problem, tokens * problem.heads_kv * slots, tokens * problem.heads_kv
    numbers = {"keys": lists, "ids": lists, "used": token_heads, "noted": token_heads}
    results = {name: Scratch((count,), torch.int32) for name, count in numbers.items()}
    results |= dict.fromkeys(("weights", "ds"), Scratch((tokens * p.heads_q * slots,), p.torch_dtype))
    return results if ATOMIC else results | {"rows": Scratch((lists, columns_of(p)[1]), row)}


def tokens_of(problem: Problem, tokens: int, slots: int, row: torch.dtype) -> int:
    """Returns the number of tokens whose scratch fits the memory limit of a chunk, at most `tokens` (all tokens);
    slots: keys of a token; row: dtype of its contributions to gradients of keys."""
    most = min(BUDGET // bytes_of_token(problem, slots, row), MOST_PROGRAMS // problem.heads_kv)
    return max(1, min(launch_key_sum.whole_blocks(most, problem.heads_kv * slots), tokens))


def workspace_bytes(problem: Problem, schedule: Schedule) -> int:
    """Returns the bytes that the backward allocates besides operands, results and the tables of a schedule."""
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
    """Returns the number of keys of all sequences, from the cache and from the compressed keys."""
    return sum(extents.all_keys(b) for b in range(len(extents)))


def views_of(problem: Problem, o: Operands, g: Grads) -> dict[str, Any]:
    """Returns the views of operands and gradients that the backward's kernels use, by their names in the layout
    table."""
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


@dataclass(eq=False)
class Prepared:
    """The parts of a run that depend on the memory layout only: tables, tile shapes, and compile-time values.

    Attributes:
        strides: the layout table.
        lengths: the table of lengths.
        by_row: tiles of query rows, for prepare().
        tokens: (sequence, row) of every token.
        by_key, by_compressed_key: key_tiles() of keys and of compressed keys.
        align: alignment of rows, in elements of q.
        cuts: the tile shape of each kernel, by name.
        slots: the result of slots_of().
    """

    strides: layout_table.Copied
    lengths: layout_table.Copied
    by_row: layout_table.Copied
    tokens: layout_table.Copied
    by_key: layout_table.Copied
    by_compressed_key: layout_table.Copied | None
    align: int
    cuts: dict[str, SlotTile]
    slots: tuple[int, int]
    keys: int  # number of keys of all sequences and heads

    def read(self) -> None:
        """Makes the current stream wait until all tables have been copied."""
        for table in (self.strides, self.lengths, self.by_row, self.tokens, self.by_key, self.by_compressed_key):
            if table is not None:
                table.read()


def prepare_layout(
    problem: Problem,
    extents: Extents,
    device_tables: layout_table.DeviceTables,
    views: dict[str, Any],
    given: dict[str, Any],
) -> Prepared:
    """Returns the tables, tile shapes and compile-time values of run() for one memory layout: that of `views` and of
    their tensors `given`, both by name."""
    p, count = problem, len(extents)
    device, like = layout_table.one_device(given), given["q"]
    total = np.full(count, 1, np.int64)
    flat = RowView((like,), extents.q_start * p.heads_q, p.heads_q, total, 1)
    capacity = device_tables.capacity
    ids = {"ids": launch_key_sum.numbered(like, capacity.kv_len, p.heads_kv)}
    second = None
    if capacity.compressed is not None:
        lengths, first = capacity.compressed.kv_len, int(capacity.kv_len.sum())
        ids["ids_compressed"] = launch_key_sum.numbered(like, lengths, p.heads_kv, first)
        second = device_tables.on(device, "compressed keys", lambda e: launch_key_sum.key_tiles(e, True))
    table = layout_table.strides(views | {"flat": flat} | ids, count)
    align, chip = layout_table.alignment(views, table), shapes.chip_of(device)
    assert chip is not None  # reasons_against() ensures it
    tiles = {kernel: cuts.tile_of(kernel, p, chip, align) for kernel in cuts.KERNELS}
    return Prepared(
        layout_table.Copied.of(table, device),
        device_tables.on(device, "lengths", layout_table.lengths),
        device_tables.on(device, f"query {PREPARE}", lambda e: query_tiles(e, PREPARE)),
        device_tables.on(device, "tokens", listed_tokens),
        device_tables.on(device, "keys", launch_key_sum.key_tiles),
        second,
        align,
        tiles,
        slots_of(p, capacity, tiles),
        keys_of(capacity) * p.heads_kv,
    )


def run(problem: Problem, extents: Extents, schedule: Schedule, o: Operands, g: Grads) -> None:
    """Writes the gradients of attention to selected keys to the views in `g`, from the saved out and statistics in
    `o`."""
    p, result = problem, views_of(problem, o, g)
    given: dict[str, Any] = {name: None if v is None else layout_table.tensor_of(v) for name, v in result.items()}
    prepared = schedule.once(
        layout_table.layout(result, given), lambda: prepare_layout(p, extents, schedule.device_tables, result, given)
    )
    prepared.read()
    like, tokens = given["q"], schedule.rows
    given |= {"strides": prepared.strides.tensor, "lengths": prepared.lengths.tensor, "tokens": prepared.tokens.tensor}
    given |= {"count": len(extents), "plane": tokens * p.heads_q}
    given["flat"] = empty(like, (PLANES * tokens * p.heads_q,), torch.float32)
    given["large"] = like.new_zeros(len(extents) * p.heads_kv, dtype=torch.int32) if p.dtype == "float16" else None
    partials = note_rows(p, prepared, given, o)
    sums, row = KeySum(like, prepared.keys, columns_of(p)[1]), rows_dtype(p, given["dk"].dtype == torch.float32)
    if tokens:
        per = tokens_of(p, tokens, prepared.slots[1], row)
        buffers = buffers_of(p, per, prepared.slots[1], row)
        given |= {name: empty(like, shape, dtype) for name, (shape, dtype, _) in buffers.items()}
        for first in range(0, tokens, per):  # all chunks use the same memory, one after the other
            run_chunk(p, prepared, sums, given | {"first": first}, min(per, tokens - first))
    where = Where(prepared.strides.tensor, prepared.by_key.tensor, len(extents))
    for name, first in columns_of(p)[0].items():
        sums.write(given[name], name, first, result[name].dim, p.heads_kv, where)
        if prepared.by_compressed_key is not None:
            second = replace(where, tiles=prepared.by_compressed_key.tensor, ids="ids_compressed")
            name = f"{name}_compressed"
            sums.write(given[name], name, first, result[name].dim, p.heads_kv, second)
    if g.dsink is not None:
        g.dsink.copy_(torch.zeros_like(g.dsink) if partials is None else partials.sum(0))


def note_rows(problem: Problem, prepared: Prepared, given: dict[str, Any], o: Operands) -> torch.Tensor | None:
    """Computes lse and D of every query row and head by prepare(), into given["flat"].

    Returns float32 [tiles of rows, heads_q], what each tile adds to dsink; None without a sink or without rows.
    """
    p, tiles = problem, prepared.by_row.tensor
    if not len(tiles):
        return None
    partials = empty(given["q"], (len(tiles), p.heads_q), torch.float32) if p.has_sink else None
    sink = o.sink.to(torch.float32).contiguous() if p.has_sink and o.sink is not None else None
    buffers = {"max_": given["max"], "sum_": given["sum"], "sink": sink, "partials": partials, "tiles": tiles}
    launch_some(prepare, (len(tiles), p.heads_q), given | buffers, prepare_constants(p, prepared.align), PREPARE)
    return partials


def run_chunk(p: Problem, prepared: Prepared, sums: KeySum, given: dict[str, Any], tokens: int) -> None:
    """Computes the gradients of the query rows of a chunk of `tokens` tokens, and adds those of their keys to `sums`.

    given: kernel arguments by name; "first" is the chunk's first token.
    """
    given = {"rows": sums.total} | given | {"scale": p.scale, "exponent": p.scale * common.LOG2E.value}
    for name in ("v", "q_rope", "k_rope", "indices", "k_compressed", "v_compressed"):
        given.setdefault(name, None)
    token_heads = tokens * p.heads_kv
    for one in launches(p, prepared.cuts, prepared.align, prepared.slots, ATOMIC):
        grid = tuple({"tokens": tokens, "heads_kv": p.heads_kv, "token_heads": token_heads}.get(n, n) for n in one.grid)
        named = {name: given[source] for name, source in one.renamed.items()}
        launch_some(one.kernel, grid, given | named, one.constexprs, one.tile)
    if not ATOMIC:
        slots = prepared.slots[1]
        entries = token_heads * slots
        sums.add(given["rows"][:entries], given["ids"][:entries], p.heads_kv * slots)


@dataclass(frozen=True)
class Step:
    """A launch for a chunk; the words tokens, heads_kv and token_heads in `grid` represent numbers that run_chunk()
    knows.

    renamed: argument name of the kernel -> name of the tensor in the arguments of the chunk.
    """

    kernel: Any
    grid: tuple[Any, ...]
    constexprs: Constants
    tile: Any
    renamed: dict[str, str]


def launches(
    problem: Problem, tiles: dict[str, SlotTile], align: int, slots: tuple[int, int], atomic: bool = False
) -> list[Step]:
    """Returns the launches of a chunk, in order.

    tiles: tile shape by kernel name. slots: (places for keys of the band, all places) of a token. atomic: True if
    contributions to gradients of keys are added atomically, without a memory for rows.
    """
    p, (band, slots_of_token) = problem, slots
    shared = {"GROUP": p.group, "HEADS_KV": p.heads_kv, "SLOTS": slots_of_token, "ALIGN": align}
    sources = {"RATIO": p.compressed_ratio, "BAND": band}
    lists = {"SELECT": p.select_count, "BLOCK": p.select_block, "SLOTS": slots_of_token, "N": cuts.ENTRIES}
    lists |= {"RATIO": 1, "COMPRESSED": p.compressed_ratio, "BAND": band}
    tile = tiles["weigh_slots"]
    sizes = {"SHARED": p.shares_kv, "DIM": p.dim_qk, "DIM_ROPE": p.dim_rope, "DIM_V": p.dim_v}
    grid = slots_of_token // tile.BN, -(-p.group // tile.BH), "token_heads"
    results = [
        Step(read_lists, ("tokens", "heads_kv"), lists, cuts.LISTS, {}),
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
            grid = count, -(-p.group // tile.BH), "token_heads"
            step = Step(backward_rows, grid, shared | sources | constexprs, panel, {"k": read, "out": written})
            results.append(step)
    results += slot_launches(p, tiles["backward_slots"], shared, slots_of_token, atomic)
    return results + recomputed(results, atomic)


def recomputed(steps: list[Step], atomic: bool) -> list[Step]:
    """Returns the launches that recompute results of `steps` for tokens flagged as not finite, one per result; atomic:
    True if gradients of keys are added atomically, which are then not recomputed."""
    recomputes = {backward_rows: recompute_rows} | ({} if atomic else {backward_slots: recompute_slots})
    first = [one for one in steps if one.kernel in recomputes and one.constexprs["FIRST"] == 0]
    results = []
    for one in first:
        kernel, constexprs = recomputes[one.kernel], one.constexprs | known_of(RECOMPUTE)
        constexprs = {name: value for name, value in constexprs.items() if name in kernel.arg_names}
        results.append(Step(kernel, ("token_heads",), constexprs, RECOMPUTE, one.renamed))
    return results


def slot_launches(p: Problem, tile: SlotTile, shared: Constants, slots: int, atomic: bool) -> list[Step]:
    """Returns the launches that write what each place of a token adds to gradients of keys: dk, dk_rope, dv; if values
    are stored in keys, dk is the sum of both.

    shared: compile-time arguments of all kernels. slots: places per token. atomic: True to add atomically to the sums.
    """
    (starts, columns), result = columns_of(p), []
    parts = [("dk", "q", "ds", p.dim_qk), ("dk_rope", "q_rope", "ds", p.dim_rope)]
    if not p.shares_kv:
        parts.append(("dv", "dout", "weights", p.dim_v))
    for name, x, weights, dim in parts:
        for first, width, count in cuts.panels(dim, tile.BC):
            both, panel = name == "dk" and p.shares_kv and first < p.dim_v, tile._replace(BC=width)
            at = {"COLUMNS": columns, "FIRST": first, "AT": starts[name] + first, "ATOMIC": atomic}
            constexprs: Constants = {
                "DIM": dim,
                "DIM_ALSO": p.dim_v,
                "VIEW": layout_index.AT[x],
                "VIEW_ALSO": layout_index.AT["dout"],
            } | at
            renamed = {"x": x, "weights": weights, "also": "dout", "weights_also": "weights"}
            constexprs |= {} if both else {"also": None, "weights_also": None}
            constexprs |= {"large": None} if name == "dv" else {}
            grid = (slots // tile.BN, "token_heads", count) if atomic else (slots // tile.BN, count, "token_heads")
            result.append(Step(backward_slots, grid, shared | constexprs | known_of(panel), panel, renamed))
    return result


def known_of(tile: SlotTile) -> Constants:
    """Returns the compile-time arguments that describe a tile: BH (heads), BN (slots) and BC (columns)."""
    return {"BH": tile.BH, "BN": tile.BN, "BC": tile.BC}


def prepare_constants(problem: Problem, align: int) -> Constants:
    """Returns the compile-time arguments of the kernel prepare(); align: alignment of rows, in elements of q."""
    constexprs = {name: width for name, width in widths(problem).items() if name in ("V0", "V1", "V2", "DIM_V")}
    return constexprs | {
        "GROUP": problem.group, "SINK": problem.has_sink, "MEAN": 0, "ALIGN": align, "BM": PREPARE.BM
    }  # fmt: skip
