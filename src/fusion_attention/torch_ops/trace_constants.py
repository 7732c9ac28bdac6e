"""What a trace of torch.compile takes as a constant, or leaves out.

Loaded by the first trace: torch's decorators load its compiler, which takes about as long as torch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.assume_constant_result
def constant(function: Callable[..., Any], *args: Any) -> Any:
    """What a function says while a call is traced, which stays with the trace."""
    return function(*args)


@torch.compiler.disable
def outside(function: Callable[..., Any], *args: Any) -> Any:
    """A call that a trace ends before, and goes on behind."""
    return function(*args)
