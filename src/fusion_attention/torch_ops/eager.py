"""Eager execution of validated calls of all operators, with autograd through the calls' own gradient formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusion_attention.contract import Bound, Op, intact, lazy
from fusion_attention.ir.call import Differentiable, Lowered
from fusion_attention.plan import compute
from fusion_attention.settings import chosen
from fusion_attention.torch_ops.autograd_guards import once
from fusion_attention.torch_ops.prepared import Prepared, prepare

Tensors = tuple[torch.Tensor, ...]
Results = dict[str, torch.Tensor]


def _asked_one_by_one(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


# torch 2.6 has no function that tests all tensors at once.
_any_requires_grad = getattr(torch._C, "_any_requires_grad", _asked_one_by_one)


def run(call: Lowered, backend: str = "auto") -> Results:
    """Runs a call on a back end, without autograd, and returns {name: result}."""
    results = call.results()
    compute(call, results, backend)
    return results


def results(bound: Bound, backend: str = "auto", *, complete: bool = False, **how: Any) -> Results:
    """Runs a validated call on a back end and returns {name: result}, with autograd if the operator has derivatives.
    Results that were not requested may be among them; complete: all that a derivative reads are. how: further arguments
    of Op.lower, the conversion for back ends: seed and offset of dropout, format of softmax statistics."""
    op = bound.op
    backend = chosen(backend)
    prepared: Prepared | None = bound.call_cache.prepared.get(backend)
    trains = op.trains and torch.is_grad_enabled() and _any_requires_grad(*map(bound.args.get, op.trained))
    if prepared is not None and not trains:
        return prepared.results(bound.args, complete)
    if prepared is not None and prepared.bare is not None:
        return _trained(op, *prepared.bare, bound.args, backend, prepared)
    assert op.lower is not None
    call = op.lower(bound, **how)
    if trains:
        full: Differentiable = call.complete()
        inputs = full.inputs
        # The lowered call gets no tensors: autograd saves them, and detects in-place changes.
        result = _trained(op, full.on(dict.fromkeys(inputs)), tuple(inputs), inputs, backend, prepared)
    else:
        result = run(call.complete() if complete else call, backend)
    if op.repeats and prepared is None:
        _prepare(bound, call, backend)
    return result


def _trained(
    op: Op,
    bare: Differentiable,
    names: tuple[str, ...],
    inputs: Mapping[str, Any],
    backend: str,
    prepared: Prepared | None,
) -> Results:
    """Runs a call on the tensors `inputs` with autograd, and returns {name: result}; bare: the call without tensors."""
    # Inputs without a gradient are detached, so that backward does not run through, and free, their graph.
    tensors = [
        t.detach() if t is not None and t.requires_grad and name not in op.trained else t
        for name, t in zip(names, map(inputs.get, names), strict=True)
    ]
    return dict(zip(op.results, _Run.apply(op, bare, names, backend, prepared, *tensors), strict=False))


def _prepare(bound: Bound, call: Any, backend: str) -> None:
    """Prepares a call at its second use, for later calls that differ only in memory: stores its plan and views in the
    cache of `bound`, the checked call."""
    prepared, cache = bound.call_cache.prepared, bound.call_cache
    if backend not in prepared:
        prepared[backend] = None
    elif cache.preparable:
        fast_path = prepared[backend] = prepare(bound, call, backend)
        cache.preparable = fast_path is not None
        if fast_path is not None and bound.op.trains:
            full = call.complete()
            if all(t is bound.args.get(name) for name, t in full.inputs.items()):
                fast_path.bare = full.on(dict.fromkeys(full.inputs)), tuple(full.inputs)


class _Run(torch.autograd.Function):
    """The autograd function of a call of any operator; its backward runs the operator's gradient call."""

    @staticmethod
    def forward(
        ctx: Any,
        op: Op,
        bare: Differentiable,
        inputs: tuple[str, ...],
        backend: str,
        prepared: Prepared | None,
        *tensors: Any,
    ) -> Tensors:
        args = dict(zip(inputs, tensors, strict=True))
        result = run(bare.on(args), backend) if prepared is None else prepared.results(args, True)
        ctx.save_for_backward(*result.values(), *tensors)
        ctx.op, ctx.bare, ctx.inputs, ctx.results, ctx.backend = op, bare, inputs, tuple(result), backend
        ctx.mark_non_differentiable(*(t for name, t in result.items() if name not in op.trains))
        ctx.set_materialize_grads(False)
        return tuple(result.values())

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        wanted = ctx.needs_input_grad[5:]
        given = {
            name: t.clone() if lazy(t) else t
            for name, t in zip(ctx.results, upstream, strict=True)
            if t is not None and name in ctx.op.trains
        }
        if not given:
            return (None,) * (5 + len(wanted))
        count = len(ctx.results)
        saved = ctx.saved_tensors  # read once, because checkpointing unpacks a tensor only once
        names = (*(f"gradient of {name}" for name in given), *ctx.results, *ctx.inputs)
        intact(f"{ctx.op.name}, backward", names, (*given.values(), *saved))
        results, inputs = dict(zip(ctx.results, saved[:count], strict=True)), saved[count:]
        call = ctx.bare.on(dict(zip(ctx.inputs, inputs, strict=True)))
        trained_inputs = frozenset(name for name, need in zip(ctx.inputs, wanted, strict=True) if need)

        def gradients() -> list[torch.Tensor | None]:
            grads = call.gradients(results, given, lambda further: run(further, ctx.backend), trained_inputs)
            return [grads.get(name) if name in trained_inputs else None for name in ctx.inputs]

        return None, None, None, None, None, *once(gradients, (*given.values(), *inputs))
