"""The formulas of attention on one block, in any precision: golden's in float64, a plain program's, a poor program's.

A plain program computes in float32 and rounds weights and results to the call's dtype; a poor one rounds everything
it computes to 16 bits, every product and every sum. Equality with the golden back end is tested. Knows one block at a
time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_attention.backends.golden.attention import weighted_sum
from fusion_attention.judging.setting import Block

Tensor = torch.Tensor
_INF = math.inf


@dataclass(frozen=True)
class Precision:
    """In what is computed.

    Attributes:
        wide: of products and sums. low: what weights and results are rounded to; None: not at all.
        poor: what scores and running sums are rounded to; None: nothing is.
    """

    wide: torch.dtype = torch.float64
    low: torch.dtype | None = None
    poor: torch.dtype | None = None

    def narrow(self, weights: Tensor) -> Tensor:
        """Weights as the second product takes them."""
        if self.poor is not None:
            return weights.to(self.poor).to(self.wide)
        return weights.to(self.low).to(self.wide) if self.low == torch.bfloat16 else weights

    def rounded(self, values: Tensor) -> Tensor:
        """What a poor program keeps of a value on its way."""
        return values if self.poor is None else values.to(self.poor).to(self.wide)

    def stored(self, values: Tensor) -> Tensor:
        """A result as it is returned."""
        return values if self.low is None else values.to(self.low)


GOLDEN = Precision()


def plain(dtype: torch.dtype) -> Precision:
    """What results of a dtype are measured by."""
    return Precision(torch.float64 if dtype == torch.float64 else torch.float32, dtype)


def poor(dtype: torch.dtype) -> Precision:
    """What merely noisy results are measured by: 16 bits throughout."""
    return Precision(torch.float32, dtype, torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)


def narrowed(block: Block, precision: Precision) -> Block:
    """The block's tensors in the precision's wide dtype."""

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(precision.wide)
        return tuple(map(cast, value)) if isinstance(value, tuple) else value

    if precision.wide == torch.float64:
        return block
    names = ("q", "k", "v", "q_rope", "k_rope", "scores_by", "bias", "times", "sink", "weight_scale", "out_scale")
    return replace(block, saved=cast(block.saved), **{name: cast(getattr(block, name)) for name in names})


def scores_of(x: Block, p: Precision) -> tuple[Tensor, Tensor | float]:
    """(scores [heads, rows, keys], -inf where a key is not seen; their slope by the capped product)."""
    found = x.q @ x.k.mT
    if x.q_rope is not None and x.k_rope is not None:
        found = found + x.q_rope @ x.k_rope.mT
    found = p.rounded(found * x.scores_by)
    slope: Tensor | float = 1.0
    if x.bias is not None and x.bias_capped:
        found = found + x.bias
    if x.softcap:
        part = (found / x.softcap).tanh()
        found, slope = x.softcap * part, 1 - part * part
    if x.bias is not None and not x.bias_capped:
        found = p.rounded(found + x.bias)
    return found.masked_fill_(~x.seen, -_INF), slope


def forward(x: Block, p: Precision = GOLDEN) -> dict[str, Tensor]:
    """out [heads, rows, dim_v], and max and sum [heads, rows, 1] as the waist has them."""
    x = narrowed(x, p)
    scores, _ = scores_of(x, p)
    shape = (*scores.shape[:2], 1)
    sink = scores.new_full(shape, -_INF) if x.sink is None else x.sink[:, None, None].expand(shape)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink) if scores.shape[-1] else sink
    empty = top == -_INF
    live = scores != -_INF
    live &= ~empty
    weights = scores.sub_(top.masked_fill(empty, 0)).exp_()
    if x.times is not None:
        weights = weights * x.times
    tail = (sink - top.masked_fill(empty, 0)).exp()
    divided = weights * x.keep if x.dropped_divisor and x.keep is not None else weights
    total = p.rounded(divided.sum(-1, keepdim=True) + tail)
    form = x.problem.empty_rows
    means = torch.full_like(x.in_band, form == "mean") if form != "mean_in_band" else x.in_band
    total = total.where(~empty, (means * x.kv_len)[:, None].to(total))
    mean = empty & (total > 0)
    if mean.any():
        weights, live = weights.where(~mean, 1.0), live | mean
    if x.weight_scale is not None:
        weights = (x.weight_scale * weights).round().clamp(-128, 127)
    weights = p.narrow(weights)
    if x.keep is not None:
        weights, live = weights * x.keep_factor, live & x.keep
    out = _summed(weights, live, x.v, p) / total.where(total != 0, 1.0)
    return {"out": _returned(x, out, p), "max": top, "sum": total}


def _added(weights: Tensor, values: Tensor, p: Precision) -> Tensor:
    """weights @ values, of a poor program with sums that are rounded on their way."""
    if p.poor is None:
        return weights @ values
    return _summed(weights, torch.ones_like(weights, dtype=torch.bool), values, p)


def _summed(weights: Tensor, live: Tensor, values: Tensor, p: Precision) -> Tensor:
    if p.poor is None:
        if values.isfinite().all():
            return weights.masked_fill(~live, 0) @ values
        return weighted_sum(weights, live, values.expand(len(weights), -1, -1))
    total = weights.new_zeros(*weights.shape[:2], values.shape[-1])
    weights = weights.masked_fill(~live, 0)
    values = values.nan_to_num(0.0)
    for key in range(values.shape[1]):
        total = p.rounded(total + p.rounded(weights[..., key, None] * values[:, None, key]))
    return total


def _returned(x: Block, out: Tensor, p: Precision) -> Tensor:
    if x.out_scale is None:
        return p.stored(out)
    scale, offset = x.out_scale
    out = out * scale
    if offset is not None:
        out = out + offset
    rounded = out.round() if x.problem.out_quant == "tensor" else (out + 0.5 * out.sign()).trunc()
    return rounded.clamp(-128, 127).nan_to_num(0.0)


def gradients(x: Block, p: Precision = GOLDEN) -> dict[str, Tensor]:
    """What the block adds to the gradients: dq [heads, rows, ..], and dk, dv [heads, keys, ..], by query head; from
    the saved statistics and the saved output, not rounded where sums go on."""
    x = narrowed(x, p)
    scores, slope = scores_of(x, p)
    dout, out, top, total = x.saved
    empty = top == -_INF
    softmax = (scores != -_INF) & ~empty
    mean = empty & (total > 0)
    weights = (scores - top.masked_fill(empty, 0)).exp()
    if x.times is not None:
        weights = weights * x.times
    probabilities = weights.where(~mean, 1.0) / total.where(total != 0, 1.0)
    live = softmax | mean
    probabilities = probabilities.masked_fill(~live, 0)
    kept = probabilities if x.keep is None else probabilities * x.keep * x.keep_factor
    upstream = dout @ x.v.mT
    if x.keep is not None:
        upstream = upstream * x.keep * x.keep_factor
    delta = (dout * out).sum(-1, keepdim=True)
    dscores = (probabilities * (upstream if x.no_delta else upstream - delta)).masked_fill(~softmax, 0)
    dx = p.narrow(dscores * slope)
    scale = x.scores_by if x.gradient_scale is None else x.gradient_scale
    found = {
        "dq": scale * _added(dx, x.k, p),
        "dk": _added((scale * dx).mT, x.q, p),
        "dv": _added(p.narrow(kept).mT, dout, p),
    }
    if x.q_rope is not None and x.k_rope is not None:
        found |= {"dq_rope": scale * _added(dx, x.k_rope, p), "dk_rope": _added((scale * dx).mT, x.q_rope, p)}
    if x.sink is not None:
        at_sink = (x.sink[:, None, None] - top.masked_fill(empty, 0)).exp() / total.where(total != 0, 1.0)
        found["dsink"] = -(delta * at_sink).masked_fill(empty, 0).sum((1, 2))
    return found
