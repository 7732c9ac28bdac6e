"""The device "npu", registered as torch's PrivateUse1: loaded once per process, active while installed.

torch can neither unload the device nor remove its name. After uninstall() existing tensors work, and making new ones
raises.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fusion_attention.npu.device import compiled, sharing
from fusion_attention.npu.device.build import library
from fusion_attention.patches import Changes
from fusion_attention.torch_ops.device_aliases import Ways, connect

NAME = "npu"
MODULE = "torch.npu"
_FORMER = "privateuseone"  # torch's name of the device before it is renamed

_loaded = ""  # the type of the computing device, after the device is loaded


def load(base: str) -> None:
    """Loads the C++ library of the torch device "npu", unless it is loaded.

    Args:
        base: the computing device: "cpu" or "cuda".

    Raises:
        BuildError: its C++ file cannot be compiled.
        RuntimeError: another library uses PrivateUse1, or "npu" already computes on another device in this process.
    """
    global _loaded  # noqa: PLW0603
    name = torch._C._get_privateuse1_backend_name()  # torch has one PrivateUse1, which another library may have renamed
    if name not in (_FORMER, NAME):
        raise RuntimeError(
            f'npu.install: expected no other library to use torch\'s PrivateUse1, got its device "{name}" '
            '(use a process without that library, or install(device="host"))'
        )
    if _loaded and _loaded != base:
        raise RuntimeError(
            f'npu.install: device: expected "{_loaded}", which this process already uses for npu, got "{base}" '
            "(start another process)"
        )
    if _loaded:
        return
    path = library()
    _start_engine()
    torch.ops.load_library(path)
    if torch._C._get_privateuse1_backend_name() == _FORMER:
        torch.utils.backend_registration.rename_privateuse1_backend(NAME)
    ops = torch.ops.fusion_attention_npu
    ops.register_operators(base == "cuda")
    # Permanent, because tensors and their gradients outlive uninstall().
    if base == "cpu":
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        torch.autograd._engine_run_backward = _in_this_thread(run)  # type: ignore[attr-defined]
    # Permanent, because torch continues to call is_available() of its accelerator's module.
    torch.npu = sys.modules[MODULE] = _absent()  # type: ignore[attr-defined]
    connect(Ways(NAME, ops.to_base.default, ops.to_npu.default, _draw))
    _loaded = base


def _draw() -> tuple[int, int]:
    pair: tuple[int, int] = torch.npu.draw_pair()  # type: ignore[attr-defined]
    return pair


def _start_engine() -> None:
    """Runs the first backward of the process, so that autograd starts its threads before "npu" is registered.
    A thread for "npu" would start OpenMP threads, and the process could not be forked afterwards."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()


def enter(changes: Changes, module: ModuleType) -> None:
    """Activates the device "npu" with `module` as torch.npu, until the patches that `changes` records are removed."""
    changes.set(sys.modules, MODULE, module)
    changes.after(torch.ops.fusion_attention_npu.set_count, 0)
    torch.ops.fusion_attention_npu.set_count(module.device_count())
    compiled.enter(changes, _loaded)
    sharing.enter(changes)


def _in_this_thread(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps autograd's function that starts the engine, so that backward runs in the calling thread.
    The engine has no thread for "npu", because _start_engine() ran before the device was registered."""

    @functools.wraps(run_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return run_backward(*args, **kwargs)

    return run


def _absent() -> ModuleType:
    """Returns the module that is torch.npu while the device is inactive: no device, and new tensors are errors."""

    def refuse() -> None:
        raise RuntimeError(
            'device "npu": expected fusion_attention.npu.install() to be active, but uninstall() or '
            'install(device="host") was called after it'
        )

    module = ModuleType(
        MODULE, "The functions that torch calls before it makes tensors on a device that is not active."
    )
    vars(module).update(
        _lazy_init=refuse,
        is_available=lambda: False,
        device_count=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
    )
    return module
