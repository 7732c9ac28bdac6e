"""The device "npu" of torch's PrivateUse1: loaded once in a process, in force while install() is.

torch can neither unload it nor forget its name, so tensors that live on when install() is taken back go on working;
only new ones are refused.
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
from fusion_attention.torch_ops.aliases import Ways, connect

NAME = "npu"
MODULE = "torch.npu"
_FORMER = "privateuseone"  # what torch calls the device before it is renamed

_loaded = ""  # the type of device that computes, once there is a device


def claim() -> None:
    """Raises RuntimeError where another library has given PrivateUse1 its name: torch has one such device."""
    name = torch._C._get_privateuse1_backend_name()
    if name not in (_FORMER, NAME):
        raise RuntimeError(
            f'npu.install: expected PrivateUse1, which torch has once, to be free, got a device "{name}" of another '
            'library (use a process without it, or install(device="host"))'
        )


def load(base: str) -> None:
    """Makes the device, if there is none.

    Args:
        base: what computes: "cpu" or "cuda".

    Raises:
        BuildError: what has to be compiled cannot be.
        RuntimeError: PrivateUse1 is another library's, or computes on another device in this process.
    """
    global _loaded  # noqa: PLW0603
    claim()
    if _loaded and _loaded != base:
        raise RuntimeError(
            f'npu.install: device: expected "{_loaded}", on which this process has begun to compute, got "{base}" '
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
    # For good: tensors outlive uninstall(), and so do their gradients.
    if base == "cpu":
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        torch.autograd._engine_run_backward = _in_this_thread(run)  # type: ignore[attr-defined]
    # For good: torch goes on asking the module of its accelerator whether there is one.
    torch.npu = sys.modules[MODULE] = _absent()  # type: ignore[attr-defined]
    connect(Ways(NAME, ops.to_base.default, ops.to_npu.default, _draw))
    _loaded = base


def _draw() -> tuple[int, int]:
    pair: tuple[int, int] = torch.npu.draw_pair()  # type: ignore[attr-defined]
    return pair


def _start_engine() -> None:
    """A backward, the first of the process: autograd's engine then starts threads for the devices that it knows.

    npu is not yet one of them. A thread of its own would bring threads for OpenMP, and a process that has one can no
    longer be forked.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()


def enter(changes: Changes, module: ModuleType) -> None:
    """Puts the device in force, with the module of its name; the changes take it back."""
    changes.set(sys.modules, MODULE, module)
    changes.after(torch.ops.fusion_attention_npu.set_count, 0)
    torch.ops.fusion_attention_npu.set_count(module.device_count())
    compiled.enter(changes, _loaded)
    sharing.enter(changes)


def _in_this_thread(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """autograd's way into its engine, which has no thread for npu (_start_engine): each backward runs where it is asked
    for.
    """

    @functools.wraps(run_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return run_backward(*args, **kwargs)

    return run


def _absent() -> ModuleType:
    """What torch finds when a device is named that is not in force."""

    def refuse() -> None:
        raise RuntimeError(
            'device "npu": expected fusion_attention.npu.install() in force, got uninstall() or install(device="host") '
            "since"
        )

    module = ModuleType(MODULE, "What torch asks before it makes tensors of a device that is not in force.")
    vars(module).update(
        _lazy_init=refuse,
        is_available=lambda: False,
        device_count=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
    )
    return module
