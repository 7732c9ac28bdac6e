"""Eager execution of sparse attention and of the indexer, and their derivatives.

As autograd.py for the dense operators. Refuses to know how a call was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fusion_attention.calls import Lowered
from fusion_attention.ops import indexer_lower, sparse_lower
from fusion_attention.ops.indexer_lower import Indexer
from fusion_attention.ops.sparse_lower import DIFFERENTIABLE, GRADIENTS, OTHERS, Sparse
from fusion_attention.plan import compute

Tensors = tuple[torch.Tensor, ...]


def run(call: Lowered, backend: str = "auto") -> dict[str, torch.Tensor]:
    """The results of a lowered call, by the names of its record's outputs; records no gradient."""
    results = call.results()
    compute(call, results, backend)
    return results


def with_statistics(call: Sparse) -> Sparse:
    """The same call, returning statistics."""
    return replace(call, stats=True)


def attention(call: Sparse, backend: str = "auto") -> Tensors:
    """(out, max, sum), or (out,) of a call without statistics; differentiable in all of DIFFERENTIABLE."""
    tensors = [call.tensors[name] for name in DIFFERENTIABLE]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        others = [call.tensors[name] for name in OTHERS]
        results: Tensors = _Sparse.apply(replace(call, stats=True, tensors={}), backend, *tensors, *others)
        return results if call.stats else results[:1]
    return tuple(run(sparse_lower.Forward(call), backend).values())


def indexer(call: Indexer, backend: str = "auto") -> Tensors:
    """(indices, values), or (indices,) of a call without values; values are differentiable in q, k and weights."""
    tensors = (call.query, call.key, call.weights)
    if torch.is_grad_enabled() and call.problem.has_values and any(t.requires_grad for t in tensors):
        results: Tensors = _Indexer.apply(call, backend, *tensors)
        return results
    return tuple(run(indexer_lower.Forward(call), backend).values())


def _unpaged(page_size: int) -> None:
    if page_size:
        raise NotImplementedError("fusion_attention: keys in pages have no gradient: pass them padded or packed")


class _Sparse(torch.autograd.Function):
    """Forward with Backward as its derivative; statistics are returned, not differentiated."""

    @staticmethod
    def forward(ctx: Any, call: Sparse, backend: str, *tensors: Any) -> Tensors:
        results = tuple(run(sparse_lower.Forward(_with(call, tensors)), backend).values())
        ctx.save_for_backward(*results, *tensors)
        ctx.call, ctx.backend = call, backend  # The tensors are torch's to keep, and to notice when they change.
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, *_: Any) -> Any:
        wanted = ctx.needs_input_grad[2:]
        if dout is None:
            return (None,) * (2 + len(wanted))
        _unpaged(ctx.call.problem.page_size)
        out, max_, sum_, *tensors = ctx.saved_tensors
        grads = run(sparse_lower.Backward(_with(ctx.call, tensors), dout, out, max_, sum_), ctx.backend)
        names = (*GRADIENTS, *("",) * len(OTHERS))
        return None, None, *(grads.get(name) if need else None for name, need in zip(names, wanted, strict=True))


def _with(call: Sparse, tensors: Any) -> Sparse:
    named: Mapping[str, Any] = dict(zip((*DIFFERENTIABLE, *OTHERS), tensors, strict=True))
    return replace(call, tensors=named)


class _Indexer(torch.autograd.Function):
    """Forward with Backward as the derivative of its values; indices are not differentiated."""

    @staticmethod
    def forward(ctx: Any, call: Indexer, backend: str, *tensors: Any) -> Tensors:
        indices, values = run(indexer_lower.Forward(call), backend).values()
        ctx.save_for_backward(indices, *tensors)
        ctx.plain, ctx.backend = (call.problem, call.extents, call.layout, call.layout_kv), backend
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        return indices, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, dvalues: Any) -> Any:
        wanted = ctx.needs_input_grad[2:]
        if dvalues is None:
            return (None,) * 5
        problem, extents, layout, layout_kv = ctx.plain
        _unpaged(problem.page_size)
        indices, q, k, weights = ctx.saved_tensors
        call = Indexer(problem, extents, layout, layout_kv, q, k, weights, None)
        grads = run(indexer_lower.Backward(call, dvalues, indices), ctx.backend)
        return None, None, *(g if need else None for g, need in zip(grads.values(), wanted, strict=True))
