"""What the pages of training share: which keys a row sees in a sparse mode, biases, and bits of dropout."""

from collections.abc import Callable
from typing import Any

import torch

from clauses.checks import Args
from clauses.dtype_abbreviations import BOOL, U8
from clauses.error_bounds import Near, near
from clauses.values import GENERATOR

INF = 2147483647
TRIANGLE = torch.ones(2048, 2048, dtype=U8).triu(1)
# Mode 6: the triangle, above 1024 rows that hide the right half.
PREFIX_TRIANGLE = torch.cat([TRIANGLE, (torch.arange(2048) >= 1024).to(U8).expand(1024, 2048)])


def hiding(*shape: int, d: torch.dtype = BOOL) -> Callable[[Any], torch.Tensor]:
    """A mask that hides about a third of the keys, never a row's first."""

    def hidden_rows(old: object) -> torch.Tensor:
        mask = torch.rand(shape, generator=GENERATOR) < 0.3
        mask[..., 0] = False
        return mask.to(d)

    return hidden_rows


def given(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """An optional tensor; one without axes or elements is none."""
    return tensor if tensor is not None and tensor.dim() and tensor.numel() else None


def grid(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, key) numbers that broadcast."""
    return torch.arange(rows)[:, None], torch.arange(keys)


def band(mode: int, rows: int, keys: int, pre: int, following: int, prefix: int) -> torch.Tensor:
    """[rows, keys]: what a mode leaves a sequence by itself; pre and following are preTokens and nextTokens."""
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
    """Modes 7 and 8 as the mode of one sequence: 3 and 2, but for the last and the first one, whose band is shifted."""
    if mode == 7:
        return 4 if last else 3
    return 4 if first else 2


def biased(products: Near, args: Args, bias: torch.Tensor | None, distance: torch.Tensor) -> Near:
    """Scores by pseType: 1 scales products and bias, 0 the products alone; 2 and 3 compute a bias from slopes."""
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
    """The first bits of bytes, least significant first."""
    return ((mask[:, None] >> torch.arange(8)) & 1).reshape(-1)[:count].bool()


def tabled(distances: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """[..., rows, keys] of a bias that depends on row - key: distances[..., row - key + keys - 1]."""
    i, j = grid(rows, keys)
    return distances[..., i - j + keys - 1]
