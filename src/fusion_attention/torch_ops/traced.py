"""The torch operators `lowered` and `lowered_grad`, which represent calls of all operators in traces and transforms.

The first runs a call of any operator and returns its results, the second its gradients.
"""

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


def _arguments(tensors: Any, arrays: Any, ints: Any, floats: Any, seed: Any, call: str) -> tuple[Text, dict[str, Any]]:
    """Returns (parsed text `call`, {name: argument}) from the arguments of the torch operator `lowered`."""
    text = read(call)
    return text, unpack(tensors, arrays, ints, floats, text)


def _lowered(text: Text, args: dict[str, Any], seed: Tensor | None) -> Any:
    """Validates a call from its text and arguments, and converts it for back ends; seed: a drawn one, or None."""
    assert text.op.lower is not None
    return text.op.lower(bound(text, args), **({} if seed is None else {"seed": int(seed)}))


def _listed(by_name: Mapping[str, Tensor], names: tuple[str, ...], like: Tensor) -> list[Tensor]:
    """Returns the tensors by_name[name] for all names, with an empty one like `like` for each absent name."""
    return [by_name[name] if name in by_name else like.new_empty(0) for name in names]


def _forward(tensors: Any, *rest: Any) -> list[Tensor]:
    text, args = _arguments(tensors, *rest)
    call = _lowered(text, args, rest[-2])
    result = eager.run(call.complete() if text.op.trains else call, text.backend)
    return _listed(result, text.op.results, tensors[0])


def _forward_fake(tensors: Any, *rest: Any) -> list[Tensor]:
    text, args = _arguments(tensors, *rest)
    check(text, args, rest[0])
    op = text.op
    assert op.fresh is not None
    return _listed(op.fresh({**op.neutral, **args}), op.results, tensors[0])


def _backward(
    upstream: list[Tensor | None], results: list[Tensor], wanted: list[bool], tensors: Any, *rest: Any
) -> list[Tensor]:
    text, args = _arguments(tensors, *rest)
    call: Differentiable = _lowered(text, args, rest[-2]).complete()
    op, names = text.op, names_of(text.op.name).tensors
    by_name = dict(zip(op.results, results, strict=True))
    given = {name: t for name, t in zip(op.results, upstream, strict=True) if t is not None}
    shown = (*(f"gradient of {name}" for name in given), *by_name, "seed")
    intact(f"{op.name}, backward", shown, (*given.values(), *by_name.values(), rest[-2]))
    requested = {name for name, want in zip(names, wanted, strict=True) if want}
    result = call.gradients(by_name, given, lambda further: eager.run(further, text.backend), requested)
    # Lowering converts a 16-bit sink to float32.
    result = {name: gradient.to(args[name].dtype) for name, gradient in result.items() if name in requested}
    return _listed(result, names, tensors[0])


def _backward_fake(
    upstream: list[Tensor | None], results: list[Tensor], wanted: list[bool], tensors: Any, *rest: Any
) -> list[Tensor]:
    text, args = _arguments(tensors, *rest)
    names = names_of(text.op.name).tensors
    given = {name: args[name] for name, want in zip(names, wanted, strict=True) if want}
    return _listed({name: empty(t, t.shape) for name, t in given.items()}, names, tensors[0])


class _Differentiable(_SingleLevelFunction):
    """The autograd function of `lowered`, whose backward is `lowered_grad`; single-level, for use in torch.func."""

    @staticmethod
    def forward(ctx: Any, rest: tuple[Any, ...], *tensors: Any) -> Any:
        with below():
            result = torch.ops.fusion_attention.lowered(list(tensors), *rest)
        arrays, ints, floats, seed, call = rest
        ctx.rest = ints, floats, call
        op = read(rest[-1]).op
        ctx.smooth = [
            name in op.trains and (t.dim() > 1 or t.numel() > 0) for name, t in zip(op.results, result, strict=True)
        ]
        ctx.save_for_backward(seed, *result, *tensors, *arrays)
        ctx.counts = len(result), len(tensors)
        ctx.trained = [name in op.trained for name in names_of(op.name).tensors]
        ctx.mark_non_differentiable(*(t for t, smooth in zip(result, ctx.smooth, strict=True) if not smooth))
        ctx.set_materialize_grads(False)
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        wanted = ctx.needs_input_grad[1:]
        given = [t if smooth else None for t, smooth in zip(upstream, ctx.smooth, strict=True)]
        if all(t is None for t in given):
            return (None,) * (1 + len(wanted))
        count, tensors = ctx.counts
        seed, *saved = ctx.saved_tensors
        result, inputs, arrays = saved[:count], saved[count : count + tensors], saved[count + tensors :]
        requested = [need and trained for need, trained in zip(wanted, ctx.trained, strict=True)]
        ints, floats, call = ctx.rest
        grads = torch.ops.fusion_attention.lowered_grad(
            given, result, requested, inputs, arrays, ints, floats, seed, call
        )
        return None, *(g if want else None for g, want in zip(grads, requested, strict=True))


def _forward_autograd(tensors: Any, *rest: Any) -> Any:
    no_tangents(tensors)
    op = read(rest[-1]).op
    if op.watched and torch.is_grad_enabled():  # a tensor without a derivative must not require a gradient
        _, args = _arguments(tensors, *rest)
        rules = [r for r in op.applicable_rules if r.level == "meaning" and r.check == f"not trained({r.param})"]
        ask(op, [r for r in rules if trained(args[r.param])], args)
    if op.trains and torch.is_grad_enabled():
        named = zip(names_of(op.name).tensors, tensors, strict=True)
        if any(t is not None and t.requires_grad for name, t in named if name in op.trained):
            with enable_single_level_autograd_function():
                return list(_Differentiable.apply(rest, *tensors))  # type: ignore[attr-defined]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.fusion_attention.lowered(tensors, *rest)


register(f"lowered({CALL}) -> Tensor[]", _forward, _forward_fake, _forward_autograd)
register(
    f"lowered_grad(Tensor?[] upstream, Tensor[] results, bool[] wanted, {CALL}) -> Tensor[]", _backward, _backward_fake
)


def results(op: Op, args: Mapping[str, Any], backend: str = "auto", seed: Tensor | None = None) -> dict[str, Tensor]:
    """Runs a call of `op` as a torch operator and returns {name: result}, absent ones empty; seed: a drawn seed."""
    packed = pack(op.name, args, seed, backend)
    return dict(zip(constant(names_of, op.name).results, torch.ops.fusion_attention.lowered(*packed), strict=True))


def gradients(
    op: Op, args: Mapping[str, Any], results: Mapping[str, Tensor], upstream: Mapping[str, Tensor], backend: str
) -> dict[str, Tensor]:
    """Returns {name: gradient} of a call's tensors by a registered operator; upstream: gradients of its `results`."""
    packed, names = pack(op.name, args, backend=backend), constant(names_of, op.name)
    wanted = [name in op.trained and args[name] is not None for name in names.tensors]
    of_results = [upstream.get(name) for name in names.results]
    grads = torch.ops.fusion_attention.lowered_grad(of_results, [results[n] for n in names.results], wanted, *packed)
    return dict(zip(names.tensors, grads, strict=True))
