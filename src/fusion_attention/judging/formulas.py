"""Computes attention and its gradients of a range of heads, queries and keys, in float64, or as a baseline program.

A baseline program computes in float32 and rounds weights and results to the call's dtype. One of CANN's accuracy
standards compares a result's errors with a baseline's. Tests compare these formulas with the back end golden.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_attention.backends.golden.attention import weighted_sum
from fusion_attention.judging.editable_call import Block

Tensor = torch.Tensor
_INF = math.inf


@dataclass(frozen=True)
class Precision:
    """The dtypes of a program: of its products and sums, and of its rounded weights and results."""

    dtype: torch.dtype = torch.float64  # dtype of products and sums
    low: torch.dtype | None = None  # dtype to which weights and results are rounded; None: no rounding

    def narrow(self, weights: Tensor) -> Tensor:
        """Returns attention weights, rounded to bfloat16 if `low` is that, as before the product with V."""
        return weights.to(self.low).to(self.dtype) if self.low == torch.bfloat16 else weights

    def stored(self, values: Tensor) -> Tensor:
        """Rounds the values of a result to the dtype in which the program returns it."""
        return values if self.low is None else values.to(self.low)


GOLDEN = Precision()


def baseline(dtype: torch.dtype) -> Precision:
    """Returns the dtypes of a program that computes in float32 and rounds weights and results to `dtype`."""
    return Precision(torch.float64 if dtype == torch.float64 else torch.float32, dtype)


@dataclass(frozen=True, eq=False)
class Softmax:
    """The softmax weights [heads, rows, keys] of a part of a call, with the values that they were computed from."""

    shown: Tensor  # scores, -inf for an invisible key
    product: Tensor | None  # scores before bias and softcap; None: equal to shown
    slope: Tensor | float  # derivative of the capped score by the product
    # top, total: maximum of the scores and sum of the weights, [heads, rows, 1].
    top: Tensor
    total: Tensor
    keyless: Tensor  # bool, true for rows without a key
    # exp(score - max), before the division by total and before dropout; 1 for rows that return V's mean.
    weights: Tensor
    live: Tensor  # bool, true for pairs with a weight, before dropout
    softmax: Tensor  # bool, true for pairs whose weight depends on the score; not for rows that return V's mean
    mean: Tensor  # bool, true for rows that return the mean of V


def narrowed(block: Block, precision: Precision) -> Block:
    """Converts the tensors of a block (a part of an attention call) to the dtype in which `precision` computes."""

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(precision.dtype)
        return tuple(map(cast, value)) if isinstance(value, tuple) else value

    if precision.dtype == torch.float64:
        return block
    names = ("q", "k", "v", "q_rope", "k_rope", "scores_by", "bias", "times", "sink", "weight_scale", "out_scale")
    return replace(block, saved=cast(block.saved), **{name: cast(getattr(block, name)) for name in names})


def scores_of(x: Block) -> tuple[Tensor, Tensor | None, Tensor | float]:
    """Returns (scores, scores before softcap and bias, derivative of the softcap) of block x, all [heads, rows, keys].
    Scores are -inf for an invisible key. Without bias and cap the second is None; without a cap the third is 1."""
    result = x.q @ x.k.mT
    if x.q_rope is not None and x.k_rope is not None:
        result = result + x.q_rope @ x.k_rope.mT
    result = result * x.scores_by
    product = result if x.bias is not None or x.softcap else None
    slope: Tensor | float = 1.0
    if x.bias is not None and x.bias_capped:
        result = result + x.bias
    if x.softcap:
        tanh = (result / x.softcap).tanh()
        result, slope = x.softcap * tanh, 1 - tanh * tanh
    if x.bias is not None and not x.bias_capped:
        result = result + x.bias
    return result.masked_fill(~x.visible, -_INF), product, slope


def softmax(x: Block) -> Softmax:
    """Computes the softmax weights of block x (ranges of heads, queries and keys), with max and sum."""
    scores, product, slope = scores_of(x)
    shape = (*scores.shape[:2], 1)
    sink = scores.new_full(shape, -_INF) if x.sink is None else x.sink[:, None, None].expand(shape)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink) if scores.shape[-1] else sink
    empty = top == -_INF
    live = scores != -_INF
    live &= ~empty
    weights = scores.sub(top.masked_fill(empty, 0)).exp_()
    if x.times is not None:
        weights = weights * x.times
    tail = (sink - top.masked_fill(empty, 0)).exp()
    divided = weights * x.keep if x.dropped_divisor and x.keep is not None else weights
    total = divided.sum(-1, keepdim=True) + tail
    form = x.problem.empty_rows
    means = torch.full_like(x.in_band, form == "mean") if form != "mean_in_band" else x.in_band
    total = total.where(~empty, (means * x.kv_len)[:, None].to(total))
    return _with_means(x, Softmax(scores, product, slope, top, total, empty, weights, live, live, empty))


def saved_softmax(x: Block) -> Softmax:
    """Computes the softmax probabilities of block x (ranges of heads, queries and keys) from the max and sum that a
    forward saved."""
    scores, product, slope = scores_of(x)
    _, _, top, total = x.saved
    empty = top == -_INF
    live = (scores != -_INF) & ~empty
    weights = (scores - top.masked_fill(empty, 0)).exp()
    if x.times is not None:
        weights = weights * x.times
    result = _with_means(x, Softmax(scores, product, slope, top, total, empty, weights, live, live, empty))
    weights = result.weights / total.where(total != 0, 1.0)
    return replace(result, weights=weights.masked_fill(~result.live, 0))


def _with_means(x: Block, s: Softmax) -> Softmax:
    """Sets the weights `s` to 1 in rows without visible keys that return the mean of V; with x.weight_scale, replaces
    all weights w by the int8 integers round(weight_scale * w)."""
    mean = s.keyless & (s.total > 0)
    weights, live = s.weights, s.live
    if mean.any():
        weights, live = weights.where(~mean, 1.0), live | mean
    if x.weight_scale is not None:
        weights = (x.weight_scale * weights).round().clamp(-128, 127)
    return replace(s, weights=weights, live=live, mean=mean)


def forward(x: Block, p: Precision = GOLDEN, s: Softmax | None = None) -> dict[str, Tensor]:
    """Returns out [heads, rows, dim_v], and max and sum [heads, rows, 1], of block x, computed in precision p. s: the
    block's softmax, if the caller has it. For a quantised output, "unscaled" is out before the scale."""
    x = narrowed(x, p)
    s = softmax(x) if s is None else s
    weights, live = p.narrow(s.weights), s.live
    if x.keep is not None:
        weights, live = weights * x.keep_factor, live & x.keep
    out = _summed(weights, live, x.v) / s.total.where(s.total != 0, 1.0)
    results = {"out": _returned(x, out, p), "max": s.top, "sum": s.total}
    return results if x.out_scale is None else results | {"unscaled": out}


def _summed(weights: Tensor, live: Tensor, values: Tensor) -> Tensor:
    if values.isfinite().all():
        return weights.masked_fill(~live, 0) @ values
    return weighted_sum(weights, live, values.expand(len(weights), -1, -1))


def _returned(x: Block, out: Tensor, p: Precision) -> Tensor:
    if x.out_scale is None:
        return p.stored(out)
    scale, offset = x.out_scale
    out = out * scale
    if offset is not None:
        out = out + offset
    if p.low is None:
        return out.clamp(-128, 127)  # before rounding: near the middle of two integers both are correct
    rounded = out.round() if x.problem.out_quant == "tensor" else (out + 0.5 * out.sign()).trunc()
    return rounded.clamp(-128, 127).nan_to_num(0.0)


@dataclass(frozen=True, eq=False)
class Scored:
    """Gradients of the scores of a part of a call, [heads, rows, keys], and the values that they were computed from."""

    softmax: Softmax  # the weights P
    dscores: Tensor  # dS = P (dP - delta), before the multiplication by the softcap's derivative
    dx: Tensor  # dS after it
    upstream: Tensor  # dP
    delta: Tensor  # dout . out, minus the gradient of lse, [heads, rows, 1]
    dropped_weights: Tensor  # P after dropout


def scored(x: Block, p: Precision = GOLDEN) -> Scored:
    """Computes dS = P (dP - delta), dP = dout . v, delta = dout . out - dlse, of block x from the forward's saved
    statistics and output, in precision p."""
    s = saved_softmax(x)
    s = s if x.sloped else replace(s, slope=1.0)
    dout, out = x.saved[:2]
    dropped_weights = s.weights if x.keep is None else (s.weights * x.keep_factor).masked_fill(~x.keep, 0)
    upstream = dout @ x.v.mT
    if x.keep is not None:
        upstream = (upstream * x.keep_factor).masked_fill(~x.keep, 0)  # 0 times NaN is NaN
    delta = (dout * out).sum(-1, keepdim=True)
    delta = delta if x.dlse is None else delta - x.dlse
    dscores = (s.weights * (upstream - x.delta_by * delta if x.delta_by else upstream)).masked_fill(~s.softmax, 0)
    return Scored(s, dscores, p.narrow(dscores * s.slope), upstream, delta, dropped_weights)


# The kinds of gradients.
GRADIENTS = ("dq", "dk", "dv", "dq_rope", "dk_rope", "dsink")


def gradients(
    x: Block, p: Precision = GOLDEN, g: Scored | None = None, kinds: Collection[str] = GRADIENTS
) -> dict[str, Tensor]:
    """Returns a block's contributions to the gradients `kinds`, by query head: dq [heads, rows, elements], dk and dv
    [heads, keys, elements], dsink [heads], not rounded. g: the gradients of the scores, if the caller has them."""
    x = narrowed(x, p)
    g = scored(x, p) if g is None else g
    dout, visible = x.saved[0], g.softmax.softmax
    scale = x.scores_by if x.gradient_scale is None else x.gradient_scale
    results, dx = {}, _counted(x, g.dx)
    if "dv" in kinds:
        live = g.softmax.live if x.keep is None else g.softmax.live & x.keep
        dropped_weights = _counted(x, p.narrow(g.dropped_weights))
        results["dv"] = _summed(dropped_weights.mT, live.mT, x.summed.get("dv", dout))
    for name, q, k in (("", x.q, x.k), ("_rope", x.q_rope, x.k_rope)):
        if q is not None and k is not None:
            if f"dq{name}" in kinds:
                results[f"dq{name}"] = scale * _summed(dx, visible, x.summed.get(f"dq{name}", k))
            if f"dk{name}" in kinds:
                results[f"dk{name}"] = _summed((scale * dx).mT, visible.mT, x.summed.get(f"dk{name}", q))
    if x.sink is not None and "dsink" in kinds:
        results["dsink"] = -(g.delta * at_sink(x, g.softmax)).sum((1, 2))
    return results


def _counted(x: Block, pairs: Tensor) -> Tensor:
    return pairs if x.counted is None else pairs * x.counted


def at_sink(x: Block, s: Softmax) -> Tensor:
    """Returns the probability [heads, rows, 1] that the softmax `s` of block x gives to the attention sink."""
    assert x.sink is not None
    result = (x.sink[:, None, None] - s.top.masked_fill(s.keyless, 0)).exp() / s.total.where(s.total != 0, 1.0)
    return result.masked_fill(s.keyless, 0)
