"""Computes the expected size of a correct program's error, per element: variances of independent roundings, propagated.

docs/accuracy.md states the model and its formulas. All functions return variances: squares of expected sizes.

    u       half a unit in the last place of 1, 2^-8 for bfloat16: a stored x has variance (u 2^floor(log2 |x|))^2 / 3
    r       that variance relative to x^2, averaged over x between two powers of two: 3 / (8 log 2) * u^2 / 3
    a       u^2 / 3 of float32, the dtype of sums: a sum of n terms t has variance a * n * ((sum t)^2 / 3 + sum t^2),
            for any order of its terms
    e       relative variance of a weight exp(s - max), from the error of its score
    w       relative variance of a weight from rounding it to the dtype
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_attention.ir.problem import Problem
from fusion_attention.judging.editable_call import Block
from fusion_attention.judging.formulas import GRADIENTS, Scored, Softmax, at_sink

Tensor = torch.Tensor
FLOAT32 = 2.0**-48 / 3  # a
_UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
_BINADE = 3 / (8 * math.log(2))  # mean of (2^floor(log2 x) / x)^2 for x with evenly distributed logarithm
# Spacing of the smallest numbers. GPUs and bfloat16 instructions may flush subnormals of float32's range to 0: an error
# of up to 2^-126 in either direction.
_QUANTA = {torch.bfloat16: 2.0**-125, torch.float16: 2.0**-24, torch.float32: 2.0**-125, torch.float64: 0.0}
# A kernel may round a smaller weight to 0.
LEAST_WEIGHT = 2.0**-102
# A mistake explains an error only if at most this fraction of the error remains, also if the rest is within the bound.
LEFT = 0.25
# Variances of fewer pairs of row and key are computed in float64, where squares do not underflow or overflow.
_FEW = 1 << 18
_DIGITS = 2.0**-30 / 12  # variance of rounding to two digits of 8 bits, relative to the largest number squared
_SHORT = 32  # products_of_squares() is exact for shorter vectors


def rounding(dtype: torch.dtype) -> float:
    """Returns the relative variance of rounding to a dtype; 0 for integers, which are judged before rounding."""
    return _BINADE * _UNITS[dtype] ** 2 / 3 if dtype in _UNITS else 0.0


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the variance of each element's rounding error if `value` is stored in a dtype; 0 for integer dtypes."""
    if dtype not in _UNITS:
        return torch.zeros_like(value)
    mantissa, exponent = torch.frexp(value.double().nan_to_num(0.0, 0.0, 0.0))
    power = torch.ldexp(torch.ones_like(mantissa), exponent - 1).masked_fill(mantissa == 0, 0)
    return (power * (_UNITS[dtype] / math.sqrt(3))).square() + quantum(dtype)


def quantum(dtype: torch.dtype) -> float:
    """Returns the variance of the absolute error near 0: of rounding to the dtype's subnormal numbers, or of flushing
    them to zero."""
    return _QUANTA[dtype] ** 2 / 12 if dtype in _QUANTA else 0.0


def underflow(n: float | Tensor) -> Any:
    """Returns the variance of a sum of n products whose subnormal values are flushed to 0, all of one sign."""
    return n**2 * quantum(torch.float32)


@dataclass(frozen=True)
class Grade:
    """The precision of a class of programs: the steps after which they round to the call's dtype."""

    words: str  # description of results with this precision, for reports
    # True if the results of all steps are rounded to the dtype; False if only weights, gradients of scores and results
    # are.
    low: bool = False
    poor: bool = False  # True if running sums are rounded too

    def sums(self, dtype: torch.dtype) -> float:
        """Returns the relative variance of the rounding error of one addition to a running sum, in programs of this
        precision; dtype: that of q, k and v."""
        if dtype == torch.float64:
            return rounding(dtype)
        return rounding(torch.float16 if dtype == torch.float32 else dtype) if self.poor else FLOAT32

    def step(self, dtype: torch.dtype) -> float:
        """Returns the relative variance of rounding an intermediate value to `dtype`; 0 for programs that store it in
        float32."""
        if self.poor and dtype == torch.float32:
            return rounding(torch.float16)
        return rounding(dtype) if self.low else 0.0

    def weight(self, dtype: torch.dtype) -> float:
        """Returns the relative variance of rounding the softmax weights for their product with V; 0 for float32
        programs, which do not round them."""
        once = 0.0 if dtype in (torch.float32, torch.float64) else rounding(dtype)
        return once + 2 * self.step(dtype)

    def stored(self, value: Tensor, variance: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the `variance` of a result, increased by the variance of rounding `value` to its dtype, once; twice
        if the program rounds every step (low)."""
        return variance + (2 if self.low else 1) * stored(value, dtype)


KERNEL = Grade("as exact as a kernel that sums in float32")
PROGRAM = Grade("as exact as a program in the dtype", low=True)
POOR = Grade("as exact as a program that sums in 16 bits", low=True, poor=True)


def summed(value: Tensor, n: int, dtype: torch.dtype, grade: Grade) -> Tensor:
    """Returns the variance from rounding the running sum of n terms with the total `value`: a n value^2 / 3, a:
    relative variance of one addition's rounding, plus the rounding of the total in 16-bit programs. dtype: that of q, k
    and v; grade: the steps in which the program rounds."""
    return (grade.sums(dtype) * n / 3 + grade.step(dtype)) * value.nan_to_num(0.0, 0.0, 0.0).square()


def _squares(tensor: Tensor, error_dtype: torch.dtype) -> Tensor:
    return tensor.to(error_dtype).nan_to_num(0.0, 0.0, 0.0).square()


def _norm(tensor: Tensor, error_dtype: torch.dtype) -> Tensor:
    return _squares(tensor, error_dtype).sum(-1, keepdim=True)


def products_of_squares(one: Tensor, other: Tensor, error_dtype: torch.dtype) -> Tensor:
    """Returns [heads, rows, keys]: sum_d one^2 other^2, of queries (one) and keys (other), [heads, n, dim]. For long
    vectors in float32 it is estimated as |one|^2 |other|^2 / dim. error_dtype: dtype of the computation."""
    dim = one.shape[-1]
    if error_dtype == torch.float64 or dim < _SHORT:
        return _squares(one, error_dtype) @ _squares(other, error_dtype).mT
    return _norm(one, error_dtype) * _norm(other, error_dtype).mT / dim


def scores(x: Block, s: Softmax, grade: Grade, error_dtype: torch.dtype, *, exact: bool = False) -> Tensor | float:
    """Returns, in error_dtype, the variance of the rounding error of every score z of block x [heads, rows, keys], and
    so of log exp(z - max); s: the block's softmax.

    kernel    a * (n * (t^2 / 3 + Q) + 3 t^2 + 2 z^2 + 2 max^2 + (z - max)^2 + 8)      n = dim, t = scale * q . k
    program   plus r * (Q + 3 t^2 + 2 z^2 + (z - max)^2 + 4)                               Q = scale^2 * sum_d q^2 k^2

    a, r: relative variances of one addition and one rounding in the program; r is 0 for a kernel. If an upper bound for
    all pairs is below 2% of that of rounding weights, it is returned, unless `exact`.
    """
    p, dtype = x.problem, x.problem.torch_dtype
    a, r = grade.sums(dtype), grade.step(dtype)
    stores = _remade(p)
    n = 0 if p.has_weight_scale else p.dim_qk + p.dim_rope  # sums of int8 products are exact in float32
    by = torch.as_tensor(x.scores_by, dtype=error_dtype)
    q, k = (_norm(t, error_dtype) for t in (x.q, x.k))
    if x.q_rope is not None and x.k_rope is not None:
        q, k = q + _norm(x.q_rope, error_dtype), k + _norm(x.k_rope, error_dtype)
    top = s.top.to(error_dtype).masked_fill(~s.top.isfinite(), 0)
    bound = (by.square() * q).amax() * k.amax() / max(n, 1) if k.numel() and q.numel() else torch.zeros(())
    added = x.bias is not None or bool(x.softcap)
    if not (exact or added or p.has_weight_scale):
        most = n * bound  # |x| <= |q| |k|, and so are s and max
        largest = float(a * (n * (most / 3 + bound) + 11 * most + 8) + r * (bound + 9 * most + 4) + stores * bound)
        if largest < 0.02 * grade.weight(dtype):
            return largest
    shown = s.shown.to(error_dtype)
    shown = shown.masked_fill(~shown.isfinite(), 0)
    product = shown if s.product is None else s.product.to(error_dtype).nan_to_num(0.0, 0.0, 0.0)
    left = (shown - top).square_()
    product, shown = product.square(), shown.square()
    result = (a * n / 3 + 3 * a + 3 * r) * product + (2 * a + 2 * r) * shown + (a + r) * left
    squares = products_of_squares(x.q, x.k, error_dtype)
    if x.q_rope is not None and x.k_rope is not None:
        squares = squares + products_of_squares(x.q_rope, x.k_rope, error_dtype)
    result += (a * n + r + stores) * by.square() * squares
    return result + (2 * a * top.square() + 8 * a + 4 * r)


def _terms(x: Block, s: Softmax, error_dtype: torch.dtype) -> Tensor:
    """Returns the number of visible keys of each query row of block x, [heads, rows, 1], in error_dtype. A key that is
    selected m times counts m^2, because equal terms have equal rounding errors."""
    live = s.live.to(error_dtype)
    return (live if x.times is None else live * x.times.to(error_dtype).square()).sum(-1, keepdim=True)


def _error_dtype(pairs: int, x: Block, *more: Tensor) -> torch.dtype:
    """Returns the dtype in which to compute variances of `pairs` (query, key) pairs: float64 for few pairs, or if
    squares of products of block x's q, k, v and of `more` may not fit in float32."""
    if pairs <= _FEW:
        return torch.float64
    q, k, v, *others = (
        float(t.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if t.numel() else 1.0 for t in (x.q, x.k, x.v, *more)
    )
    products = [v, *(v * d * other for d in others for other in (1.0, k, q)), *others]
    fits = q * k < 2.0**50 and all(2.0**-16 <= p <= 2.0**50 for p in products)
    return torch.float32 if fits else torch.float64


def faint(pairs: Tensor) -> bool:
    """True if, for some key, all values `pairs` [.., keys] are so small that their squared errors underflow float32."""
    most = pairs.abs().flatten(0, -2).amax(0) if pairs.numel() else pairs.new_ones(1)
    return bool(((most > 0) & (most < 2.0**-28)).any())


def _of_weights(x: Block, s: Softmax, grade: Grade, error_dtype: torch.dtype) -> Tensor | float:
    """Returns the relative variance of block x's softmax weights, from the errors of their scores, plus 1 for weights
    that a kernel may round to 0; [heads, rows, keys], or one number for all."""
    e, tiny = scores(x, s, grade, error_dtype), (s.weights < LEAST_WEIGHT) & (s.weights > 0)
    return e + tiny.to(error_dtype) if bool(tiny.any()) else e


def forward(x: Block, s: Softmax, out: Tensor, grade: Grade, *, statistics: bool = True) -> dict[str, Tensor]:
    """Returns the error variances of a block's out [heads, rows, dim_v], before it is stored, and, if `statistics`, of
    max, sum and lse [heads, rows, 1]. P: probabilities; a, w, e: relative variances of one addition, of rounding a
    weight, and of P by its score; n: keys.

    out   sum_j P^2 (e + w) (v - out)^2 + w out^2 sum P^2          the weights; an error of scores moves the divisor too
          with dropout v / keep_prob, plus out^2 sum P^2 e of dropped keys, which are in the divisor
          + a n (out^2 / 2 + sum P^2 v^2)                      the sums of values and of weights
          + max_j (P m)^2 2^-30 / 12 sum_j (v / m)^2 for caches of integers, m = max_d abs v with a scale per token,
          else 1                                                   weights times scales, rounded to 16 bits
          for weights W = round(c exp(s - max)), c = weight_scale, the first two lines are replaced by
          sum_j v^2 / sum^2 of W near a middle + out^2 sum P^2 e   a weight changes by one; the divisor
    lse   sum_j P^2 e + a (n / 9 + 2 + lse^2 + max^2)
    max   e, at the maximum;  sum   sum^2 (sum_j P^2 e + e at the maximum + a n / 3)
    """
    dtype, p = x.problem.torch_dtype, x.problem
    error_dtype = _error_dtype(s.weights.numel(), x)
    a, w = grade.sums(dtype), grade.weight(dtype)
    divisor = s.total.where(s.total != 0, 1.0)
    live = s.live if x.keep is None else s.live & x.keep
    soft = (s.weights / divisor).to(error_dtype).masked_fill_(~s.live, 0).nan_to_num_(0.0, 0.0, 0.0).square_()
    n = _terms(x, s, error_dtype)
    e = _of_weights(x, s, grade, error_dtype)
    values = x.v.to(error_dtype).nan_to_num(0.0, 0.0, 0.0)
    w = w + _remade(p)
    live_weights = soft if x.keep is None else soft.masked_fill(~live, 0)
    factor = 1.0 if x.keep is None else x.keep_factor
    each = live_weights * (e + (w + a * n))
    mean = out.to(error_dtype).nan_to_num(0.0, 0.0, 0.0)
    if x.weight_scale is not None:
        soft = _shares(s, error_dtype)
        flips = _flips(x.weight_scale, s, e, grade.step(dtype), error_dtype) + live_weights * a * n
        variance = flips @ values.square() + mean.square() * (soft * e).sum(-1, keepdim=True)
    elif isinstance(e, float):
        variance = factor**2 * (each @ values.square())
    else:
        # Subtract the median of the values, which cancels in v - out; a mean would depend on the largest value alone.
        centre = values.median(1, keepdim=True).values if values.shape[1] else values.new_zeros(1, 1, 1)
        values, off = values - centre, mean - factor * centre
        variance = factor**2 * (each @ values.square()) - 2 * factor * off * (each @ values)
        variance = (variance + off.square() * each.sum(-1, keepdim=True)).clamp(min=0)
        variance = variance + (w + a * n) * mean.square() * live_weights.sum(-1, keepdim=True)
        if x.keep is not None:
            variance = variance + mean.square() * ((soft - live_weights) * e).sum(-1, keepdim=True)
        values = values + centre
    variance = variance + a * n / 2 * mean.square()
    if p.kv_dtype and x.weight_scale is None:
        size = values.abs().amax(-1, keepdim=True) if p.dequant_v == "token" else torch.ones_like(values[..., :1])
        largest = (
            (live_weights * size.square().mT).amax(-1, keepdim=True)
            if live_weights.shape[-1]
            else live_weights.sum(-1, keepdim=True)
        )
        shares = (values / size.where(size > 0, 1.0)).square()
        variance = variance + factor**2 * _DIGITS * largest * (live.to(error_dtype) @ shares)
    if quantum(dtype) > 1e-30 and (w or grade.low) and x.weight_scale is None:  # weights of float16 that are subnormal
        least = quantum(dtype) * torch.maximum(divisor.to(error_dtype) ** -2, torch.tensor(1.0 if grade.low else 0.0))
        variance = variance + least * x.keep_factor**2 * (live.to(error_dtype) @ values.square())
    full = divisor.to(error_dtype)
    full = full.clamp(max=1.0) if grade.low else full  # low grades may divide before the sum
    variance = variance + underflow(n) * (x.keep_factor / full).square()
    results = {"out": variance.double()}
    if x.out_scale is not None:
        scale = x.out_scale[0]
        results["out"] = (results["out"] + 3 * (FLOAT32 + grade.step(dtype)) * out.square()) * scale.square()
        results["out"] = results["out"] + 4 * FLOAT32 * (out * scale).square()
        if x.out_scale[1] is not None:
            results["out"] = results["out"] + 2 * FLOAT32 * x.out_scale[1].square()
    return results | (_statistics(x, s, soft, grade) if statistics else {})


def _statistics(x: Block, s: Softmax, squares: Tensor, grade: Grade) -> dict[str, Tensor]:
    error_dtype, a = squares.dtype, grade.sums(x.problem.torch_dtype)
    e = torch.as_tensor(scores(x, s, grade, error_dtype, exact=True), dtype=error_dtype).expand_as(s.shown)
    n = _terms(x, s, error_dtype)
    relative = (squares * e).sum(-1, keepdim=True)
    some = s.shown.shape[-1] > 0
    peak = e.gather(-1, s.shown.argmax(-1, keepdim=True)) if some else torch.zeros_like(relative)
    top = s.top.to(error_dtype).masked_fill(~s.top.isfinite(), 0).square()
    return {
        "max": (peak + a * top).double(),
        "sum": (s.total.to(error_dtype).square() * (relative + peak + a * n / 3)).double(),
        "lse": (relative + a * _of_logarithm(x, s, error_dtype)).double(),
    }


def _of_logarithm(x: Block, s: Softmax, error_dtype: torch.dtype) -> Tensor:
    """Returns n / 9 + 2 + lse^2 + max^2, [heads, rows, 1]: the variance of lse, without the weights' errors, in units
    of one float32 addition's; n: number of keys."""
    top, lse = ((t.to(error_dtype).nan_to_num(0.0, 0.0, 0.0)).square() for t in (s.top, s.top + s.total.log()))
    return _terms(x, s, error_dtype) / 9 + 2 + lse + top


def _flips(c: Tensor, s: Softmax, e: Tensor | float, step: float, error_dtype: torch.dtype) -> Tensor:
    """Returns the variance [heads, rows, keys] of int8 weights round(c exp(s - max)) that comes from their rounding: 1
    / sum^2 where c exp(s - max) is so near the middle of two integers that an error may change it, else 0. e: variance
    of s; step: variance of rounding c exp(s - max). The maximum is exact."""
    scaled = c.to(error_dtype) * (s.shown - s.top).exp().to(error_dtype)
    # 7 standard deviations: fewer than one in a million errors is larger.
    least = 7 * scaled.abs() * torch.as_tensor(e + 2 * step, dtype=error_dtype).sqrt()
    near = ((scaled - scaled.floor() - 0.5).abs() < least) & s.softmax & (s.shown != s.top)
    return near / s.total.where(s.total != 0, 1.0).to(error_dtype).square()


def _shares(s: Softmax, error_dtype: torch.dtype) -> Tensor:
    """Returns the squared softmax probabilities, before weights are rounded to integers, [heads, rows, keys]."""
    soft = (s.shown - s.top).exp() / s.total.where(s.total != 0, 1.0)
    return soft.to(error_dtype).masked_fill(~s.softmax, 0).nan_to_num(0.0, 0.0, 0.0).square()


def _remade(p: Problem) -> float:
    """Returns the relative variance of rounding dequantised keys and values; 0 if the integers are multiplied."""
    return rounding(p.torch_dtype) if p.kv_dtype and not p.has_weight_scale else 0.0


def delta(x: Block, g: Scored | None, grade: Grade) -> Tensor:
    """Returns the variance of delta = dout . out that the errors of out cause, [heads, rows, 1], for block x.

        sum_d dout^2 out^2 (r + a n / 2) + sum_j P^2 dP^2 (e + w + a n) + a dim (delta^2 / 3 + sum (dout out)^2)
        with a gradient of lse plus (a + r) (delta^2 + dlse^2)

    P: probabilities; dP = dout . v; n: keys. a, r, w: relative variances of one addition, of rounding a value and a
    weight; e: of P by its score. g: gradients of the scores of all keys of the rows; None: out's size gives the
    weights' error.
    """
    dout, out = x.saved[:2]
    dtype = x.problem.torch_dtype
    a, r, w = grade.sums(dtype), grade.step(dtype), grade.weight(dtype)
    products = (dout * out).nan_to_num(0.0, 0.0, 0.0)
    total = products.sum(-1, keepdim=True).square()
    squares = products.square().sum(-1, keepdim=True)
    if g is None:
        from_weights = w * squares
    else:
        error_dtype = _error_dtype(g.dscores.numel(), x, x.saved[0])
        terms = (g.softmax.weights.to(error_dtype) * g.upstream.to(error_dtype)).nan_to_num(0.0, 0.0, 0.0).square()
        each = _of_weights(x, g.softmax, grade, error_dtype) + (w + a * x.kv_len)
        from_weights = (terms * each).sum(-1, keepdim=True).double()
    n = dout.shape[-1]
    of_out = rounding(dtype) + r + a * x.kv_len / 2
    of_sum: Any = underflow(max(x.kv_len, 1))  # of out, before the division
    if g is not None and g.dscores.shape[-1]:
        of_sum = of_sum * g.softmax.weights.double().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True).square()
    subnormal = (quantum(dtype) + of_sum) * dout.nan_to_num(0.0, 0.0, 0.0).square().sum(-1, keepdim=True)
    subnormal = subnormal + underflow(n)
    if x.dlse is not None:
        from_weights = from_weights + (a + r) * (2 * total + 3 * x.dlse.square())
    return of_out * squares + from_weights + a * n * (total / 3 + squares) + r * total + subnormal


def _of_scores(x: Block, g: Scored, e: Tensor | float, grade: Grade, error_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns (variance of dS without the errors of delta and of the sum of weights; dS; P times the softcap's
    derivative), all [heads, rows, keys], and the relative variance of the sum of weights, [heads, rows, 1].
    P: probabilities, dS: their scores' gradient, in g; e: relative variance of P."""
    dtype, s = x.problem.torch_dtype, g.softmax
    a, r, w = grade.sums(dtype), grade.step(dtype), grade.weight(dtype)
    dscores = g.dscores.to(error_dtype).nan_to_num(0.0, 0.0, 0.0)
    factor, dim = x.keep_factor if x.keep is not None else 1.0, x.v.shape[-1]
    products = (a * dim / 3 + a + 2 * r) * g.upstream.to(error_dtype).nan_to_num(0.0, 0.0, 0.0).square()
    products += a * dim * factor**2 * products_of_squares(x.saved[0], x.v, error_dtype)
    slope: Any = s.slope.to(error_dtype) if isinstance(s.slope, Tensor) else s.slope
    products += underflow(dim) * factor**2
    soft = s.weights.to(error_dtype).masked_fill(~s.softmax, 0).nan_to_num(0.0, 0.0, 0.0)
    # Variance of the saved divisor, and of the divisor if a program recomputes it.
    divisor = 2 * ((soft.square() * e).sum(-1, keepdim=True) + a * _of_logarithm(x, s, error_dtype))
    soft, sloped = soft * slope, dscores * slope
    each = sloped.square() * (e + (w + 2 * r)) + soft.square() * products
    if isinstance(slope, Tensor):
        each += 4 * (a + r) * dscores.square()
    if grade.low and quantum(dtype) > 1e-30:  # probabilities of float16 that are subnormal
        left = (g.upstream - g.delta).to(error_dtype).nan_to_num(0.0, 0.0, 0.0) * slope
        each += quantum(dtype) * left.square().masked_fill(~s.softmax, 0)
    return each, sloped, soft, divisor


def scored(x: Block, g: Scored, of_delta: Tensor, grade: Grade) -> Tensor:
    """Returns the variance of the errors of dS, the gradient of scores or a bias, [heads, rows, keys]; of_delta: that
    of delta = dout . out."""
    error_dtype = torch.float64
    e = _of_weights(x, g.softmax, grade, error_dtype)
    before = replace(g, softmax=replace(g.softmax, slope=1.0))
    each, dscores, soft, divisor = _of_scores(x, before, e, grade, error_dtype)
    n = grade.sums(x.problem.torch_dtype) * max(x.kv_len, 1)
    return each + dscores.square() * (divisor + n) + soft.square() * of_delta


def gradients(
    x: Block, g: Scored, of_delta: Tensor, grade: Grade, kinds: Collection[str] = GRADIENTS
) -> dict[str, Tensor]:
    """Returns the error variances of a block's contributions to the gradients `kinds`, by query head: dq [heads, rows,
    dim], dk, dv [heads, keys, dim]. P: probabilities; a, w, e: relative variances of one addition, of rounding a
    weight, and of P by its score. dS = P (dP - delta), dP = dout . v, delta = dout . out.

        dS   dS^2 (e + w + a n) + P^2 var(dP),   var(dP) = a dim (dP^2 / 3 + |dout|^2 |v|^2 / dim)
             with a cap, whose slope 1 - t^2 has cancellation, plus 4 a (P (dP - delta))^2
        d    twice the variance of lse, common to all P of a row: of the saved one and of a recomputed one
        dq   scale^2 (sum_j var(dS) k^2 + var(delta) (sum_j P k)^2 + d (sum_j dS k)^2)
        dk   scale^2 sum_i (var(dS) + P^2 var(delta) + d dS^2) q^2;   dv   sum_i P^2 (e + d + w + a n) dout^2
        dsink   sum_i P_sink^2 (var(delta) + delta^2 (e_sink + d))

    n is the number of terms: keys of a row, rows of a key and its heads. summed() is added to complete sums. With lists
    of keys, dk and dv have w once more: a row's contribution may be stored in the dtype before the sum.
    """
    dtype, s = x.problem.torch_dtype, g.softmax
    error_dtype = (
        torch.float64 if faint(s.weights.masked_fill(~s.softmax, 0)) else _error_dtype(g.dscores.numel(), x, x.saved[0])
    )
    a, r, w = grade.sums(dtype), grade.step(dtype), grade.weight(dtype)
    e = _of_weights(x, s, grade, error_dtype)
    each, dscores, soft, divisor = _of_scores(x, g, e, grade, error_dtype)
    dropped_weights = g.dropped_weights.to(error_dtype)
    if x.counted is not None:
        counted = x.counted.to(error_dtype)
        dscores, soft, dropped_weights = (t * counted for t in (dscores, soft, dropped_weights))
        each = each * counted.square()
    scale = torch.as_tensor(x.scores_by if x.gradient_scale is None else x.gradient_scale, dtype=error_dtype)
    of_row, of_key = (a * max(n, 1) for n in (x.kv_len, x.q_len * x.problem.group))
    of_key += w if x.times is not None else 0.0
    results: dict[str, Tensor] = {}
    if "dv" in kinds:
        weight_errors = dropped_weights.nan_to_num(0.0, 0.0, 0.0).square() * (e + divisor + (w + r + of_key))
        results["dv"] = _of_dv(x, s, weight_errors)
    of_delta = of_delta.to(error_dtype)
    if any(kind.startswith("dq") for kind in kinds):
        of_queries = each + dscores.square() * of_row
        results |= _of_queries(x, s, (of_queries, soft, dscores), of_delta, divisor, scale.square())
    if any(kind.startswith("dk") for kind in kinds):
        by_rows = each + dscores.square() * (divisor + of_key) + soft.square() * of_delta
        results |= _of_keys(x, s, scale.square() * by_rows, scale.square())
    if x.sink is not None and "dsink" in kinds:
        sink_weight = at_sink(x, s)
        top = s.top.masked_fill(~s.top.isfinite(), 0)
        of_sink = (2 * a + 2 * r) * (top.square() + x.sink[:, None, None].square()) + 8 * a + 4 * r + divisor
        results["dsink"] = (
            sink_weight.square() * (of_delta + g.delta.square() * of_sink) + quantum(torch.float32)
        ).sum((1, 2))
    return {name: value.double().nan_to_num(0.0, posinf=torch.inf) for name, value in results.items()}


def _of_dv(x: Block, s: Softmax, weight_errors: Tensor) -> Tensor:
    """Returns the error variance of dv of block x, [heads, keys, dim_v], from that of the weights after dropout
    (weight_errors)."""
    error_dtype, factor = weight_errors.dtype, x.keep_factor if x.keep is not None else 1.0
    dout, live = _squares(x.summed.get("dv", x.saved[0]), error_dtype), s.live.to(error_dtype)
    result = weight_errors.mT @ dout + quantum(x.problem.torch_dtype) * factor**2 * (live.mT @ dout)
    return result + underflow(live.sum(-2)[..., None]) * factor**2


def _of_queries(
    x: Block, s: Softmax, pairs: tuple[Tensor, ...], of_delta: Tensor, divisor: Tensor, squared_scale: Tensor
) -> dict[str, Tensor]:
    """Returns the error variances of dq and dq_rope of block x; pairs: variance of dS, P times the softcap's
    derivative, and dS. of_delta: variance of delta; divisor: relative variance of the sum of weights; squared_scale:
    square of the scale."""
    each, soft, dscores = pairs
    least, live = quantum(x.problem.torch_dtype), s.softmax.to(each.dtype)
    results = {}
    for name, k in (("dq", x.k), ("dq_rope", x.k_rope)):
        if k is not None:
            wild = x.summed.get(name, k).to(each.dtype).nan_to_num(0.0, 0.0, 0.0)
            shared = (soft @ wild).square() * of_delta + (dscores @ wild).square() * divisor
            dq = squared_scale * ((each + least * live) @ wild.square() + shared)
            results[name] = dq + underflow(live.sum(-1, keepdim=True)) * squared_scale.amax()
    return results


def _of_keys(x: Block, s: Softmax, by_rows: Tensor, squared_scale: Tensor) -> dict[str, Tensor]:
    """Returns the error variances of dk and dk_rope of block x; by_rows: variance of dS, the gradient of scores [heads,
    rows, keys]; squared_scale: scale ** 2."""
    least, live = quantum(x.problem.torch_dtype), s.softmax.to(by_rows.dtype)
    results = {}
    for name, q in (("dk", x.q), ("dk_rope", x.q_rope)):
        if q is not None:
            squares = _squares(x.summed.get(name, q), by_rows.dtype)
            dk = (by_rows + least * squared_scale * live).mT @ squares
            results[name] = dk + underflow(live.sum(-2)[..., None]) * squared_scale.amax()
    return results
