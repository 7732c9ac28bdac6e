"""What a trace of torch.compile takes as a constant, or leaves out.

Loaded by the first trace: torch's decorators load its compiler, which takes about as long as torch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion_attention.torch_ops import dense_traced


@torch.compiler.assume_constant_result
def names_of(op: str) -> dense_traced.Names:
    """operators.names_of(): a trace need not look into records, nor watch them."""
    return dense_traced.names_of(op)


@torch.compiler.assume_constant_result
def settings_of(backend: str) -> str:
    """operators.settings_of(): what is set where a call is traced stays with it."""
    return dense_traced.settings_of(backend)


@torch.compiler.disable
def outside(function: Callable[..., Any], *args: Any) -> Any:
    """A call that a trace ends before, and goes on behind."""
    return function(*args)
