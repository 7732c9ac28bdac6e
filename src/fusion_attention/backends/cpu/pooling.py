"""Pooling of each window of rows to one row, weighted by a softmax of gates, in the C++ core."""

from dataclasses import dataclass
from typing import Any

import torch

import fusion_attention._native as _native
from fusion_attention.backends.cpu.native import DTYPES, rows_of
from fusion_attention.ir.pooling import PoolingGrads, PoolingOperands, PoolingProblem
from fusion_attention.ir.problem import Extents


@dataclass(frozen=True, eq=False)
class PoolingPlan:
    """The C++ core's arguments for pooling windows of rows, in sequences of given lengths."""

    problem: tuple[Any, ...]  # properties of the pooling that the native core reads
    lengths: tuple[Any, ...]
    dtype: torch.dtype  # of the rows
    sums: int  # largest number of partial sums of the bias's gradient; 0: no such gradient
    variant: str | None  # an instruction set of this machine, None: the fastest

    def workspace_bytes(self, threads: int) -> int:
        """Returns an upper limit of the bytes that a run with this number of threads allocates."""
        _, dim, ratio, overlap, _ = self.problem
        padded = -(-dim // 16) * 16
        return 4 * padded * (4 * threads + ratio * (1 + overlap) * self.sums)


def plan_pooling(p: PoolingProblem, extents: Extents, op_kind: str, variant: str | None) -> PoolingPlan:
    """Returns the C++ core's plan of pooling (op_kind "pooling") or of its gradients (any other op_kind)."""
    dtype = getattr(torch, p.dtype)
    # A ratio above all lengths is reduced, because products with it might exceed 64 bits; with a bias, which has a row
    # for each position of a window, it cannot be that large.
    ratio = p.ratio if p.has_bias else min(p.ratio, int(extents.kv_len.max(initial=0)) + 1)
    lengths = extents.kv_len, extents.q_len, extents.lo, extents.q_len
    sums = max(64, -(-int(extents.q_len.sum()) * p.heads // 256)) if p.has_bias and op_kind != "pooling" else 0
    return PoolingPlan((p.heads, p.dim, ratio, p.overlap, DTYPES[dtype]), lengths, dtype, sums, variant)


def pooling(problem: PoolingProblem, extents: Extents, schedule: PoolingPlan, o: PoolingOperands) -> None:
    """Writes o.out: for every window of rows, their sum weighted by the softmax of their gates."""
    kv, gate, out = (rows_of(view, schedule.dtype) for view in (o.kv, o.gate, o.out))
    operands = kv, gate, _place(o.bias), out, None, None, 0
    _native.pool(torch.get_num_threads(), schedule.problem, schedule.lengths, operands, schedule.variant)


def pooling_backward(
    problem: PoolingProblem, extents: Extents, schedule: PoolingPlan, o: PoolingOperands, g: PoolingGrads
) -> None:
    """Writes the gradients of all rows (g.dkv) and gates (g.dgate), and of the gates' bias if g.dbias is a tensor."""
    kv, gate, dout, dkv, dgate = (rows_of(view, schedule.dtype) for view in (o.kv, o.gate, g.dout, g.dkv, g.dgate))
    operands = kv, gate, _place(o.bias), dout, dkv, dgate, _place(g.dbias)
    _native.pool_gradients(torch.get_num_threads(), schedule.problem, schedule.lengths, operands, schedule.variant)


def _place(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
