"""Pooling of windows of rows in the native core."""

from dataclasses import dataclass
from typing import Any

import torch

import fusion_attention._native as _native
from fusion_attention.backends.cpu.native import DTYPES, rows_of
from fusion_attention.ir.pooling import PoolingGrads, PoolingOperands, PoolingProblem
from fusion_attention.ir.problem import Extents


@dataclass(frozen=True, eq=False)
class PoolingPlan:
    """The core's arguments for the lengths of a call.

    Args:
        sums: partial sums of the gradient of a bias, at most; 0: there is none.
        variant: an instruction set that runs here, None: the fastest.
    """

    problem: tuple[Any, ...]
    lengths: tuple[Any, ...]
    dtype: torch.dtype
    sums: int
    variant: str | None

    def workspace_bytes(self, threads: int) -> int:
        """Bytes that a run allocates, at most."""
        _, dim, ratio, overlap, _ = self.problem
        padded = -(-dim // 16) * 16
        return 4 * padded * (4 * threads + ratio * (1 + overlap) * self.sums)


def plan_pooling(p: PoolingProblem, extents: Extents, op_kind: str, variant: str | None) -> PoolingPlan:
    """The core's plan of pooling or of its gradients."""
    dtype = getattr(torch, p.dtype)
    # Products of the sizes of a window that no sequence fills might exceed 64 bits; a bias has them in memory.
    ratio = p.ratio if p.has_bias else min(p.ratio, int(extents.kv_len.max(initial=0)) + 1)
    lengths = extents.kv_len, extents.q_len, extents.lo, extents.q_len
    sums = max(64, -(-int(extents.q_len.sum()) * p.heads // 256)) if p.has_bias and op_kind != "pooling" else 0
    return PoolingPlan((p.heads, p.dim, ratio, p.overlap, DTYPES[dtype]), lengths, dtype, sums, variant)


def run_pooling(plan: PoolingPlan, o: PoolingOperands) -> None:
    """Writes the result of every window."""
    kv, gate, out = (rows_of(view, plan.dtype) for view in (o.kv, o.gate, o.out))
    operands = kv, gate, _place(o.bias), out, None, None, 0
    _native.pool(torch.get_num_threads(), plan.problem, plan.lengths, operands, plan.variant)


def run_pooling_backward(plan: PoolingPlan, o: PoolingOperands, g: PoolingGrads) -> None:
    """Writes the gradients of all rows and gates, and of the bias if it is wanted."""
    kv, gate, dout, dkv, dgate = (rows_of(view, plan.dtype) for view in (o.kv, o.gate, g.dout, g.dkv, g.dgate))
    operands = kv, gate, _place(o.bias), dout, dkv, dgate, _place(g.dbias)
    _native.pool_gradients(torch.get_num_threads(), plan.problem, plan.lengths, operands, plan.variant)


def _place(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
