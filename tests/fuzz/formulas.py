"""Attention by its formulas in float64, with the largest error that rounding may cause in every element.

    s = scale * q . k + bias;  P = count * exp(s - max) / (sum count * exp(s - max) + exp(sink - max))
    out = (P * keep) v;  dV = (P * keep)^T dY;  dP = keep * dY v^T;  dS = P * (dP - dY . out)
    dQ = scale * dS k;  dK = scale * dS^T q

Errors are the same sums over absolute terms: a sum of n float32 terms has an error of at most n * U times that sum,
2^x one of EXP; a program may round P and dS of bfloat16 inputs to bfloat16 once (ruling 10 of docs/rulings.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

Tensor = torch.Tensor
U = 2.0**-24  # half a unit of float32's last place
EXP = 2e-7  # relative error of 2^x, as csrc/simd/vec_*.h state it
TINY = 2.0**-126  # smaller numbers may be flushed to zero
LEAST = 2.0**-102  # smaller weights, relative to the largest, may be zero (docs/accuracy.md)
HALF = {torch.float32: U, torch.float64: U, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: TINY, torch.float64: TINY, torch.bfloat16: TINY, torch.float16: 2.0**-25}


def narrowing(dtype: torch.dtype) -> float:
    """Returns the relative error of rounding P and dS once before the second product (ruling 10)."""
    return HALF[dtype] if dtype == torch.bfloat16 else 0.0


def rounding(value: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the error of a result after it is rounded to dtype."""
    return error + (value.abs() + error) * HALF[dtype] + SMALLEST[dtype]


def vanishing(p: Tensor, count: Tensor) -> Tensor:
    """Returns the weights that are so small that a program may replace them by 0, and 0 elsewhere."""
    return torch.where(p < 2 * LEAST * count.clamp(min=1), p, 0.0)


def zeroed(rows: Tensor, used: Tensor) -> Tensor:
    """Replaces rows that are not used by zeros, because they may contain NaN."""
    return torch.where(used[..., None], rows, 0.0)


@dataclass
class Rows:
    """One sequence: q [N, R, D], k [N, K, D], v [N, K, Dv] (key heads repeated); count [N, R, K]: how often a row
    counts a key; bias, keep (0 or 1 / keep_prob) [N, R, K]; sink [N]; mean [N, R]: empty rows that return v's mean.

    blur: additional error of scores; spill: additional error of out (caches of integers).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    count: Tensor
    dtype: torch.dtype
    bias: Tensor | None = None
    keep: Tensor | None = None
    sink: Tensor | None = None
    mean: Tensor | None = None
    blur: Tensor | float = 0.0
    spill: Tensor | float = 0.0

    def __post_init__(self) -> None:
        self.mean = torch.zeros(self.count.shape[:2], dtype=torch.bool) if self.mean is None else self.mean
        visible = self.count > 0
        bias = 0.0 if self.bias is None else torch.where(visible, self.bias, 0.0)
        hidden = visible & (torch.as_tensor(bias) == -torch.inf)  # a score of -inf is a key that is not seen
        self.count = torch.where(hidden, 0, self.count)
        self.visible = self.count > 0
        self.added = torch.where(hidden, 0.0, bias) if self.bias is not None else torch.zeros(())
        used = self.visible.any(1)
        self.k, self.v = zeroed(self.k, used), zeroed(self.v, used | self.mean.any(1)[:, None])
        self.kept_scale = torch.ones(()).double() if self.keep is None else self.keep

    @cached_property
    def scores(self) -> Tensor:
        return self.scale * (self.q @ self.k.mT) + self.added

    @cached_property
    def score_error(self) -> Tensor:
        """Error of scores: products and sums in float32, the scale, the bias, and the conversion to powers of two."""
        terms = abs(self.scale) * (self.q.abs() @ self.k.abs().mT) + self.added.abs()
        return (self.q.shape[-1] + 8) * U * terms + self.blur + 4 * U * self.scores.abs()

    @cached_property
    def max(self) -> Tensor:
        top = self.scores.masked_fill(~self.visible, -torch.inf)
        peak = top.amax(-1) if top.shape[-1] else top.new_full(top.shape[:2], -torch.inf)
        return peak if self.sink is None else torch.maximum(peak, self.sink[:, None].expand_as(peak))

    @cached_property
    def max_error(self) -> Tensor:
        """Largest error [N, R] of a visible score."""
        errors = self.score_error.masked_fill(~self.visible, 0.0)
        largest = errors.amax(-1) if errors.shape[-1] else errors.new_zeros(errors.shape[:2])
        return largest + 4 * U * (0.0 if self.sink is None else self.sink.abs()[:, None])

    @cached_property
    def empty(self) -> Tensor:
        """Bool [N, R]: rows that see no key."""
        return ~self.visible.any(-1)

    @cached_property
    def sum(self) -> Tensor:
        total = self._exp(self.max).sum(-1)
        return total if self.sink is None else total + (self.sink[:, None] - self.max).exp()

    @cached_property
    def sum_error(self) -> Tensor:
        return self.sum * (torch.expm1(2 * self.max_error) + (self.count.shape[-1] + 8) * U + EXP)

    @cached_property
    def lse(self) -> Tensor:
        return torch.where(self.sum > 0, self.max + self.sum.log(), -torch.inf)

    @cached_property
    def lse_error(self) -> Tensor:
        return (
            self.max_error + (self.count.shape[-1] + 8) * U + EXP + 8 * U * self.max.nan_to_num(0, 0, 0).abs() + 8 * U
        )

    def _exp(self, peak: Tensor) -> Tensor:
        peak = peak.masked_fill(~peak.isfinite(), 0.0)[..., None]
        return torch.where(self.visible, self.count * (self.scores - peak).masked_fill(~self.visible, 0).exp(), 0.0)

    @cached_property
    def weights(self) -> Tensor:
        """Probabilities P; 1 / n in empty rows that return the mean of v."""
        weights = self._exp(self.max) / torch.where(self.sum > 0, self.sum, 1.0)[..., None]
        return torch.where(self.mean[..., None], 1.0 / max(self.count.shape[-1], 1), weights)

    @cached_property
    def weight_error(self) -> Tensor:
        """Absolute error of P before rounding to the dtype, at most 1 (times its count)."""
        shift = (self.score_error + self.max_error[..., None]).clamp(max=50.0)
        relative = torch.expm1(shift) + (self.count.shape[-1] + 8) * U + 2 * EXP
        off = torch.minimum(self.weights * relative, self.count.clamp(min=1).double())
        off = off + vanishing(self.weights, self.count) + TINY
        return torch.where(self.visible | self.mean[..., None], off, 0.0)

    @cached_property
    def out(self) -> Tensor:
        return (self.weights * self.kept_scale) @ self.v

    @cached_property
    def out_error(self) -> Tensor:
        off = self.weight_error + (narrowing(self.dtype) + 8 * U) * (self.weights + self.weight_error)
        flushed = TINY * (self.visible | self.mean[..., None]) * self.kept_scale  # a product that is no normal number
        return (off * self.kept_scale) @ self.v.abs() + flushed.sum(-1, keepdim=True) + self.spill

    @property
    def stored_error(self) -> Tensor:
        """Error of out after rounding to its dtype."""
        return rounding(self.out, self.out_error, self.dtype)

    def saved(self, out: Tensor, max_: Tensor, sum_: Tensor, dy: Tensor) -> Slopes:
        """Returns derivatives computed from the saved results of a forward: out [N, R, Dv], max and sum [N, R]."""
        peak = torch.where(self.empty, 0.0, max_)
        total = torch.where(sum_ > 0, sum_, 1.0)
        weights = self._exp(peak) / total[..., None]
        p = torch.where(self.mean[..., None], 1.0 / max(self.count.shape[-1], 1), weights)
        shift = self.score_error + 4 * U * (peak.abs() + total.log().abs())[..., None]
        error = p * (torch.expm1(shift.clamp(max=50.0)) + 2 * EXP + 16 * U) + vanishing(p, self.count) + TINY
        visible = self.visible | self.mean[..., None]
        sink = None if self.sink is None else torch.where(sum_ > 0, (self.sink[:, None] - max_).exp() / total, 0.0)
        return Slopes(self, p, torch.where(visible, error, 0.0), out, torch.zeros_like(out), dy, sink)

    def slopes(self, dy: Tensor) -> Slopes:
        """Returns derivatives by the exact P, with the rounded out that a program stores."""
        sink = None
        if self.sink is not None:
            sink = torch.where(self.sum > 0, (self.sink[:, None] - self.max).exp() / self.sum, 0.0)
        return Slopes(self, self.weights, 2 * self.weight_error, self.out, self.stored_error, dy, sink)


@dataclass
class Slopes:
    """Gradients of one sequence from P and out, each with its error."""

    rows: Rows
    p: Tensor
    p_error: Tensor
    out: Tensor
    out_error: Tensor
    dy: Tensor
    p_sink: Tensor | None

    def __post_init__(self) -> None:
        r, dy = self.rows, self.dy
        n = dy.shape[-1] + 4
        self.delta = (dy * self.out).sum(-1, keepdim=True)
        self.delta_error = (dy.abs() * (self.out_error + n * U * self.out.abs())).sum(-1, keepdim=True)
        dp = (dy @ r.v.mT) * r.kept_scale
        dp_error = n * U * (dy.abs() @ r.v.abs().mT) * r.kept_scale
        inner, inner_error = dp - self.delta, dp_error + self.delta_error
        alive = r.visible & ~r.empty[..., None]
        self.ds = torch.where(alive, self.p * inner, 0.0)
        off = self.p * inner_error + self.p_error * (inner.abs() + inner_error)
        self.ds_error = torch.where(alive, off + (narrowing(r.dtype) + 8 * U) * (self.ds.abs() + off) + TINY, 0.0)

    def dq(self) -> tuple[Tensor, Tensor]:
        r = self.rows
        off = self.ds_error + (self.ds.shape[-1] + 4) * U * self.ds.abs()
        return r.scale * (self.ds @ r.k), abs(r.scale) * (off @ r.k.abs() + self.ds.shape[-1] * TINY)

    def dk(self, heads: int) -> tuple[Tensor, Tensor]:
        """Returns dk and its error, summed over the query heads of each key head."""
        r = self.rows
        off = self.ds_error + self._rows(heads) * U * self.ds.abs()
        error = off.mT @ r.q.abs() + self._rows(heads) * TINY
        return grouped(r.scale * (self.ds.mT @ r.q), heads), grouped(abs(r.scale) * error, heads)

    def dv(self, heads: int) -> tuple[Tensor, Tensor]:
        r = self.rows
        p, off = self.p * r.kept_scale, self.p_error * r.kept_scale
        off = off + (narrowing(r.dtype) + 8 * U) * (p + off) + self._rows(heads) * U * p
        flushed = (
            TINY * torch.ones_like(p) * r.kept_scale
        )  # products that are no normal numbers, before they are divided
        error = grouped(off.mT @ self.dy.abs() + flushed.sum(1)[..., None], heads)
        if bool(r.mean.any()):  # added to what is stored of the other rows: one more rounding
            others = grouped(torch.where(r.mean[..., None], 0.0, p).mT @ self.dy, heads)
            error = error + HALF[r.dtype] * (others.abs() + error)
        return grouped(p.mT @ self.dy, heads), error

    def dsink(self) -> tuple[Tensor, Tensor]:
        """Returns dsink [N] = -sum over rows of D * p_sink, and its error."""
        assert self.p_sink is not None
        each = self.delta[..., 0] * self.p_sink
        relative = torch.expm1(2 * self.rows.max_error) + (sum(self.p.shape[1:]) + 16) * U + 2 * EXP
        off = self.delta_error[..., 0] * self.p_sink * (1 + relative) + each.abs() * relative + TINY
        return -each.sum(-1), off.sum(-1)

    def _rows(self, heads: int) -> int:
        """Returns the number of terms in the sum for a key."""
        return self.p.shape[1] * (self.p.shape[0] // max(heads, 1)) + 4


def grouped(by_head: Tensor, heads: int) -> Tensor:
    """Returns [heads, ..]: sums over the query heads that share a key head."""
    return by_head.unflatten(0, (heads, -1)).sum(1)


# -------------------------------------------------------------------------------------------------------------- dropout

_LOW = np.uint64(0xFFFFFFFF)


def philox(counter: tuple[np.ndarray, ...], seed: int) -> np.ndarray:
    """Returns words [.., 4] of Philox4x32-7 for counters of four words."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) & _LOW for c in np.broadcast_arrays(*counter))
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)
    for _ in range(7):
        left, right = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = right >> np.uint64(32) ^ c1 ^ k0, right & _LOW, left >> np.uint64(32) ^ c3 ^ k1, left & _LOW
        k0, k1 = k0 + np.uint64(0x9E3779B9) & _LOW, k1 + np.uint64(0xBB67AE85) & _LOW
    return np.stack((c0, c1, c2, c3), -1)


def drawn_bits(seed: int, offset: int, keep_prob: float, stream: int, shape: tuple[int, int, int]) -> Tensor:
    """Returns dropout bits [heads, rows, keys] drawn by ruling 9; stream: sequence * heads."""
    heads, rows, keys = shape
    counter = (np.arange(-(-keys // 8)), np.arange(rows)[:, None], stream + np.arange(heads)[:, None, None], offset)
    words = philox(tuple(np.asarray(c) for c in counter), seed)
    halves = np.stack((words & np.uint64(0xFFFF), words >> np.uint64(16)), -1).reshape(heads, rows, -(-keys // 8) * 8)
    return torch.from_numpy((halves[..., :keys] < round(65536 * keep_prob)).astype(np.float64))


def given_bits(bits: np.ndarray, first: int, shape: tuple[int, int, int]) -> Tensor:
    """Returns dropout bits [heads, rows, keys] from packed bytes, lowest bit first, starting at bit `first`."""
    flat = np.unpackbits(bits, bitorder="little")[first : first + int(np.prod(shape))]
    return torch.from_numpy(flat.reshape(shape).astype(np.float64))
