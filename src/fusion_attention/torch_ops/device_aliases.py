"""Support for tensors on a device that exists only by name, such as "npu": their memory is on another device, which
computes.

A tensor on the device by name has an alias, a tensor over the same memory on the computing device. Functions compute on
aliases and return tensors on the device by name. npu/device/backend.py defines the conversions of "npu".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from fusion_attention.ir import dropout
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.misspelled_arguments import suggested

Tensor = torch.Tensor
P = ParamSpec("P")
R = TypeVar("R")

_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
COUNTS = frozenset({torch.int32, torch.int64})  # lengths and seeds may lie in host memory


class Ways(NamedTuple):
    """The conversions between a device that exists only by name, such as "npu", and the device that computes for it.

    Attributes:
        device: type of the device by name.
        to_base: function from a tensor on that device to a tensor over the same memory on the computing device;
            differentiable.
        back: function from a tensor on the computing device, and a list of tensors that may share its memory, to a
            tensor on the device by name.
        draw: function that returns the next (seed, offset) of that device's random generator.
    """

    device: str
    to_base: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, list[Tensor]], Tensor]
    draw: Callable[[], tuple[int, int]]


_ways: Ways | None = None  # one per process, as the device is registered per process


def connect(ways: Ways) -> None:
    """Registers conversions between devices; functions wrapped by crossing() then accept tensors on ways.device."""
    global _ways  # noqa: PLW0603
    _ways = ways


def crosses(device: torch.device) -> bool:
    """True if a device exists only by name, such as "npu", so that another device computes for it."""
    return _ways is not None and device.type == _ways.device


def aliased(function: Callable[P, R], host: int = 0) -> Callable[P, R]:
    """Wraps a function so that it accepts tensors on a device that exists only by name, such as "npu", and that its
    TypeErrors for unknown keywords suggest existing ones; host: number of last results that stay in host memory."""
    return crossing(suggested(function), host)


def crossing(function: Callable[P, R], host: int = 0, names: Mapping[str, str] | None = None) -> Callable[P, R]:
    """Wraps a function so that it also accepts tensors on a device that exists only by name, such as "npu".

    Args:
        function: computes on aliases, tensors over the same memory on the computing device.
        host: number of last results that stay in host memory.
        names: if the function takes one dictionary, the interface's name of each key; None: it takes arguments.

    Traced and transformed calls, and those with tensor subclasses, are not converted: torch dispatches their operators.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _ways is None or dispatch.is_traced(()):
            return function(*args, **kwargs)
        crossing = _Crossing(_ways)
        given = [crossing.into(value) for value in args]
        named = {name: crossing.into(value) for name, value in kwargs.items()}
        if not crossing.tensors or crossing.odd:
            return function(*args, **kwargs)
        if crossing.strange is not None and crossing.strange.type != "meta":
            raise _elsewhere(function, crossing, args, kwargs, names)
        generator = dropout.generator.set(_ways.draw)
        try:
            with crossing.autocast():
                results = function(*given, **named)
        finally:
            dropout.generator.reset(generator)
        result: R = crossing.out(results[:-host]) + results[-host:] if host else crossing.out(results)  # type: ignore[index]
        return result

    return call


def _elsewhere(
    function: Callable[..., Any],
    crossing: _Crossing,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Mapping[str, str] | None,
) -> RuntimeError:
    """Returns torch's error for tensors on several devices, with the name of the argument of `function` in it."""
    home, strange = crossing.tensors[0].device, crossing.strange
    if names is None:
        named = dict(zip(inspect.signature(function).parameters, args, strict=False)) | kwargs
    else:
        named = {names[name]: value for name, value in args[0].items()}
    result = (
        name
        for name, value in named.items()
        for t in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(t, torch.Tensor) and t.device == strange and (t.dim() and t.dtype not in COUNTS)
    )
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {home} and {strange}! "
        f"({function.__name__}: {next(result, 'an argument')} is on {strange}: move it to {home})"
    )


class _Crossing:
    """Converter of tensors on a device by name to aliases, the same memory on the computing device; and back."""

    def __init__(self, ways: Ways) -> None:
        self.ways = ways
        self.tensors: list[Tensor] = []
        self.aliases: list[Tensor] = []
        self.strange: torch.device | None = None
        self.odd = False  # a tensor on the device is of a subclass, which must see torch's operators

    def into(self, value: Any) -> Any:
        """Returns the value with tensors replaced by aliases, also in lists, tuples and dictionaries."""
        kind = type(value)
        if kind in _TENSOR_TYPES:
            return self._alias(value)
        if kind is list or kind is tuple:
            return kind([self.into(one) for one in value])
        if kind is dict:
            return {name: self.into(one) for name, one in value.items()}
        if isinstance(value, torch.Tensor) and value.device.type == self.ways.device:
            self.odd = True
        return value

    def _alias(self, tensor: Tensor) -> Tensor:
        device = tensor.device
        if device.type != self.ways.device:
            if tensor.dim() and tensor.dtype not in COUNTS:
                self.strange = device
            return tensor
        for crossed, alias in zip(self.tensors, self.aliases, strict=True):
            if crossed is tensor:
                return alias
        if self.tensors and self.tensors[0].device != device:
            self.strange = device
        self.tensors.append(tensor)
        self.aliases.append(self.ways.to_base(tensor))
        return self.aliases[-1]

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns a context in which the computing device has the autocast state of the device by name ("npu")."""
        if not torch._C._is_any_autocast_enabled():
            return nullcontext()
        dtype, enabled = torch.get_autocast_dtype(self.ways.device), torch.is_autocast_enabled(self.ways.device)
        return torch.autocast(self.aliases[0].device.type, dtype, enabled)

    def out(self, value: Any) -> Any:
        """Returns a result with its tensors, also in lists, converted to the device that exists only by name."""
        if isinstance(value, torch.Tensor):
            for tensor, alias in zip(self.tensors, self.aliases, strict=True):
                if alias is value:
                    return tensor
            return self.ways.back(value, self.tensors)
        if type(value) is list or type(value) is tuple:
            return type(value)([self.out(one) for one in value])
        return value
