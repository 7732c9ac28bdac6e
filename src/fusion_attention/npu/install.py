"""install() and uninstall(): this library as the module `torch_npu`, so that Ascend code runs without the chip.

What changes, and no way to change it or to take it back (patches.py). Refuses to touch another torch_npu.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from fusion_attention.npu import device as npu_device
from fusion_attention.npu.children import done
from fusion_attention.npu.modules import NAME, beside, functions, made
from fusion_attention.npu.operators import register_all
from fusion_attention.npu.process_groups import register
from fusion_attention.npu.transfer import Finder
from fusion_attention.npu.windows import watch
from fusion_attention.patches import Changes, Layer, another, together
from fusion_attention.settings import PROCESS

_DEVICE = re.compile(r"npu(:\d+)?")


class _Devices(TorchFunctionMode):
    """Reads "npu" and "npu:0" as the device that computes, wherever torch is given a device; without one, nothing."""

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
        """torch.device(...), with "npu" understood."""
        if not isinstance(type, str) or not _DEVICE.fullmatch(type) or self.base is None:
            given = [a for a in (type, index) if a is not None]
            return torch.device(*given, **kwargs)
        name = type if index is None else f"{type}:{index}"
        count = torch.cuda.device_count() if self.base.type == "cuda" else 1
        number = npu_device.index(name, count)
        return self.base if self.base.type == "cpu" or name == "npu" else torch.device(self.base.type, number)

    def word(self, value: Any) -> Any:
        """A device string with "npu" replaced."""
        if isinstance(value, str) and _DEVICE.fullmatch(value) and self.base is not None:
            device = self.device(value)
            return device.type if value == "npu" else str(device)
        return value

    def enter(self) -> None:
        """Lies down in this thread below the modes that others entered, so that they leave as they entered."""
        above = _lifted()
        try:
            # set_default_device() looks for its mode at the bottom; `with torch.device(...)` takes the uppermost.
            if above and isinstance(above[-1], DeviceContext) and hasattr(above[-1], "old_device"):
                _push_mode(above.pop())
            if self not in above:
                _push_mode(self)
        finally:
            _put_back(above)

    def leave(self) -> None:
        """Leaves this thread, wherever it lies."""
        above = _lifted()
        _put_back([mode for mode in above if mode is not self])


def _lifted() -> list[Any]:
    """All modes of this thread, taken off, the uppermost first."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())]


def _put_back(modes: list[Any]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)


def _changed(base: torch.device, changes: Changes) -> None:
    def npu(self: Any, device: Any = None, non_blocking: bool = False, **_: Any) -> Any:
        """A copy of the tensor on the device that stands for the NPU; the tensor itself if it lies there."""
        return self.to(_place(base, device), non_blocking=non_blocking)

    def module_npu(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
        """Moves all parameters and buffers to the device that stands for the NPU."""
        return self.to(_place(base, device))

    modules = made(base)
    changes.play(modules, modules[NAME].__version__)
    changes.lend(beside(functions()))
    changes.find(Finder(changes), first=True)
    watch(changes)
    register_all(functions())
    changes.set(torch, "npu", modules[f"{NAME}.npu"])
    changes.set(torch.Tensor, "npu", npu)
    changes.set(torch.Tensor, "is_npu", property(lambda self: self.device.type == base.type))
    changes.set(torch.nn.Module, "npu", module_npu)
    changes.wrap(torch.autocast, "__init__", lambda layer: _mapped(layer, 1, "device_type", _DEVICES.word))
    changes.wrap(torch, "load", lambda layer: _mapped(layer, 1, "map_location", _DEVICES.word))
    register(changes, base, lambda layer, position, name: _mapped(layer, position, name, _DEVICES.word))
    changes.after(_DEVICES.leave)
    changes.after(setattr, _DEVICES, "base", None)
    _DEVICES.base = base
    _DEVICES.enter()


_LOCK = threading.RLock()
_DEVICES = _Devices()  # one for all threads: without a base it does nothing, on whatever stack it lies
_installed: tuple[torch.device, Changes] | None = None


def _place(base: torch.device, device: Any) -> torch.device:
    if base.type == "cpu":
        npu_device.index(device, 1)
        return base
    return base if device is None else torch.device(base.type, npu_device.index(device, torch.cuda.device_count()))


def _mapped(layer: Layer, position: int, name: str, word: Callable[[Any], Any]) -> Callable[..., Any]:
    """What lies below, with an argument at a position, or of a name, that may say "npu"."""

    @functools.wraps(layer.below)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            kwargs[name] = word(kwargs[name])
        elif len(args) > position:
            args = (*args[:position], word(args[position]), *args[position + 1 :])
        return layer.below(*args, **kwargs)

    return wrapper


def install(device: str | torch.device = "cpu", *, strict: bool | None = None) -> None:
    """Makes this library the module `torch_npu`, and "npu" another name of a device that is here.

    From then on `import torch_npu`, `torch.npu`, `x.npu()`, `x.is_npu`, `module.npu()` and the device strings "npu" and
    "npu:0" work, the last wherever torch dispatches a function (factories, to(), torch.device) or loads a file, in
    every thread that calls install(), below the modes and devices that it has entered. A tensor's own device keeps its
    true name. A library that looked for torch_npu before remembers that there was none: install first, then import it.
    A second call changes nothing but what it says. All of it happens, or nothing.

    Args:
        device: what computes: "cpu", or "cuda" where there is one.
        strict: what the chip would refuse is an error, in every thread of the process, until uninstall(); None leaves
            it as an earlier call said. `with npu.strict():` says it for a block.

    Raises:
        RuntimeError: another torch_npu is here.
        ValueError: a device that cannot compute, or that is not here.

    Example:
        >>> install()
        >>> import torch_npu
        >>> q = torch.randn(1, 16, 2, 64, device="npu:0")
        >>> torch_npu.npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)[0].is_npu
        True
        >>> uninstall()
    """
    global _installed  # noqa: PLW0603  (there is one torch to change)
    base = torch.device(device)
    if base.type not in ("cpu", "cuda") or (base.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f'npu.install: device: expected "cpu", or "cuda" where there is one, got {str(device)!r}')
    with _LOCK:
        asked = PROCESS.strict if strict is None else strict
        if _installed is not None and _installed[0] == base:
            _DEVICES.enter()
            PROCESS.strict = asked
            return
        uninstall()
        done()
        if (other := another(NAME)) is not None:
            raise RuntimeError(
                f"npu.install: expected no other torch_npu, got {other} (import that one, or remove it first)"
            )
        _installed = base, together(partial(_changed, base))
        PROCESS.strict = asked


def uninstall() -> None:
    """Takes back everything that install() changed, in all threads; nothing where nothing is installed.

    What others have changed since stays theirs. In other threads that called install() a mode stays that does nothing.

    Example:
        >>> uninstall()
        >>> hasattr(torch, "npu")
        False
    """
    global _installed
    with _LOCK:
        if _installed is not None:
            PROCESS.strict = False
            (_, changes), _installed = _installed, None
            changes.end()
