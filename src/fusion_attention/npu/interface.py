"""torch_npu's functions, made from their records: signature, docstring, and the way from a call to its arguments.

A record is the one place that says a parameter's name, order, default, type and meaning. What a function does stands
beside it, as a body that takes the arguments by the record's names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

import numpy as np
import torch

from fusion_attention.contract import REQUIRED, Array, Attr, Op, Tensors, docstring
from fusion_attention.torch_ops.aliases import crossing
from fusion_attention.torch_ops.spelling import misused

R = TypeVar("R")
Args = dict[str, Any]
_NONE = type(None)
_EMPTY = inspect.Parameter.empty
_SAID = re.compile(r"'(\w+)' not in missing")


def from_record(op: Op, host: int | None = 0) -> Callable[[Callable[[Args], R]], Callable[..., R]]:
    """Makes a function of its record and its body, which gives name, module and the type of what is returned.

    Args:
        op: the record.
        host: of the results as many, the last ones, stay in host memory where tensors cross to the device that computes
            (aliases.py); None: the body computes in torch's own operators, which find the device themselves.
    """

    def decorate(body: Callable[[Args], R]) -> Callable[..., R]:
        signature = signature_of(op, body.__annotations__["return"])
        names = {p.name: p.shown for p in op.params}
        call = _reading(op, signature, body if host is None else crossing(body, host, names))
        call.__name__, call.__qualname__, call.__module__ = op.name, op.name, body.__module__
        call.__doc__ = docstring(op)
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__wrapped__ = body  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        call.__annotations__["return"] = signature.return_annotation
        return call

    return decorate


def reader(op: Op) -> Callable[..., Args]:
    """A function that returns the arguments of a call by the record's names."""

    def read(args: Args) -> Args:
        return args

    return from_record(op, host=None)(read)


def _reading(op: Op, signature: inspect.Signature, body: Callable[[Args], R]) -> Callable[..., R]:
    """A function that hands its arguments to a body; written for speed, as it is a part of every call."""
    parameters = signature.parameters.values()
    names = {p.shown: p.name for p in op.params}
    own = {p.name: names[p.name] for p in parameters}
    shown = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    first = [own[name] for name in shown]
    # Of some attributes rules ask whether the call says them.
    said = {name for rule in op.asked for name in _SAID.findall(rule.check)}
    defaults = {own[p.name]: None if own[p.name] in said else p.default for p in parameters}
    spelled = [pair for pair in own.items() if pair[0] != pair[1]]
    # By the number of positional arguments: keywords that come twice or by the record's name, and those needed.
    refused = [{*shown[:count], *(name for _, name in spelled)} for count in range(len(shown) + 1)]
    needed = [{p.name for p in parameters if p.default is _EMPTY}.difference(shown[:n]) for n in range(len(shown) + 1)]
    total, most, enough = len(own), len(shown), sum(map(len, needed[:1]))

    def call(*given: Any, **named: Any) -> R:
        count = len(given)
        lacks = count < enough and not needed[count] <= named.keys()
        if lacks or count > most or not refused[count].isdisjoint(named):
            raise misused(call, given, named)
        args = defaults.copy()
        args.update(zip(first, given))  # noqa: B905 - strict costs a keyword
        args.update(named)
        for name, other in spelled:
            if name in named:
                args[other] = args.pop(name)
        if len(args) != total:
            raise misused(call, given, named)
        return body(args)

    return call


# ----------------------------------------------------------------------------------------------------------- signature


def signature_of(op: Op, returns: Any) -> inspect.Signature:
    """What a function takes: the inputs of its record, in their order."""
    inputs = op.inputs
    kind: Any = inspect.Parameter.KEYWORD_ONLY
    parameters, needed = [], False
    keywords = [p.shown for p in inputs].index(op.keywords) if op.keywords else len(inputs)
    for at in reversed(range(len(inputs))):
        p = inputs[at]
        if at < keywords and kind is inspect.Parameter.KEYWORD_ONLY:
            kind, needed = inspect.Parameter.POSITIONAL_OR_KEYWORD, False
        annotation = _type(op, p)
        default = REQUIRED if p.default is None and _NONE not in get_args(annotation) else p.default
        # Behind a parameter without a default stands none that has one.
        needed = kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and (needed or default is REQUIRED)
        shown = _EMPTY if needed or default is REQUIRED else default
        parameters.append(inspect.Parameter(p.shown, kind, default=shown, annotation=annotation))
    return inspect.Signature(parameters[::-1], return_annotation=returns)


def _type(op: Op, p: Any) -> Any:
    """The type of a parameter; the first member of a union is what torch_npu declares (operators.py)."""
    if p.name in op.declared:
        return op.declared[p.name]
    if isinstance(p, Attr):
        return p.type | None if p.default is None else p.type
    if isinstance(p, Array):
        some = Sequence[int] | np.ndarray | torch.Tensor
        return some | None if p.optional else some
    kind: Any = Sequence[torch.Tensor] if isinstance(p, Tensors) else torch.Tensor
    return kind | None if p.optional else kind
