"""Merging of partial results: attention over two disjoint sets of keys gives attention over their union.

    m    = max(m1, m2),   w_i = s_i * exp(m_i - m)
    out  = (w1 * out1 + w2 * out2) / (w1 + w2),   max = m,   sum = w1 + w2

Merging computes in float32 and overwrites the first partial result. A row without visible keys in one partial result
(max = -inf) has weight 0 there. If it has none in both, the sums are added: 0 if rows return zeros, the number of keys
if they return the mean of V, so that the merged row is the mean over all keys.
"""

import math
from typing import NamedTuple

import torch

# The smallest weight of a partial result with visible keys: weights do not underflow to 0, so an infinite value of V
# reaches the result. Finite sums do not change, since the largest weight of a row is at least 1.
_LEAST = torch.finfo(torch.float32).smallest_normal


class Partial(NamedTuple):
    """Attention of queries to a subset of keys, float32: normalized out [..., dim_v]; softmax max and sum [...]."""

    out: torch.Tensor
    max: torch.Tensor
    sum: torch.Tensor


def merge(into: Partial, more: Partial) -> None:
    """Merges two attention results over disjoint keys: `into` becomes the attention over the keys of both."""
    top = torch.maximum(into.max, more.max)  # NaN where either is
    ours, theirs = (_weight(partial, top) for partial in (into, more))
    total = ours + theirs
    divisor = total.where(total != 0, 1.0)
    # Select before multiply: a value of weight 0 may not be finite.
    into.out.masked_fill_((ours == 0)[..., None], 0.0).mul_((ours / divisor)[..., None])
    into.out.add_(more.out.masked_fill((theirs == 0)[..., None], 0.0).mul_((theirs / divisor)[..., None]))
    into.max.copy_(top)
    into.sum.copy_(total)


def join_sink(into: Partial, sink: torch.Tensor) -> None:
    """Adds the sink, a logit per head [heads], to the softmax denominators of `into` [.., heads], in place."""
    peak = sink.float().expand_as(into.max)
    one = torch.ones_like(into.sum).where(peak != -math.inf, 0.0)
    merge(into, Partial(torch.zeros_like(into.out[..., :1]).expand_as(into.out), peak, one))


def empty_partial(like: torch.Tensor, shape: tuple[int, ...], dim: int) -> Partial:
    """Returns the attention over no keys, on like's device: out [*shape, dim] 0, max [*shape] -inf, and sum 0."""
    stats = like.new_zeros(shape, dtype=torch.float32)
    return Partial(like.new_zeros((*shape, dim), dtype=torch.float32), stats - math.inf, stats)


def _weight(partial: Partial, top: torch.Tensor) -> torch.Tensor:
    # Equal maxima are tested first, because -inf - -inf is NaN.
    weight = partial.sum * torch.where(partial.max == top, 0.0, partial.max - top).exp()
    return weight.where((partial.sum == 0) | (partial.max == -math.inf), weight.clamp(min=_LEAST))
