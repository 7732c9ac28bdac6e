"""Formulas that the pages of training share: visible keys in a sparse mode, biases, and bits of dropout."""

from collections.abc import Callable
from typing import Any

import torch

from clauses.checks import Args
from clauses.dtype_abbreviations import BOOL, U8
from clauses.error_bounds import Near, near
from clauses.values import GENERATOR

INF = 2147483647
TRIANGLE = torch.ones(2048, 2048, dtype=U8).triu(1)
# Mask of mode 6: the triangle, with 1024 more rows below that hide the right half.
PREFIX_TRIANGLE = torch.cat([TRIANGLE, (torch.arange(2048) >= 1024).to(U8).expand(1024, 2048)])


def hiding(*shape: int, d: torch.dtype = BOOL) -> Callable[[Any], torch.Tensor]:
    """Returns a change to a random mask that hides about a third of the keys, but not the first key of a row."""

    def hidden_rows(old: object) -> torch.Tensor:
        mask = torch.rand(shape, generator=GENERATOR) < 0.3
        mask[..., 0] = False
        return mask.to(d)

    return hidden_rows


def given(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Returns an optional tensor, or None if it has no axes or no elements."""
    return tensor if tensor is not None and tensor.dim() and tensor.numel() else None


def grid(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns indices of rows and keys that broadcast to [rows, keys]."""
    return torch.arange(rows)[:, None], torch.arange(keys)


def band(mode: int, rows: int, keys: int, pre: int, following: int, prefix: int) -> torch.Tensor:
    """Returns bool [rows, keys]: keys visible in a sparse mode; pre, following: preTokens, nextTokens."""
    i, j = grid(rows, keys)
    right = i + keys - rows  # The diagonal through the lower right corner.
    if mode == 0:
        return (j >= i - pre) & (j <= i + following)
    if mode == 1:
        return (i >= 0) & (j >= 0)
    if mode == 2:
        return j <= i
    if mode == 3:
        return j <= right
    if mode == 4:
        return (j >= right - pre) & (j <= right + following)
    return (j <= right) | (j < prefix)


def edge_mode(mode: int, first: bool, last: bool) -> int:
    """Returns the mode of one sequence in modes 7 and 8: 4 for the last (7) or first (8) sequence, else 3 or 2."""
    if mode == 7:
        return 4 if last else 3
    return 4 if first else 2


def biased(products: Near, args: Args, bias: torch.Tensor | None, distance: torch.Tensor) -> Near:
    """Returns scores by pseType: 1 scales products and bias, 0 only products; 2 and 3 compute the bias from slopes."""
    scale, kind = args["scaleValue"], args["pseType"]
    if bias is None:
        return products * scale
    if kind == 1:
        return (products + near(bias)) * scale
    if kind == 0:
        return products * scale + near(bias)
    steps = near(distance.abs())
    return products * scale - near(bias)[..., None, None] * (steps if kind == 2 else steps.sqrt())


def bits(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the first `count` bits of bytes, least significant first."""
    return ((mask[:, None] >> torch.arange(8)) & 1).reshape(-1)[:count].bool()


def tabled(distances: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """Returns a bias [..., rows, keys] that depends on row - key: distances[..., row - key + keys - 1]."""
    i, j = grid(rows, keys)
    return distances[..., i - j + keys - 1]
