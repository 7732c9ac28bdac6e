"""Eager execution of a bound call of any family, with the derivative that it says itself.

The general way: selections, the indexer, its loss, decoding. Dense attention has its own (dense_eager.py, which says
why).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusion_attention.contract import Bound, Op, intact, lazy
from fusion_attention.ir.call import Differentiable, Further, Lowered, Repeatable
from fusion_attention.plan import compute, plan
from fusion_attention.settings import chosen
from fusion_attention.torch_ops.autograd_guards import once
from fusion_attention.torch_ops.prepared import Prepared

Tensors = tuple[torch.Tensor, ...]
Results = dict[str, torch.Tensor]


def run(call: Lowered, backend: str = "auto") -> Results:
    """The results of a lowered call, by the names of its record's outputs; records no gradient."""
    results = call.results()
    compute(call, results, backend)
    return results


def results(bound: Bound, backend: str = "auto", *, whole: bool = False) -> Results:
    """The results of a bound call, differentiable as its record says; there may be more of them than it asks for.

    Args:
        bound: the call.
        backend: as plan().
        whole: with all that a derivative reads, wanted or not.
    """
    op = bound.op
    backend = chosen(backend)
    known: _Known | None = bound.call_cache.prepared.get(backend) if op.again else None
    if known is not None:
        return known.results(bound.args, whole)
    assert op.lower is not None
    call = op.lower(bound)
    if op.trains and torch.is_grad_enabled():
        full: Differentiable = call.whole()
        inputs = full.inputs
        trained = {name for names in op.trains.values() for name in names}
        if any(t is not None and t.requires_grad for name, t in inputs.items() if name in trained):
            # The tensors are torch's to keep, and to notice when they change.
            bare = full.on(dict.fromkeys(inputs))
            # What is not trained here is a constant: a backward must not run through, and free, what it came from.
            tensors = [
                t.detach() if t is not None and t.requires_grad and name not in trained else t
                for name, t in inputs.items()
            ]
            result = _Run.apply(op, bare, tuple(inputs), backend, *tensors)
            return dict(zip(op.results, result, strict=False))
    result = run(call.whole() if whole else call, backend)
    if op.again:
        _prepare(bound, call, backend)
    return result


def _prepare(bound: Bound, call: Repeatable, backend: str) -> None:
    """Prepares a call on its second use: lengths that change with every call are not worth it."""
    prepared = bound.call_cache.prepared
    if backend not in prepared:
        prepared[backend] = None
    elif bound.call_cache.preparable:
        again = call.again() if len(call.extents) else None
        bound.call_cache.preparable = again is not None
        if again is not None:
            result = plan(call.problem, call.extents, call.device, backend, call.op_kind)
            prepared[backend] = _Known(Prepared(result, *again), bound.op.again, call.names, call.further)


class _Known:
    """A prepared call as its record names arguments and results."""

    __slots__ = ("_further", "_given", "_names", "_prepared")

    def __init__(
        self, prepared: Prepared, given: tuple[str, ...], names: tuple[str, ...], further: Further | None
    ) -> None:
        """given: as Op.again; names: of out, and of max and sum if it has them; further: as Repeatable.further."""
        self._prepared, self._given, self._names, self._further = prepared, given, names, further

    def results(self, args: Mapping[str, Any], whole: bool) -> Results:
        """The results of a call with these arguments, by name."""
        q, keys, values, table = self._given
        k = _one(args[keys])
        v = k if args.get(values) is None else _one(args[values])
        further = self._further
        if further is not None:
            return further.make(*self._prepared.run(args[q], k, v, args.get(table), stats=further.stats))
        result = self._prepared.run(args[q], k, v, args.get(table), stats=whole)
        return dict(zip(self._names if whole else self._names[:1], result, strict=False))


def _one(tensors: Any) -> torch.Tensor:
    """A tensor, or the one of a list."""
    result: torch.Tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
    return result


class _Run(torch.autograd.Function):
    """A call, with the gradients that it says itself."""

    @staticmethod
    def forward(
        ctx: Any, op: Op, bare: Differentiable, inputs: tuple[str, ...], backend: str, *tensors: Any
    ) -> Tensors:
        call = bare.on(dict(zip(inputs, tensors, strict=True)))
        result = run(call, backend)
        ctx.save_for_backward(*result.values(), *tensors)
        ctx.op, ctx.bare, ctx.inputs, ctx.results, ctx.backend = op, bare, inputs, tuple(result), backend
        ctx.mark_non_differentiable(*(t for name, t in result.items() if name not in op.trains))
        ctx.set_materialize_grads(False)
        return tuple(result.values())

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        wanted = ctx.needs_input_grad[4:]
        given = {
            name: t.clone() if lazy(t) else t
            for name, t in zip(ctx.results, upstream, strict=True)
            if t is not None and name in ctx.op.trains
        }
        if not given:
            return (None,) * (4 + len(wanted))
        count = len(ctx.results)
        saved = ctx.saved_tensors  # once: checkpointing unpacks a tensor no second time
        names = (*(f"gradient of {name}" for name in given), *ctx.results, *ctx.inputs)
        intact(f"{ctx.op.name}, backward", names, (*given.values(), *saved))
        results, inputs = dict(zip(ctx.results, saved[:count], strict=True)), saved[count:]
        call = ctx.bare.on(dict(zip(ctx.inputs, inputs, strict=True)))

        def found() -> list[torch.Tensor | None]:
            grads = call.gradients(results, given, lambda further: run(further, ctx.backend))
            return [grads.get(name) if need else None for name, need in zip(ctx.inputs, wanted, strict=True)]

        return None, None, None, None, *once(found, (*given.values(), *inputs))
