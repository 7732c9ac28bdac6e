"""The lightning indexer, which scores and selects keys, in the C++ core: selection, gradients, statistics, loss."""

from typing import Any

import torch

import fusion_attention._native as _native
from fusion_attention.backends.cpu.native import DTYPES, Floats, extents_of, rows_of
from fusion_attention.backends.cpu.sparse import arguments, key_rows, wide_keys
from fusion_attention.ir.problem import (
    Extents,
    IndexerGrads,
    IndexerLossOperands,
    IndexerLossProblem,
    IndexerOperands,
    IndexerProblem,
)
from fusion_attention.memory import empty


def plan_indexer(
    problem: IndexerProblem, extents: Extents, op_kind: str, variant: str | None
) -> _native.IndexerPlan | _native.SparsePlan:
    """Returns the C++ core's plan of an operation: op_kind indexer_topk, indexer_lse or indexer_backward."""
    p = problem
    fields = _fields(p, p.heads, p.dim, 0 if op_kind == "indexer_lse" else p.top_k)
    if op_kind == "indexer_backward":
        return _native.SparsePlan(fields, extents_of(extents), True, variant)
    return _native.IndexerPlan(fields, extents_of(extents), variant)


def plan_indexer_loss(problem: IndexerLossProblem, extents: Extents, variant: str | None) -> _native.SparsePlan:
    """Returns the C++ core's plan of the indexer's KL loss; variant: an instruction set, None: the fastest."""
    p, dtype = problem, DTYPES[problem.torch_dtype]
    sizes = p.heads_q, max(p.heads_kv, 1), p.dim_qk, 0, p.dim_rope
    attention = *sizes, dtype, p.scale, p.has_sink, False, 0, 1, False, dtype, False, 0, 1
    index = _fields(p, p.heads_index, p.dim_index, p.select_count)
    return _native.SparsePlan(index, attention, extents_of(extents), p.unit_target, variant)


def indexer_topk(
    problem: IndexerProblem, extents: Extents, schedule: _native.IndexerPlan, operands: IndexerOperands
) -> None:
    """Runs a plan: of indexer_topk, which writes the selected keys (operands.indices) and, if problem.has_values, their
    scores (operands.values); or of indexer_lse, which writes max and sum of all scores (operands.stats)."""
    if len(extents):
        schedule.run(torch.get_num_threads(), lists_of(problem, operands))


indexer_lse = indexer_topk


def lists_of(problem: IndexerProblem, operands: IndexerOperands) -> tuple[Any, ...]:
    """Returns addresses and strides of the indexer's operands and results, in the native core's order."""
    dtype = torch.float32 if problem.wide_values else problem.torch_dtype
    return _arguments(problem, operands, values=rows_of(operands.values, dtype) if operands.values else None)


def indexer_backward(
    problem: IndexerProblem,
    extents: Extents,
    schedule: _native.SparsePlan,
    operands: IndexerOperands,
    grads: IndexerGrads,
) -> None:
    """Writes the indexer's dq, dk and dweights to `grads` from grads.dvalues, the gradient of the selected keys'
    scores; list entries that a row does not read add nothing."""
    if len(extents):
        dout = rows_of(grads.dvalues, problem.torch_dtype)
        schedule.run(torch.get_num_threads(), _arguments(problem, operands, dout=dout, **_written(problem, grads)))


def indexer_loss(
    problem: IndexerLossProblem,
    extents: Extents,
    schedule: _native.SparsePlan,
    operands: IndexerLossOperands,
    grads: IndexerGrads,
) -> None:
    """Writes the indexer's KL loss, summed over all rows, to operands.loss, and its dq, dk and dweights to `grads`."""
    p, o, dtype = problem, operands, problem.torch_dtype
    if not len(extents):
        o.loss.zero_()
        return
    q, k, q_rope, k_rope = (rows_of(view, dtype) if view else None for view in (o.q, o.k, o.q_rope, o.k_rope))
    views = (o.stats.max, o.stats.sum) if o.stats else (None, None)
    max_, sum_, target, values = (
        rows_of(view, torch.float32) if view and view.dim else None for view in (*views, o.target, o.index.values)
    )
    loss = empty(o.loss, (1,), torch.float32)
    with Floats() as floats:
        sink = floats.address(o.sink) if p.has_sink else 0
        attention = arguments(q=q, k=k, q_rope=q_rope, k_rope=k_rope, max_=max_, sum_=sum_, sink=sink)
        index_arguments = _arguments(p, o.index, target=target, values=values, **_written(p, grads))
        schedule.run(torch.get_num_threads(), index_arguments, attention, loss.data_ptr())
    o.loss.copy_(loss)


def _weights_dtype(problem: IndexerProblem | IndexerLossProblem) -> torch.dtype:
    result: torch.dtype = getattr(torch, problem.weights_dtype)
    return result


def _fields(p: IndexerProblem | IndexerLossProblem, heads: int, dim: int, count: int) -> tuple[Any, ...]:
    """Returns an indexer's sizes, dtypes and flags in the C++ core's order; count: number of keys a row selects."""
    dtype, weights_dtype = DTYPES[p.torch_dtype], DTYPES[_weights_dtype(p)]
    wide_values = isinstance(p, IndexerProblem) and p.wide_values
    return heads, 1, dim, 0, 0, dtype, 1.0, False, False, count, 1, True, weights_dtype, wide_values, 0, p.ratio


def _arguments(p: IndexerProblem | IndexerLossProblem, o: IndexerOperands, **more: Any) -> tuple[Any, ...]:
    """Returns addresses and strides of the indexer's operands, and of `more` by name, in the native core's order."""
    return arguments(
        q=rows_of(o.q, p.torch_dtype),
        k=key_rows(o.k, p.torch_dtype, len(o.q.address)),
        weights=rows_of(o.weights, _weights_dtype(p)),
        indices=rows_of(o.indices, torch.int32) if o.indices else None,
        max_=rows_of(o.stats.max, torch.float32) if o.stats else None,
        sum_=rows_of(o.stats.sum, torch.float32) if o.stats else None,
        **more,
    )


def _written(p: IndexerProblem | IndexerLossProblem, g: IndexerGrads) -> dict[str, Any]:
    """Returns address and strides of each gradient that the native core writes, by its name."""
    key_dtype = wide_keys(g.dk, p.torch_dtype)
    dq, dk = rows_of(g.dq, p.torch_dtype), rows_of(g.dk, key_dtype or p.torch_dtype)
    return {"dq": dq, "dk": dk, "dweights": rows_of(g.dweights, _weights_dtype(p)), "wide_keys": key_dtype is not None}
