"""Attention to selected keys by the native core: forward and backward.

Knows memory and the core's numbering. Refuses to know what is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fusion_attention import _native
from fusion_attention.backends.cpu.native import DTYPES, Floats, extents_of, rows_of
from fusion_attention.kv import PagedView, RowView
from fusion_attention.problem import Extents, Grads, Operands, Problem

_NONE = (None,)


def plan_sparse(problem: Problem, extents: Extents, backward: bool, variant: str | None) -> _native.SparsePlan:
    """The core's plan; variant: None for the strongest instruction set that runs here, or one of the runnable ones."""
    p, dtype = problem, DTYPES[problem.torch_dtype]
    selection = p.has_sink, p.shares_kv, p.select_count, p.select_block
    fields = p.heads_q, p.heads_kv, p.dim_qk, p.dim_v, p.dim_rope, dtype, p.scale, *selection, False, dtype
    return _native.SparsePlan(fields, extents_of(extents), backward, variant)


def run_sparse_forward(plan: _native.SparsePlan, problem: Problem, operands: Operands) -> None:
    """Writes out and statistics of every row of every sequence; empty rows are 0."""
    with Floats() as floats:
        read = _operands(problem, operands)
        plan.run(torch.get_num_threads(), (*read, *_NONE * 9, floats.address(operands.sink), 0))


def run_sparse_backward(plan: _native.SparsePlan, problem: Problem, operands: Operands, grads: Grads) -> None:
    """Writes the gradients from the saved statistics and the saved out."""
    p, g, dtype = problem, grads, problem.torch_dtype
    dsink = torch.zeros(p.heads_q)
    ropes = (g.dq_rope, g.dk_rope) if p.dim_rope else (None, None)
    written = (
        *(rows_of(view, dtype) for view in (g.dout, g.dq)),
        rows_of(ropes[0], dtype) if ropes[0] else None,
        rows_of(g.dk, dtype),
        rows_of(ropes[1], dtype) if ropes[1] else None,
        rows_of(g.dv, dtype) if g.dv and not p.shares_kv else None,
    )
    with Floats() as floats:
        addresses = floats.address(operands.sink), dsink.data_ptr() if p.has_sink else 0
        plan.run(torch.get_num_threads(), (*_operands(p, operands), *_NONE * 2, *written, None, *addresses))
    if g.dsink is not None:
        g.dsink.copy_(dsink)


def key_rows(view: RowView | PagedView | None, dtype: torch.dtype, sequences: int) -> tuple[Any, ...]:
    """Rows of keys as the core takes them: at addresses, or in pages."""
    if not isinstance(view, PagedView):
        return rows_of(view, dtype)
    if view.pool.dtype is not dtype or view.table.dtype is not torch.int32:
        raise TypeError(
            f"fusion_attention: native core: expected {dtype} in pages of an int32 table, got {view.pool.dtype} and "
            f"{view.table.dtype}"
        )
    zero = np.zeros(sequences, np.int64)
    table = view.table.data_ptr(), view.table.stride(0), view.page_size, view.stride_page
    return view.pool.data_ptr(), zero, zero + view.stride_head, view.stride_token, view.dim, *table


def _operands(p: Problem, o: Operands) -> tuple[Any, ...]:
    dtype, sequences = p.torch_dtype, len(o.q.address)
    return (
        rows_of(o.q, dtype),
        rows_of(o.q_rope, dtype) if p.dim_rope and o.q_rope else None,
        rows_of(o.indices, torch.int32),
        key_rows(o.k, dtype, sequences),
        key_rows(o.k_rope, dtype, sequences) if p.dim_rope and o.k_rope else None,
        key_rows(o.v, dtype, sequences),
        rows_of(o.out, dtype),
        rows_of(o.stats.max, torch.float32),
        rows_of(o.stats.sum, torch.float32),
    )
