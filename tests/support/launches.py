"""What the Triton back end launches, seen by tests."""

from collections.abc import Callable
from typing import Any

import pytest

from fusion_attention.backends.triton.common import launching

See = Callable[[Any, dict[str, Any]], Any]


def watch(monkeypatch: pytest.MonkeyPatch, see: See, *, computes: bool = True) -> None:
    """Shows every launch before it is made: the kernel, and its arguments and Triton's options by their names."""
    real = launching.launch

    def watched(kernel: Any, grid: tuple[int, ...], arguments: list[Any], options: dict[str, int]) -> None:
        see(kernel, dict(zip(kernel.arg_names, arguments, strict=True)) | options)
        if computes:
            real(kernel, grid, arguments, options)

    monkeypatch.setattr(launching, "launch", watched)


def constants(named: dict[str, Any]) -> dict[str, Any]:
    """Those of a launch's arguments that a kernel knows while compiling, and Triton's options."""
    return {name: value for name, value in named.items() if name.isupper() or name.startswith("num_")}
