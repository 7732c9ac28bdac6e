"""Merging of partial results: attention over some keys and attention over other keys give attention over both.

    m    = max(m1, m2),   w_i = s_i * exp(m_i - m)
    out  = (w1 * out1 + w2 * out2) / (w1 + w2),   max = m,   sum = w1 + w2

In float32, into the first of the two. A row that saw no key (max = -inf) weighs nothing beside one that saw some; of
two such rows each weighs its sum: nothing in zero form, its number of keys in mean form: their mean is that of all.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# What a part weighs at least that saw keys: an infinite value that a row sees reaches its result, however small the
# weight. Beside the row's largest weight, which is 1 or more, it is no bit of any finite sum.
_LEAST = torch.finfo(torch.float32).smallest_normal


class Partial(NamedTuple):
    """Attention of rows to some of their keys: out [..., dim_v] float32, divided by its sum; max and sum [...] float32,
    as Stats are."""

    out: torch.Tensor
    max: torch.Tensor
    sum: torch.Tensor


def merge(into: Partial, more: Partial) -> None:
    """Makes `into` the attention to the keys of both."""
    top = torch.maximum(into.max, more.max)  # NaN where either is
    ours, theirs = (_weight(partial, top) for partial in (into, more))
    total = ours + theirs
    divisor = total.where(total != 0, 1.0)
    # Select before multiply: what weighs nothing, a mean beside a row with keys, may not be finite.
    into.out.masked_fill_((ours == 0)[..., None], 0.0).mul_((ours / divisor)[..., None])
    into.out.add_(more.out.masked_fill((theirs == 0)[..., None], 0.0).mul_((theirs / divisor)[..., None]))
    into.max.copy_(top)
    into.sum.copy_(total)


def join_sink(into: Partial, sink: torch.Tensor) -> None:
    """One more logit per head [heads] in the denominator of rows [..., heads]: a key without a value."""
    peak = sink.float().expand_as(into.max)
    one = torch.ones_like(into.sum).where(peak != -math.inf, 0.0)
    merge(into, Partial(torch.zeros_like(into.out[..., :1]).expand_as(into.out), peak, one))


def empty_partial(like: torch.Tensor, shape: tuple[int, ...], dim: int) -> Partial:
    """Rows that have met no key."""
    stats = like.new_zeros(shape, dtype=torch.float32)
    return Partial(like.new_zeros((*shape, dim), dtype=torch.float32), stats - math.inf, stats)


def _weight(partial: Partial, top: torch.Tensor) -> torch.Tensor:
    # Equal maxima first: the difference of two infinities is no number.
    weight = partial.sum * torch.where(partial.max == top, 0.0, partial.max - top).exp()
    return weight.where((partial.sum == 0) | (partial.max == -math.inf), weight.clamp(min=_LEAST))
