"""Launches of the kernels that pool each window of token rows to one compressed key, forward and backward."""

from typing import Any

import torch

from fusion_attention.backends.triton.common import layout_table, shapes
from fusion_attention.backends.triton.common.launching import Constants, Family, Ready, Schedule, Scratch, bytes_of
from fusion_attention.backends.triton.common.layout_table import CallMemory
from fusion_attention.backends.triton.selected.launch import tokens
from fusion_attention.backends.triton.window_pooling.kernel import pool, pool_bias, pool_gradient
from fusion_attention.ir.pooling import PoolingGrads, PoolingOperands, PoolingProblem
from fusion_attention.ir.problem import Extents

FAMILY = Family(pool, pool_gradient, pool_bias)
TILE = shapes.Tile(16, 128, 4, 1)  # rows and channels of a program
RANGES = 64  # ranges of results; different programs add up their gradients of the bias


def constants_of(p: PoolingProblem, align: int) -> Constants:
    """Returns the compile-time arguments of the pooling kernels, by name; align: alignment of rows in elements."""
    channels = {"BD": min(TILE.BN, shapes.power(p.dim)), "ALIGN": align if p.dim % align == 0 else 1}
    window = {"RATIO": p.ratio, "HALVES": 1 + p.overlap, "DIM": p.dim}
    return channels | window | {"BR": min(TILE.BM, 1 << (p.ratio - 1).bit_length()), "HAS_BIAS": p.has_bias}


def buffers_of(p: PoolingProblem, e: Extents) -> dict[str, Scratch]:
    """Returns {kernel argument: shape of a temporary float32 tensor} of a backward with a bias gradient."""
    results = int(e.q_len.sum())
    return {"notes": Scratch((3, results, p.heads, p.dim)), "added": Scratch((RANGES, p.ratio, p.channels))}


def workspace_bytes(p: PoolingProblem, schedule: Schedule) -> int:
    """Returns the bytes of temporary tensors for pooling or its backward, which schedule.op_kind selects."""
    if schedule.op_kind == "pooling" or not p.has_bias:
        return 0
    return bytes_of(buffers_of(p, schedule.device_tables.capacity))


def run(p: PoolingProblem, extents: Extents, schedule: Schedule, o: PoolingOperands) -> None:
    """Writes o.out, for each window of rows their sum weighted by the softmax of gates; schedule: cached launches."""
    _ready(p, schedule, {"q": o.kv, "k": o.gate, "out": o.out}, {"bias": o.bias}, ("pool",))


def run_backward(p: PoolingProblem, extents: Extents, schedule: Schedule, o: PoolingOperands, g: PoolingGrads) -> None:
    """Writes the gradients of rows (g.dkv), gates (g.dgate) and, if given, of the gates' bias (g.dbias), from
    g.dout."""
    for view in (g.dkv, g.dgate):
        view.keep[0].zero_()  # rows that no window pools
    views: dict[str, layout_table.View | None] = {"q": o.kv, "k": o.gate, "dout": g.dout, "dq": g.dkv, "dk": g.dgate}
    kernels = ("pool_gradient", "pool_bias") if g.dbias is not None else ("pool_gradient",)
    given = _ready(p, schedule, views, {"bias": o.bias}, kernels)
    if g.dbias is not None:
        torch.sum(given["added"], 0, out=g.dbias)


def _ready(
    p: PoolingProblem,
    schedule: Schedule,
    views: dict[str, layout_table.View | None],
    more: dict[str, Any],
    kernels: tuple[str, ...],
) -> dict[str, Any]:
    """Launches the kernels named `kernels` on `views` (strided views by name), as prepared in `schedule`; returns all
    kernel arguments by name, temporary tensors included. more: further arguments by name."""
    given = layout_table.tensors(views) | more
    key = kernels, layout_table.layout(views, given)
    ready = schedule.once(key, lambda: _launches(p, CallMemory(views, given, schedule.device_tables), kernels))
    ready.run(given)
    return given


def _launches(p: PoolingProblem, m: CallMemory, kernels: tuple[str, ...]) -> Ready:
    """Returns the prepared launches of the kernels named `kernels` on tensors with the strides of those in `m`."""
    e, constexprs, of_results = m.capacity, constants_of(p, m.align), m.on("tokens", tokens)
    results = int(e.q_len.sum())
    fixed = m.fixed | {
        "tokens": of_results.tensor, "heads": p.heads, "plane": results * p.heads * p.dim, "results": results,
        "per": -(-results // RANGES),
    }  # fmt: skip
    scratch = buffers_of(p, e) if "pool_gradient" in kernels and p.has_bias else {}
    if not scratch and "pool_gradient" in kernels:
        fixed["notes"] = None
    blocks = -(-p.dim // constexprs["BD"])
    grids = {
        "pool": (results, p.heads, blocks),
        "pool_gradient": (results, p.heads, blocks),
        "pool_bias": (p.ratio * (1 + p.overlap), blocks, RANGES),
    }
    launches = [
        FAMILY.launch(kernel, grids[name], fixed, [*m.given, *scratch], constexprs, TILE)
        for kernel in (pool, pool_gradient, pool_bias)
        if (name := kernel.__name__) in kernels and (results or name == "pool_bias")
    ]
    return Ready(launches, (m.strides, m.lengths, of_results), scratch)
