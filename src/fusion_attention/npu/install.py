"""install() and uninstall(): make this library importable as `torch_npu`, so that code for Ascend NPUs runs anywhere.

This module defines the changes to other modules; patches.py applies and removes them. Another torch_npu is never
modified.
"""

from __future__ import annotations

import threading
import warnings
from functools import partial
from typing import Any, NamedTuple

import torch

from fusion_attention.contract import ContractWarning
from fusion_attention.npu.device import backend, npu_alias
from fusion_attention.npu.device.build import BuildError
from fusion_attention.npu.device.process_groups import register
from fusion_attention.npu.operators import register_all
from fusion_attention.npu.subprocesses import done
from fusion_attention.npu.surface import cann_ops, device_module, torchair
from fusion_attention.npu.surface.modules import NAME, beside, build_modules, functions
from fusion_attention.npu.surface.transfer import Finder
from fusion_attention.npu.transformers_window_warnings import watch
from fusion_attention.patches import Changes, another, together
from fusion_attention.settings import PROCESS

_DEVICES = ("cpu", "cuda", "host")


class _Way(NamedTuple):
    """The meaning of "npu": a device of torch whose operators `base` computes, or another name of `base`.
    registers_device is True for the device, False for the name."""

    base: torch.device
    registers_device: bool


def _changed(way: _Way, changes: Changes) -> None:
    kind = backend.NAME if way.registers_device else way.base.type

    def place(device: Any) -> torch.device:
        if not way.registers_device:
            return npu_alias.place(way.base, device)
        return torch.device(kind, device_module.number(device))

    def npu(self: Any, device: Any = None, non_blocking: bool = False, **_: Any) -> Any:
        """Returns the tensor on the device that represents the NPU: a copy, or the tensor itself if it is there."""
        return self.to(device=place(device), non_blocking=non_blocking)

    def module_npu(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
        """Moves all parameters and buffers of the module to the device that represents the NPU; returns the module."""
        return self.to(place(device))

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        """Keeps the tensor's memory until a stream's work is complete; does nothing for streams of the host."""
        if not isinstance(stream, device_module.Stream):
            torch._C.TensorBase.record_stream(self, stream)

    modules = build_modules(way.base, kind)
    changes.play(modules, modules[NAME].__version__)
    packages = beside()
    changes.lend(packages)
    torchair.enter(changes)
    changes.find(Finder(changes), first=True)
    watch(changes)
    register_all(functions())
    register_all(cann_ops.operators(packages), cann_ops.NAME)
    changes.after(torch.get_device_module.cache_clear)
    changes.set(torch, "npu", modules[f"{NAME}.npu"])
    torch.get_device_module.cache_clear()
    for owner in (torch.Tensor, torch.storage._StorageBase, torch.storage.TypedStorage):
        changes.set(owner, "npu", npu)
        changes.set(owner, "is_npu", property(lambda self: self.device.type == kind))
    changes.set(torch.Tensor, "record_stream", record_stream)
    changes.set(torch.nn.Module, "npu", module_npu)
    register(changes, way.base, kind)
    if way.registers_device:
        backend.enter(changes, modules[f"{NAME}.npu"])
    else:
        npu_alias.enter(way.base, changes)


_LOCK = threading.RLock()
_installed: tuple[_Way, Changes] | None = None


def install(device: str | torch.device = "cpu", *, strict: bool | None = None) -> None:
    """Makes this library importable as `torch_npu`, and "npu" a device of torch on which the CPU or CUDA computes.

    Afterwards `import torch_npu`, `torch.npu`, `x.npu()`, `x.is_npu`, `module.npu()` and the device "npu" work in every
    thread: `torch.randn(2, device="npu").device.type` is "npu", and each operator of torch runs the kernel of the
    computing device, which reads and writes the same memory. Import libraries that search for torch_npu after
    install(). A second call changes device and strictness only. If a step fails, all changes are reverted.

    The first call compiles a C++ file for the installed torch and caches the result. Without a C++ compiler it warns,
    and "npu" is another name of the computing device, as with device="host": tensors then have that device's type, and
    other threads that use "npu" must call install() too.

    Args:
        device: the computing device: "cpu", or "cuda" if there is one; "host": the CPU, without a device "npu".
        strict: True: calls beyond the chip's limits are errors, in every thread, until uninstall(); None: unchanged.
            `with npu.strict():` does so for a block.

    Raises:
        RuntimeError: another torch_npu is installed, or another library uses torch's PrivateUse1.
        ValueError: an unknown or missing device.

    Example:
        >>> install()
        >>> import torch_npu
        >>> q = torch.randn(1, 16, 2, 64, device="npu:0")
        >>> torch_npu.npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)[0].device.type
        'npu'
        >>> uninstall()
    """
    global _installed  # noqa: PLW0603  (there is one torch to change)
    wanted = _wanted(device)
    with _LOCK:
        is_strict = PROCESS.strict if strict is None else strict
        if _installed is not None and _installed[0] == wanted:
            if not wanted.registers_device:
                npu_alias.DEVICES.enter()
            PROCESS.strict = is_strict
            return
        uninstall()
        done()
        if (other := another(NAME)) is not None:
            raise RuntimeError(
                f"npu.install: expected no other torch_npu, got {other} (import that one, or remove it first)"
            )
        way = _loaded(wanted)
        _installed = wanted, together(partial(_changed, way))
        PROCESS.strict = is_strict


def _wanted(device: str | torch.device) -> _Way:
    """Returns the meaning of "npu" after install(device=...); ValueError for an unknown or missing device."""
    name = str(device) if isinstance(device, (str, torch.device)) else ""
    kind = name.partition(":")[0]
    if kind not in _DEVICES or (kind == "cuda" and not torch.cuda.is_available()) or (kind == "host" and kind != name):
        raise ValueError(f'npu.install: device: expected "cpu", "host", or "cuda" where there is one, got {name!r}')
    return _Way(torch.device("cpu" if kind == "host" else name), kind != "host")


def _loaded(wanted: _Way) -> _Way:
    """Loads the device "npu" if `wanted` registers it; returns `wanted`, or, without a compiler, warns and returns it
    with "npu" as another name of the computing device."""
    if not wanted.registers_device:
        return wanted
    try:
        backend.load(wanted.base.type)
    except BuildError as error:
        warnings.warn(
            f'{error}. Until then "npu" is another name of {wanted.base.type}, as with device="host".',
            ContractWarning,
            stacklevel=3,
        )
        return wanted._replace(registers_device=False)
    return wanted


def uninstall() -> None:
    """Removes all changes of install(), in all threads; does nothing if it is not installed.

    Changes that other code made later stay. torch cannot remove a device: `torch.npu` then reports no device, existing
    tensors work, and making new ones raises. With device="host", other threads that called install() keep an inactive
    TorchFunctionMode.

    Example:
        >>> uninstall()
        >>> hasattr(torch.Tensor, "npu")
        False
    """
    global _installed
    with _LOCK:
        if _installed is not None:
            PROCESS.strict = False
            (_, changes), _installed = _installed, None
            changes.end()
