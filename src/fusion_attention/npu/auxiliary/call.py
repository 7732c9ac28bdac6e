"""The entry of an auxiliary operator's call: checked as every call is, then computed by its function in torch's own
operators."""

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
from fusion_attention.npu.interface import Args, from_record
from fusion_attention.torch_ops.dispatch import is_traced

R = TypeVar("R")


def computed(
    op: Op, host: int | None = None, before: Callable[[Args], Args] | None = None
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Makes the function of an auxiliary record, whose calls are checked, of what computes it.

    The body names the arguments that it reads as the record does; attributes have their default in place of None.

    Args:
        op, host: as from_record().
        before: what is made of the arguments before they are checked.
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
    """The arguments of a call that its record allows, defaults in place of None; with_tensors: the tensors too.

    Within torch.compile nothing is checked: torch's own operators say what is wrong. Other traces are asked where their
    sizes are numbers and no tensor holds lengths; what would read memory is not.

    Raises:
        ContractError: with every failure of the first stage that found one.
    """
    if not is_traced(args.values()):
        bound = bind(op, args)
        return bound.names if with_tensors else bound.settled.names
    lengths = any(isinstance(args[p.name], torch.Tensor) for p in op.params if isinstance(p, Array))
    if not torch.compiler.is_compiling() and not lengths and _numbers(args.values()):
        return bind(op, args, reads=False, memory=False).names
    return {p.name: p.default if args[p.name] is None else args[p.name] for p in op.params if isinstance(p, Attr)}


@contextmanager
def in_place_of(op: Op, **names: str) -> Iterator[None]:
    """Another function's calls inside an auxiliary operator, whose own rules say what the chip takes.

    Args:
        op: the record of the auxiliary operator, under whose name errors go out.
        names: from the other function's parameters to those of the auxiliary operator, where they differ.
    """
    # torch.compile traces no settings, so strictness is not asked.
    try:
        with nullcontext() if torch.compiler.is_compiling() else settings.override(strict=False):
            yield
    except ContractError as error:
        failures = [replace(f, op=op.name, param=names.get(f.param, f.param), cann="") for f in error.failures]
        raise ContractError(failures) from None


def as_given(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Within it torch computes in the dtypes that tensors have: the chip's autocast lists no auxiliary operator."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _numbers(values: Any) -> bool:
    """Whether all sizes are numbers, not symbols of a trace."""
    tensors = [t for value in values for t in (value if isinstance(value, (list, tuple)) else (value,))]
    sizes = (size for t in tensors if isinstance(t, torch.Tensor) for size in t.shape)
    return not any(isinstance(n, (torch.SymInt, torch.SymFloat)) for n in (*tensors, *sizes))
