"""Rows as float32 panels: loading, storing, and products that must not read what a row does not see.

A panel is always a fresh contiguous copy: low dtypes need the promotion anyway, and one alignment and one stride
make a packed and a padded batch take the same path through the matrix library, bit for bit.
"""

from __future__ import annotations

import math

import torch

from fusion_attention.kv import RowView


def load(view: RowView, tail: RowView | None, b: int, heads: int, rows: slice) -> torch.Tensor:
    """Rows of sequence b as float32 [heads, rows, dim], the tail's elements behind the view's own."""
    source = view.sequence(b, heads, rows.stop)[:, rows]
    if tail is None:
        return torch.empty(source.shape, dtype=torch.float32).copy_(source)
    return torch.cat((source.float(), tail.sequence(b, heads, rows.stop)[:, rows].float()), dim=-1)


def store(view: RowView, tail: RowView | None, b: int, rows: slice, values: torch.Tensor) -> None:
    """Writes float32 values [heads, rows, dim] back to the view and its tail, rounded once."""
    heads = values.shape[0]
    view.sequence(b, heads, rows.stop)[:, rows].copy_(values[..., : view.dim])
    if tail is not None:
        tail.sequence(b, heads, rows.stop)[:, rows].copy_(values[..., view.dim :])


def is_finite(panel: torch.Tensor) -> bool:
    """False if anything in the panel is not finite. An overflowing sum says False too, which only costs time."""
    return math.isfinite(panel.sum().item())


def multiply(weights: torch.Tensor, panel: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """weights [n, rows, keys] @ panel [n, keys, dim], in which only live pairs (row, key) take part.

    weights are 0 where a pair is not live, which is enough unless the panel holds inf or NaN: 0 * NaN is NaN. live
    None says that all pairs are live, or that the panel is finite.
    """
    if live is None:
        return torch.bmm(weights, panel)
    usual = torch.bmm(weights, torch.where(panel.isfinite(), panel, 0.0))
    bad = (~panel.isfinite()).any(-1).any(0).nonzero()[:, 0]
    return usual + _unusual(weights[..., bad], panel[:, bad], live[..., bad])


def _unusual(weights: torch.Tensor, panel: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """What the non-finite elements of the panel add to the product over live pairs: 0, inf, -inf or NaN.

    Counted with matmuls of indicators, so that a panel full of NaN takes no more memory than one of numbers. A
    weight that is NaN needs no care here: the finite part of the product shows it.
    """

    def count(pairs: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
        return torch.bmm(pairs.float(), elements.float())

    up, down = panel == math.inf, panel == -math.inf
    plus, minus = weights > 0, weights < 0
    rising = count(plus, up) + count(minus, down)
    falling = count(plus, down) + count(minus, up)
    undefined = count(live, panel.isnan()) + count(live & (weights == 0), up | down)
    signs = ((rising, math.inf), (falling, -math.inf), (undefined, math.nan))
    return torch.stack([torch.where(found > 0, value, 0.0) for found, value in signs]).sum(0)
