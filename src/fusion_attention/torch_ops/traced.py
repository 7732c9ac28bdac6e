"""The calls of eager.py as operators that torch sees in a trace, under transforms and modes.

One operator runs the call of any record that names its results, another its derivative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from fusion_attention.contract import Op, ask, intact, trained
from fusion_attention.ir.call import Differentiable
from fusion_attention.memory import empty
from fusion_attention.torch_ops import eager
from fusion_attention.torch_ops.autograd_guards import below, no_tangents
from fusion_attention.torch_ops.registration import register
from fusion_attention.torch_ops.serialize import CALL, Text, bound, check, constant, names_of, pack, read, unpack

Tensor = torch.Tensor


def _trained(op: Op) -> set[str]:
    """The inputs that some result is differentiable in."""
    return {name for names in op.trains.values() for name in names}


def _arguments(tensors: Any, arrays: Any, ints: Any, floats: Any, call: str) -> tuple[Text, dict[str, Any]]:
    """(what the line of text says, arguments by canonical name)."""
    text = read(call)
    return text, unpack(tensors, arrays, ints, floats, text)


def _lowered(text: Text, args: dict[str, Any]) -> Any:
    assert text.op.lower is not None
    return text.op.lower(bound(text, args))


def _listed(found: Mapping[str, Tensor], names: tuple[str, ...], like: Tensor) -> list[Tensor]:
    """One tensor for every name: what was not found is empty."""
    return [found[name] if name in found else like.new_empty(0) for name in names]


def _forward(tensors: Any, *rest: Any) -> list[Tensor]:
    text, args = _arguments(tensors, *rest)
    call = _lowered(text, args)
    result = eager.run(call.whole() if text.op.trains else call, text.backend)
    return _listed(result, text.op.results, tensors[0])


def _forward_fake(tensors: Any, *rest: Any) -> list[Tensor]:
    text, args = _arguments(tensors, *rest)
    check(text, args, rest[0])
    op = text.op
    assert op.fresh is not None
    return _listed(op.fresh({**op.neutral, **args}), op.results, tensors[0])


def _backward(upstream: list[Tensor | None], results: list[Tensor], tensors: Any, *rest: Any) -> list[Tensor]:
    text, args = _arguments(tensors, *rest)
    call: Differentiable = _lowered(text, args).whole()
    op = text.op
    known = dict(zip(op.results, results, strict=True))
    wanted = {name: t for name, t in zip(op.results, upstream, strict=True) if t is not None}
    names = (*(f"gradient of {name}" for name in wanted), *known)
    intact(f"{op.name}, backward", names, (*wanted.values(), *known.values()))
    result = call.gradients(known, wanted, lambda further: eager.run(further, text.backend))
    # A sink of fewer bits was widened on its way down.
    result = {name: gradient.to(args[name].dtype) for name, gradient in result.items()}
    return _listed(result, names_of(op.name).tensors, tensors[0])


def _backward_fake(upstream: list[Tensor | None], results: list[Tensor], tensors: Any, *rest: Any) -> list[Tensor]:
    text, args = _arguments(tensors, *rest)
    op = text.op
    names, trained = names_of(op.name).tensors, _trained(op)
    given = {name: args[name] for name in names if name in trained and args[name] is not None}
    return _listed({name: empty(t, t.shape) for name, t in given.items()}, names, tensors[0])


class _Differentiable(_SingleLevelFunction):
    """lowered with lowered_grad as its derivative.

    Of one level: torch.func brings the level itself.
    """

    @staticmethod
    def forward(ctx: Any, rest: tuple[Any, ...], *tensors: Any) -> Any:
        with below():
            result = torch.ops.fusion_attention.lowered(list(tensors), *rest)
        arrays, *ctx.rest = rest
        op = read(rest[-1]).op
        ctx.smooth = [
            name in op.trains and (t.dim() > 1 or t.numel() > 0) for name, t in zip(op.results, result, strict=True)
        ]
        ctx.save_for_backward(*result, *tensors, *arrays)
        ctx.counts = len(result), len(tensors)
        ctx.trained = [name in _trained(op) for name in names_of(op.name).tensors]
        ctx.mark_non_differentiable(*(t for t, smooth in zip(result, ctx.smooth, strict=True) if not smooth))
        ctx.set_materialize_grads(False)
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        wanted = ctx.needs_input_grad[1:]
        given = [t if smooth else None for t, smooth in zip(upstream, ctx.smooth, strict=True)]
        if all(t is None for t in given):
            return (None,) * (1 + len(wanted))
        results, tensors = ctx.counts
        saved = ctx.saved_tensors
        result, inputs, arrays = saved[:results], saved[results : results + tensors], saved[results + tensors :]
        grads = torch.ops.fusion_attention.lowered_grad(given, list(result), list(inputs), list(arrays), *ctx.rest)
        needed = zip(grads, wanted, ctx.trained, strict=True)
        return None, *(g if need and trained else None for g, need, trained in needed)


def _untrained(tensors: Any, *rest: Any) -> None:
    """Raises where a gradient would be lost without a word: below autograd no rule sees who waits for one."""
    text, args = _arguments(tensors, *rest)
    rules = [r for r in text.op.asked if r.level == "meaning" and r.check == f"not trained({r.param})"]
    ask(text.op, [r for r in rules if trained(args[r.param])], args)


def _forward_autograd(tensors: Any, *rest: Any) -> Any:
    no_tangents(tensors)
    op = read(rest[-1]).op
    if op.watched and torch.is_grad_enabled():
        _untrained(tensors, *rest)
    if op.trains and torch.is_grad_enabled():
        named, trained = zip(names_of(op.name).tensors, tensors, strict=True), _trained(op)
        if any(t is not None and t.requires_grad for name, t in named if name in trained):
            with enable_single_level_autograd_function():
                return list(_Differentiable.apply(rest, *tensors))  # type: ignore[attr-defined]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.fusion_attention.lowered(tensors, *rest)


_CALL = CALL.format(seed="")
register(f"lowered({_CALL}) -> Tensor[]", _forward, _forward_fake, _forward_autograd)
register(f"lowered_grad(Tensor?[] upstream, Tensor[] results, {_CALL}) -> Tensor[]", _backward, _backward_fake)


def results(op: Op, args: Mapping[str, Any], backend: str) -> dict[str, Tensor]:
    """The results of a call by canonical name; those it has not are empty."""
    tensors, arrays, ints, floats, _, text = pack(op.name, args, backend=backend)
    result = torch.ops.fusion_attention.lowered(tensors, arrays, ints, floats, text)
    return dict(zip(constant(names_of, op.name).results, result, strict=True))
