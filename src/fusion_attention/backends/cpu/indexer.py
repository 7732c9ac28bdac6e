"""The lightning indexer by the native core: the choice of keys, and its backward.

Knows memory and the core's numbering. Refuses to know what is computed.
"""

from __future__ import annotations

import torch

from fusion_attention import _native
from fusion_attention.backends.cpu.native import DTYPES, extents_of, rows_of
from fusion_attention.backends.cpu.sparse import key_rows
from fusion_attention.problem import Extents, IndexerGrads, IndexerOperands, IndexerProblem


def plan_indexer(
    problem: IndexerProblem, extents: Extents, backward: bool, variant: str | None
) -> _native.IndexerPlan | _native.SparsePlan:
    """The core's plan; variant: None for the strongest instruction set that runs here, or one of the runnable ones."""
    p = problem
    dtypes = DTYPES[p.torch_dtype], DTYPES[getattr(torch, p.weights_dtype)]
    fields = p.heads, 1, p.dim, 0, 0, dtypes[0], 1.0, False, False, p.top_k, 1, True, dtypes[1]
    if backward:
        return _native.SparsePlan(fields, extents_of(extents), True, variant)
    return _native.IndexerPlan(fields, extents_of(extents), variant)


def run_indexer(plan: _native.IndexerPlan, problem: IndexerProblem, operands: IndexerOperands) -> None:
    """Writes indices, and values where there are any."""
    o, dtype = operands, problem.torch_dtype
    read = rows_of(o.q, dtype), None, rows_of(o.indices, torch.int32), key_rows(o.k, dtype, len(o.q.address))
    weights = rows_of(o.weights, getattr(torch, problem.weights_dtype))
    values = rows_of(o.values, dtype) if o.values else None
    plan.run(torch.get_num_threads(), (*read, *[None] * 5, weights, values, *[None] * 7, 0, 0))


def run_indexer_backward(
    plan: _native.SparsePlan, problem: IndexerProblem, operands: IndexerOperands, grads: IndexerGrads
) -> None:
    """Writes dq, dk and dweights."""
    o, g, dtype = operands, grads, problem.torch_dtype
    weights_dtype = getattr(torch, problem.weights_dtype)
    read = rows_of(o.q, dtype), None, rows_of(o.indices, torch.int32), key_rows(o.k, dtype, len(o.q.address))
    dout, dq, dk = (rows_of(view, dtype) for view in (g.dvalues, g.dq, g.dk))
    weights, dweights = rows_of(o.weights, weights_dtype), rows_of(g.dweights, weights_dtype)
    written = dout, dq, None, dk, None, None, dweights
    plan.run(torch.get_num_threads(), (*read, *[None] * 5, weights, None, *written, 0, 0))
