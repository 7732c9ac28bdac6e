"""install(device="host"): "npu" is another name of an existing device; its tensors have the device's real name.

A TorchFunctionMode translates the name. It is below the modes of other code on torch's stack, so that other code can
leave its modes in any order.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from fusion_attention.npu.device.process_groups import read_meshes
from fusion_attention.npu.surface import device_module
from fusion_attention.patches import Changes, Layer

_DEVICE = re.compile(r"npu(:\d+)?")


class _Devices(TorchFunctionMode):
    """Translates "npu" and "npu:i" to the computing device `base` in calls of torch; does nothing if base is None."""

    base: torch.device | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.base is None:
            return func(*args, **kwargs)
        if func is torch.device:
            return self.device(*args, **kwargs)
        device = kwargs.get("device")
        if type(device) is str and _DEVICE.fullmatch(device):
            kwargs = {**kwargs, "device": self.device(device)}
        if any(type(a) is str and _DEVICE.fullmatch(a) for a in args):
            args = tuple(self.device(a) if type(a) is str and _DEVICE.fullmatch(a) else a for a in args)
        return func(*args, **kwargs)

    def device(self, type: Any = None, index: int | None = None, **kwargs: Any) -> torch.device:
        """Returns torch.device(type, index), or the computing device if they name "npu"."""
        if not isinstance(type, str) or not _DEVICE.fullmatch(type) or self.base is None:
            given = [a for a in (type, index) if a is not None]
            return torch.device(*given, **kwargs)
        name = type if index is None else f"{type}:{index}"
        number = device_module.index(name, torch.npu.device_count())  # type: ignore[attr-defined]
        return self.base if self.base.type == "cpu" or name == "npu" else torch.device(self.base.type, number)

    def word(self, value: Any) -> Any:
        """Returns the computing device's name for a text "npu" or "npu:i", and other values unchanged."""
        if isinstance(value, str) and _DEVICE.fullmatch(value) and self.base is not None:
            device = self.device(value)
            return device.type if value == "npu" else str(device)
        return value

    def enter(self) -> None:
        """Activates this TorchFunctionMode in this thread, below the modes of other code on torch's stack."""
        above = _lifted()
        try:
            # set_default_device() expects its mode at the bottom; `with torch.device(...)` pops the topmost.
            if above and isinstance(above[-1], DeviceContext) and hasattr(above[-1], "old_device"):
                _push_mode(above.pop())
            if self not in above:
                _push_mode(self)
        finally:
            _put_back(above)

    def leave(self) -> None:
        """Removes this TorchFunctionMode from this thread's stack, at any position."""
        above = _lifted()
        _put_back([mode for mode in above if mode is not self])


def _lifted() -> list[Any]:
    """Pops all TorchFunctionModes from this thread's stack; returns them, the topmost first."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())]


def _put_back(modes: list[Any]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)


DEVICES = _Devices()  # one for all threads; without a base it does nothing


def place(base: torch.device, device: Any) -> torch.device:
    """Returns the device that computes for "npu", "npu:i", i or None (the current one): base, or its GPU i."""
    if base.type == "cpu":
        device_module.number(device)
        return base
    return base if device is None else torch.device(base.type, device_module.index(device, torch.cuda.device_count()))


def enter(base: torch.device, changes: Changes) -> None:
    """Makes "npu" another name of the computing device `base`, until the patches in `changes` are removed."""
    word = DEVICES.word
    changes.wrap(torch.autocast, "__init__", lambda layer: _mapped(layer, 1, "device_type", word))
    changes.wrap(torch, "load", lambda layer: _mapped(layer, 1, "map_location", word))
    read_meshes(changes, lambda layer, position, name: _mapped(layer, position, name, word))
    changes.after(DEVICES.leave)
    changes.after(setattr, DEVICES, "base", None)
    DEVICES.base = base
    DEVICES.enter()


def _mapped(layer: Layer, position: int, name: str, word: Callable[[Any], Any]) -> Callable[..., Any]:
    """Wraps the patched function layer.below: word() converts its argument at `position`, or with the name `name`."""

    @functools.wraps(layer.below)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            kwargs[name] = word(kwargs[name])
        elif len(args) > position:
            args = (*args[:position], word(args[position]), *args[position + 1 :])
        return layer.below(*args, **kwargs)

    return wrapper
