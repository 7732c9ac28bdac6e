"""Values that a check sets: random numbers of a fixed generator in a given layout, and functions that change the old
value of a parameter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from clauses.dtype_abbreviations import F32, I64

GENERATOR = torch.Generator()


def draw(*shape: int, d: torch.dtype = F32) -> torch.Tensor:
    """Returns normal numbers of a dtype from the generator that each check seeds."""
    return torch.randn(shape, generator=GENERATOR).to(d)


def drawn_integers(*shape: int, high: int, low: int = 0, d: torch.dtype = I64) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR).to(d)


def prepared(t: torch.Tensor, layout: str) -> torch.Tensor:
    """Converts [B, N, S, D] to a layout."""
    if layout == "BNSD":
        return t.contiguous()
    if layout == "SBH":
        return t.permute(2, 0, 1, 3).flatten(2).contiguous()
    t = t.transpose(1, 2).contiguous()
    return t.flatten(2) if layout == "BSH" else t


def heads_first(t: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """Converts a tensor in a layout to [B, N, S, D]."""
    if layout in ("BSH", "SBH"):
        t = t.unflatten(2, (heads, -1)) if t.shape[2] else t.new_empty(*t.shape[:2], heads, 0)
        return t.transpose(1, 2) if layout == "BSH" else t.permute(1, 2, 0, 3)
    return t if layout == "BNSD" else t.transpose(1, 2)


def zeros(*shape: int, d: torch.dtype = F32) -> Callable[[Any], torch.Tensor]:
    return lambda old: torch.zeros(shape, dtype=d)


def drawn(*shape: int, d: torch.dtype = F32) -> Callable[[Any], torch.Tensor]:
    return lambda old: draw(*shape, d=d)


def ints(*values: int, d: torch.dtype = I64) -> Callable[[Any], torch.Tensor]:
    return lambda old: torch.tensor(values, dtype=d)


def to(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda old: [t.to(dtype) for t in old] if isinstance(old, list) else old.to(dtype)


def gapped(old: Any) -> Any:
    """Returns the same values with a gap in memory after each element."""
    if isinstance(old, list):
        return [gapped(t) for t in old]
    doubled = torch.zeros((*old.shape, 2), dtype=old.dtype)
    doubled[..., 0] = old
    return doubled[..., 0]


def swapped(old: torch.Tensor) -> torch.Tensor:
    """Returns the same tensor with its first two axes swapped in memory."""
    return old.transpose(0, 1).contiguous().transpose(0, 1)


def ends(count: int) -> tuple[int, ...]:
    """Returns the ends of `count` sequences of one token."""
    return tuple(range(1, count + 1))


def long(axis: int) -> Callable[[Any], torch.Tensor]:
    """Repeats the one row of a tensor along an axis, more often than the chip takes rows of a sequence."""
    return lambda old: old.expand(*old.shape[:axis], 131073, *old.shape[axis + 1 :])


def enlarged(axis: int) -> Callable[[Any], torch.Tensor]:
    """Returns memory for the gradient of a tensor that long() repeats."""
    return lambda old: old.new_empty(*old.shape[:axis], 131073, *old.shape[axis + 1 :])


def widened(old: torch.Tensor) -> torch.Tensor:
    """Returns zeros with one more element in the last axis."""
    return torch.zeros((*old.shape[:-1], old.shape[-1] + 1), dtype=old.dtype)


def longer(old: torch.Tensor) -> torch.Tensor:
    """Returns zeros with one more element in the first axis."""
    return torch.zeros((old.shape[0] + 1, *old.shape[1:]), dtype=old.dtype)


def deeper(old: torch.Tensor) -> torch.Tensor:
    return old[None]


class Formatted(NamedTuple):
    """A tensor to be passed by a handle with another format."""

    tensor: torch.Tensor


def fractal(old: Any) -> Any:
    """Declares the format ACL_FORMAT_FRACTAL_NZ for the same tensor."""
    return [Formatted(t) for t in old] if isinstance(old, list) else Formatted(old)
