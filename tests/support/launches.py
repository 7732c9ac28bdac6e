"""Observes the launches of the Triton back end in tests."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from fusion_attention import plan
from fusion_attention.backends.triton.common import launching

See = Callable[[Any, dict[str, Any]], Any]


def watch(monkeypatch: pytest.MonkeyPatch, see: See, *, computes: bool = True) -> None:
    """Calls `see` before every launch with the kernel and its arguments and options by name; computes: launch it."""
    real = launching.launch

    def watched(kernel: Any, grid: tuple[int, ...], arguments: list[Any], options: dict[str, int]) -> None:
        see(kernel, dict(zip(kernel.arg_names, arguments, strict=True)) | options)
        if computes:
            real(kernel, grid, arguments, options)

    monkeypatch.setattr(launching, "launch", watched)


def constants(named: dict[str, Any]) -> dict[str, Any]:
    """Returns the constexpr arguments of a launch and Triton's options."""
    return {name: value for name, value in named.items() if name.isupper() or name.startswith("num_")}


def fresh_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clears cached plans, because a cached plan repeats its launches."""
    monkeypatch.setattr(plan, "_PLANS", OrderedDict())
