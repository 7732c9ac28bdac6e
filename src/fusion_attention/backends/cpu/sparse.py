"""Plans and runs the C++ core's attention to selected keys, forward and backward."""

from typing import Any

import numpy as np
import torch

import fusion_attention._native as _native
from fusion_attention.backends.cpu.native import DTYPES, Floats, extents_of, rows_of
from fusion_attention.ir.memory_views import PagedView, RowView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem
from fusion_attention.memory import empty


def plan_sparse(problem: Problem, extents: Extents, backward: bool, variant: str | None) -> _native.SparsePlan:
    """Returns the C++ core's plan of attention to selected keys: of the backward if `backward`, else of the forward.
    variant: an instruction set of this machine, None: the fastest."""
    p, dtype = problem, DTYPES[problem.torch_dtype]
    sizes = p.heads_q, p.heads_kv, p.dim_qk, p.dim_v, p.dim_rope
    selection = p.has_sink, p.shares_kv, p.select_count, p.select_block
    fields = *sizes, dtype, p.scale, *selection, False, dtype, False, p.compressed_ratio, 1
    return _native.SparsePlan(fields, extents_of(extents), backward, variant)


def run_sparse_forward(plan: _native.SparsePlan, problem: Problem, operands: Operands) -> None:
    """Writes attention's out, max and sum to `operands`; out is 0 for rows without visible keys."""
    with Floats() as floats:
        plan.run(torch.get_num_threads(), _arguments(problem, operands, sink=floats.address(operands.sink)))


def prepare_sparse(
    plan: _native.SparsePlan, problem: Problem, operands: Operands, names: tuple[str, ...]
) -> _native.PreparedSparse:
    """Returns an object whose run() repeats run_sparse_forward() on other tensors of equal shapes and strides, in the
    order of `names`. operands: views of the first call's tensors."""
    with Floats() as floats:
        return plan.prepare(_arguments(problem, operands, sink=floats.address(operands.sink)), names)


def run_sparse_backward(plan: _native.SparsePlan, problem: Problem, operands: Operands, grads: Grads) -> None:
    """Writes the gradients `grads` of attention to selected keys, from grads.dout and saved out, max and sum."""
    p, g, dtype = problem, grads, problem.torch_dtype
    key_dtype = wide_keys(g.dk, dtype)
    dsink = empty(g.dout.keep[0], (p.heads_q,), torch.float32)
    written: dict[str, Any] = {
        "dout": rows_of(g.dout, dtype),
        "dlse": rows_of(g.dlse, torch.float32) if g.dlse else None,
        "dq": rows_of(g.dq, dtype),
        "dq_rope": rows_of(g.dq_rope, dtype) if p.dim_rope and g.dq_rope else None,
        "dk": rows_of(g.dk, key_dtype or dtype),
        "dk_rope": rows_of(g.dk_rope, key_dtype or dtype) if p.dim_rope and g.dk_rope else None,
        "dv": rows_of(g.dv, key_dtype or dtype) if g.dv and not p.shares_kv else None,
        "dk_compressed": rows_of(g.dk_compressed, key_dtype or dtype) if g.dk_compressed else None,
        "dv_compressed": rows_of(g.dv_compressed, key_dtype or dtype) if g.dv_compressed and not p.shares_kv else None,
        "wide_keys": key_dtype is not None,
    }
    with Floats() as floats:
        sinks = {"sink": floats.address(operands.sink), "dsink": dsink.data_ptr() if p.has_sink else 0}
        plan.run(torch.get_num_threads(), _arguments(p, operands, **written, **sinks))
    if g.dsink is not None:
        g.dsink.copy_(dsink)


def wide_keys(dk: RowView, dtype: torch.dtype) -> torch.dtype | None:
    """Returns torch.float32 if the gradient dk is stored in it, and `dtype` (of operands) is another; else None."""
    return torch.float32 if dk.keep[0].dtype == torch.float32 != dtype else None


def key_rows(view: RowView | PagedView | None, dtype: torch.dtype, sequences: int) -> tuple[Any, ...] | None:
    """Returns address and strides of keys or values, contiguous or in pages, for the native core; None for None. Raises
    TypeError if their dtype is not `dtype`. sequences: number of sequences."""
    if view is None:
        return None
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


def _arguments(p: Problem, o: Operands, **more: Any) -> tuple[Any, ...]:
    """Returns addresses and strides of the operands of attention to selected keys, in the order of the native core's
    arguments; more: those of further tensors by name, such as gradients."""
    dtype, sequences = p.torch_dtype, len(o.q.address)
    return arguments(
        q=rows_of(o.q, dtype),
        q_rope=rows_of(o.q_rope, dtype) if p.dim_rope and o.q_rope else None,
        indices=rows_of(o.indices, torch.int32) if o.indices else None,
        k=key_rows(o.k, dtype, sequences),
        k_rope=key_rows(o.k_rope, dtype, sequences) if p.dim_rope and o.k_rope else None,
        v=key_rows(o.v, dtype, sequences),
        k_compressed=key_rows(o.k_compressed, dtype, sequences),
        v_compressed=key_rows(o.v_compressed, dtype, sequences),
        out=rows_of(o.out, dtype),
        max_=rows_of(o.stats.max, torch.float32),
        sum_=rows_of(o.stats.sum, torch.float32),
        **more,
    )


def arguments(
    *,
    q: Any, k: Any, indices: Any = None, q_rope: Any = None, k_rope: Any = None, v: Any = None,
    out: Any = None, max_: Any = None, sum_: Any = None, weights: Any = None, values: Any = None, dout: Any = None,
    dlse: Any = None, dq: Any = None, dq_rope: Any = None, dk: Any = None, dk_rope: Any = None, dv: Any = None,
    dweights: Any = None, sink: int = 0, dsink: int = 0, wide_keys: bool = False, k_compressed: Any = None,
    v_compressed: Any = None, dk_compressed: Any = None, dv_compressed: Any = None, target: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Returns its arguments as a tuple in the native core's order, for attention to selected keys and the indexer.

    Each is a tensor's address and strides, a result of rows_of() or key_rows(), or None; sink, dsink: addresses or 0.
    """
    read = q, q_rope, indices, k, k_rope, v, out, max_, sum_, weights, values
    written = dout, dlse, dq, dq_rope, dk, dk_rope, dv, dweights, sink, dsink, wide_keys
    return *read, *written, k_compressed, v_compressed, dk_compressed, dv_compressed, target
