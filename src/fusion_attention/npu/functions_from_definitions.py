"""Makes torch_npu's functions from operator definitions: signature, docstring, and reading of arguments.

A definition has the names, order, defaults, types and meaning of the parameters. A function's body receives one
dictionary of the arguments by the definition's names.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from types import GenericAlias
from typing import Any, TypeVar, get_args

import numpy as np
import torch

from fusion_attention.contract import REQUIRED, Array, Attr, Op, Tensors, docstring
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.device_aliases import crossing
from fusion_attention.torch_ops.misspelled_arguments import misused

R = TypeVar("R")
Args = dict[str, Any]
_NONE, _PARAMETER, _EMPTY = type(None), inspect.Parameter, inspect.Parameter.empty
_KINDS = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
# Types of tensors, lists of tensors and integers: (required, optional).
_TENSOR, _LIST = (torch.Tensor, torch.Tensor | None), (Sequence[torch.Tensor], Sequence[torch.Tensor] | None)
_INTEGERS = Sequence[int] | np.ndarray | torch.Tensor, Sequence[int] | np.ndarray | torch.Tensor | None
_WITHOUT = re.compile(r"'(\w+)' not in missing")


def from_record(op: Op, host: int | None = 0) -> Callable[[Callable[[Args], R]], Callable[..., R]]:
    """Returns a decorator that makes a public function from a body: signature and docstring come from the definition,
    module and return type from the body. The body gets one dictionary of arguments. The function's name is added to
    its module's `__all__`.

    Args:
        op: the operator definition: parameters with types, defaults and meaning.
        host: how many of the last results remain in host memory if the tensors are on "npu", whose memory another
            device computes on (torch_ops/device_aliases.py); None: the body calls only torch's operators, which accept
            "npu".
    """

    def decorate(body: Callable[[Args], R]) -> Callable[..., R]:
        names = {p.name: p.shown for p in op.params}
        call = _reading(op, body if host is None else crossing(body, host, names), body.__annotations__["return"])
        call.__module__, call.__doc__ = body.__module__, docstring(op)
        call.__wrapped__ = body  # type: ignore[attr-defined]
        vars(sys.modules[body.__module__]).setdefault("__all__", []).append(call.__name__)
        return call

    return decorate


def in_order(op: Op, module: str, like: str, *cast: str) -> Callable[..., Any]:
    """Returns the public function of an operator (op), which returns its only result, or a tuple of all.

    A result that a call does not compute is an empty tensor.

    Args:
        op: the operator definition.
        module: the name of the module that has the function.
        like: the name of the argument whose dtype empty tensors have.
        cast: the names of the arguments that autocast converts, the first of which is `like`; none: no autocast.
    """

    def body(args: Args) -> Any:
        if cast:
            dispatch.autocast(args, cast)
        ordered = dispatch.in_order(op, args, args[like])
        return ordered if several else ordered[0]

    several = len(op.results) > 1
    results = GenericAlias(tuple, (torch.Tensor,) * len(op.results))
    body.__annotations__["return"] = results if several else torch.Tensor
    body.__module__, body.__name__ = module, op.called
    return from_record(op)(body)


def reader(op: Op) -> Callable[..., Args]:
    """Returns a function with the signature of operator `op` that returns a dictionary of its arguments by name."""
    return _reading(op, lambda args: args, Args)


def _reading(op: Op, body: Callable[[Args], R], returns: Any) -> Callable[..., R]:
    """Returns a function with the signature of `op` that calls body(dictionary of arguments by the definition's names);
    it is optimized, because every call uses it.
    op: the operator definition. returns: annotation of the function's result."""
    signature = signature_of(op, returns)
    parameters = signature.parameters.values()
    names = {p.shown: p.name for p in op.params}
    parameter_of = {p.name: names[p.name] for p in parameters}
    shown = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    first = [parameter_of[name] for name in shown]
    # Rules test whether these attributes were passed, so their default here is None.
    checks = (rule.check for rule in op.applicable_rules if " missing" in rule.check)
    optional = {name for check in checks for name in _WITHOUT.findall(check)}
    defaults = {parameter_of[p.name]: None if parameter_of[p.name] in optional else p.default for p in parameters}
    spelled = [pair for pair in parameter_of.items() if pair[0] != pair[1]]
    # For each number of positional arguments: keywords that are not accepted (duplicates, canonical names that the
    # function spells otherwise), and keywords that are required.
    rejected = [{*shown[:count], *(name for _, name in spelled)} for count in range(len(shown) + 1)]
    necessary = {p.name for p in parameters if p.default is _EMPTY}
    needed = [necessary.difference(shown[:count]) for count in range(len(shown) + 1)]
    total, most, enough = len(parameter_of), len(shown), len(necessary)

    def call(*given: Any, **named: Any) -> R:
        count = len(given)
        lacks = count < enough and not needed[count] <= named.keys()
        if lacks or count > most or not rejected[count].isdisjoint(named):
            raise misused(call, given, named)
        args = defaults.copy()
        args.update(zip(first, given))  # noqa: B905 - strict= would cost time
        args.update(named)
        for name, other in spelled:
            if name in named:
                args[other] = args.pop(name)
        if len(args) != total:
            raise misused(call, given, named)
        return body(args)

    call.__name__ = call.__qualname__ = op.called
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()} | {"return": returns}
    return call


# ----------------------------------------------------------------------------------------------------------- signature


def signature_of(op: Op, returns: Any) -> inspect.Signature:
    """Returns the Python signature of the function that the definition `op` describes; returns: type of its result."""
    declared = [(p, *_declared(op, p)) for p in op.inputs]
    placed = next((at for at, (p, _, _) in enumerate(declared) if p.shown == op.keywords), len(declared))
    # Python forbids a positional parameter with a default before one without.
    needed = max((at for at, (_, _, default) in enumerate(declared[:placed]) if default is _EMPTY), default=-1)
    parameters = [
        _PARAMETER(p.shown, _KINDS[at >= placed], default=_EMPTY if at <= needed else default, annotation=annotation)
        for at, (p, annotation, default) in enumerate(declared)
    ]
    return inspect.Signature(parameters, return_annotation=returns)


def _declared(op: Op, p: Any) -> tuple[Any, Any]:
    """Returns (type annotation, default) of parameter p of the operator definition `op`; the first type of a union is
    the type in torch's schema."""
    default = _EMPTY if p.default is REQUIRED else p.default
    if (declared := op.declared.get(p.name)) is not None:
        return declared, default if default is not None or _NONE in get_args(declared) else _EMPTY
    if isinstance(p, Attr):
        return p.type if default is not None else p.type | None, default
    kinds = _INTEGERS if isinstance(p, Array) else _LIST if isinstance(p, Tensors) else _TENSOR
    return kinds[p.optional], default if p.optional else _EMPTY
