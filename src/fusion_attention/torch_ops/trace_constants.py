"""Functions that torch.compile evaluates as constants of a trace, or runs outside of it.

This module is loaded by the first trace, because torch's decorators import its compiler, which takes about as long as
importing torch.
"""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.assume_constant_result
def constant(function: Callable[..., Any], *args: Any) -> Any:
    """Returns function(*args), evaluated during tracing, so that the result is a constant of the trace."""
    return function(*args)


@torch.compiler.disable
def outside(function: Callable[..., Any], *args: Any) -> Any:
    """Returns function(*args), computed outside of the trace, by a graph break."""
    return function(*args)
