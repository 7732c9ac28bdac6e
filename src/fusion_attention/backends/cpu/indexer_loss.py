"""The indexer's loss with its gradients, and the statistics that the loss without selection reads, by the native core.

Knows memory and the core's numbering. Refuses to know what is computed.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion_attention import _native
from fusion_attention.backends.cpu.native import DTYPES, Floats, extents_of, rows_of
from fusion_attention.backends.cpu.sparse import key_rows
from fusion_attention.problem import (
    Extents,
    IndexerGrads,
    IndexerLossOperands,
    IndexerLossProblem,
    IndexerOperands,
    IndexerProblem,
    Stats,
)


def plan_indexer_loss(problem: IndexerLossProblem, extents: Extents, variant: str | None) -> _native.SparsePlan:
    """The core's plan; variant: None for the strongest instruction set that runs here, or one of the runnable ones."""
    p, dtypes = problem, (DTYPES[problem.torch_dtype], DTYPES[getattr(torch, problem.weights_dtype)])
    index = p.heads_index, 1, p.dim_index, 0, 0, dtypes[0], 1.0, False, False, p.select_count, 1, True, dtypes[1]
    main = p.heads_q, p.heads_kv, p.dim_qk, 0, p.dim_rope, dtypes[0], p.scale, p.has_sink, False, 0, 1, False, dtypes[0]
    return _native.SparsePlan(index, main, extents_of(extents), variant)


def run_indexer_loss(
    plan: _native.SparsePlan, problem: IndexerLossProblem, operands: IndexerLossOperands, grads: IndexerGrads
) -> None:
    """Writes the loss, and dq, dk and dweights of the indexer."""
    p, o, dtype = problem, operands, problem.torch_dtype
    index, weights_dtype = o.index, getattr(torch, p.weights_dtype)
    listed = rows_of(index.indices, torch.int32) if p.select_count else None
    read = rows_of(index.q, dtype), None, listed, rows_of(index.k, dtype), None, None, None
    stats = (None, None) if p.select_count else _statistics(index.stats)
    weights, dweights = (rows_of(view, weights_dtype) for view in (index.weights, grads.dweights))
    written = None, rows_of(grads.dq, dtype), None, rows_of(grads.dk, dtype), None, None, dweights
    q_rope, k_rope = (rows_of(view, dtype) if p.dim_rope else None for view in (o.q_rope, o.k_rope))
    attended = rows_of(o.q, dtype), q_rope, None, rows_of(o.k, dtype), k_rope, None, None
    loss = torch.zeros(1)
    with Floats() as floats:
        attention = *attended, *_statistics(o.stats), *[None] * 9, floats.address(o.sink) if p.has_sink else 0, 0
        own = *read, *stats, weights, None, *written, 0, 0
        plan.run(torch.get_num_threads(), own, attention, loss.data_ptr())
    o.loss.copy_(loss)


def plan_indexer_lse(problem: IndexerProblem, extents: Extents, variant: str | None) -> _native.IndexerPlan:
    """As plan_indexer_loss."""
    p, dtypes = problem, (DTYPES[problem.torch_dtype], DTYPES[getattr(torch, problem.weights_dtype)])
    fields = p.heads, 1, p.dim, 0, 0, dtypes[0], 1.0, False, False, 0, 1, True, dtypes[1]
    return _native.IndexerPlan(fields, extents_of(extents), variant)


def run_indexer_lse(plan: _native.IndexerPlan, problem: IndexerProblem, operands: IndexerOperands) -> None:
    """Writes the statistics."""
    o, dtype = operands, problem.torch_dtype
    keys = key_rows(o.k, dtype, len(o.q.address))
    read = rows_of(o.q, dtype), None, None, keys, None, None, None, *_statistics(o.stats)
    weights = rows_of(o.weights, getattr(torch, problem.weights_dtype))
    plan.run(torch.get_num_threads(), (*read, weights, *[None] * 8, 0, 0))


def _statistics(stats: Stats | None) -> tuple[Any, Any]:
    assert stats is not None
    return rows_of(stats.max, torch.float32), rows_of(stats.sum, torch.float32)
