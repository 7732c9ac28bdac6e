"""Decorator of auxiliary operators: a call is checked against its operator definition, then computed by torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from fusion_attention import settings
from fusion_attention.contract import Array, Attr, ContractError, Op, bind
from fusion_attention.npu.functions_from_definitions import Args, from_record
from fusion_attention.torch_ops.dispatch import is_traced

R = TypeVar("R")


def computed(
    op: Op, host: int | None = None, before: Callable[[Args], Args] | None = None
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Returns a decorator that makes an operator's function: it checks the arguments, then calls the decorated body.

    The body's parameters are names of the definition; it gets these arguments, with defaults for attributes that are
    None.

    Args:
        op: the operator's definition: parameters, defaults and rules.
        host: number of the last results that remain in host memory; None: the body calls torch's operators only.
        before: converts the dictionary of arguments before the check.
    """
    attributes = frozenset(p.name for p in op.params if isinstance(p, Attr))

    def decorate(body: Callable[..., R]) -> Callable[..., R]:
        read = tuple(inspect.signature(body).parameters)

        @functools.wraps(body)
        def run(args: Args) -> R:
            args = args if before is None else before(args)
            values = checked(op, args, with_tensors=False)
            return body(*[values[name] if name in attributes else args[name] for name in read])

        return from_record(op, host)(run)

    return decorate


def checked(op: Op, args: Mapping[str, Any], *, with_tensors: bool = True) -> Mapping[str, Any]:
    """Checks the arguments `args` of a call of `op`; returns them by name, with defaults in place of None.
    with_tensors: False leaves the tensors out.

    Calls inside torch.compile are not checked; torch's operators report their errors. Other traces are checked, without
    the rules that read memory, if sizes are numbers and lengths are not tensors.

    Raises:
        ContractError: it lists all failures of the first group of rules that fails.
    """
    if not is_traced(args.values()):
        bound = bind(op, args)
        return bound.names if with_tensors else bound.settled.names
    lengths = any(isinstance(args[p.name], torch.Tensor) for p in op.params if isinstance(p, Array))
    tensors = [t for value in args.values() for t in (value if isinstance(value, (list, tuple)) else (value,))]
    sizes = (size for t in tensors if isinstance(t, torch.Tensor) for size in t.shape)
    symbolic = torch.compiler.is_compiling() or any(
        isinstance(n, (torch.SymInt, torch.SymFloat)) for n in (*tensors, *sizes)
    )
    if not symbolic and not lengths:
        return bind(op, args, reads=False, memory=False).names
    return {p.name: p.default if args[p.name] is None else args[p.name] for p in op.params if isinstance(p, Attr)}


@contextmanager
def in_place_of(op: Op, **names: str) -> Iterator[None]:
    """Context in which the operator `op` calls another function: ContractErrors name `op`, and limits of the chip for
    the other function are not enforced.

    Args:
        op: the definition of the auxiliary operator.
        names: the operator's parameter name for each parameter of the other function, if they differ.
    """
    # torch.compile cannot trace settings.
    try:
        with nullcontext() if torch.compiler.is_compiling() else settings.override(strict=False):
            yield
    except ContractError as error:
        failures = [replace(f, op=op.name, param=names.get(f.param, f.param), cann="") for f in error.failures]
        raise ContractError(failures) from None


def as_given(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Returns a context without autocast on the tensor's device, in which an operator keeps its arguments' dtypes."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
