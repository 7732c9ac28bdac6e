"""Computes the expected size of a correct program's error for the indexer and its loss, as expected_error.py does.

    S_h = q_h . k,  I = sum_h w_h max(0, S_h)      products and scores, n terms each
    y = exp(I - max) / sum,  p = mean of heads' probabilities,  dI = y - p

Relative variances: r of one rounding, a of one addition, w of rounding. All functions return squares of expected sizes.
"""

from dataclasses import dataclass, replace

import torch

from fusion_attention.judging.expected_error import LEAST_WEIGHT, Grade, faint, products_of_squares, quantum, summed
from fusion_attention.judging.indexer_formulas import (
    Attended,
    Compared,
    Given,
    Index,
    Scored,
    chosen,
    compared,
    given,
    gradients,
    softmax,
)
from fusion_attention.judging.outputs import Wanted

Tensor = torch.Tensor
TOTALS = ("loss", "dk")  # sums over all rows
# A product within this many standard deviations of 0 may have either sign in correct programs.
_OPEN = 4.0
_FEW, _BUFFER = 1 << 18, 1 << 22  # as in expected_error; numbers in memory at once
# Other variances are approximated if they are at most this fraction of the variance of rounding dI to 16 bits.
_LITTLE = 0.02


def _clean(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Uncertain:
    """Error variances of products S [heads, rows, keys] and of an indexer's scores I [rows, keys].

    S_h = q_h . k for head h of H, products of n elements; I = sum_h w_h max(0, S_h) with weights w. open: True where
    rounding errors may change the sign of S. live: True where S is positive or open. a, r: relative variances of one
    addition and one rounding.

    var(S) = a (n (S^2 / 3 + Q) + S^2) + r (2 S^2 + Q)                                   Q = sum_d q^2 k^2
    var(I) = sum_h w_h^2 var(S_h) + (a + r) sum_h t_h^2 + a H (I^2 / 3 + sum_h t_h^2) + r I^2

    over the heads whose S is live; t_h = w_h max(0, S_h). An S of exactly 0 is not open, because its terms are
    zeros or integers, which every program adds exactly.
    """

    products: Tensor
    scores: Tensor
    open: Tensor
    live: Tensor


def _fits(s: Scored) -> bool:
    """True if the squares of an indexer's products and scores in `s`, and of their errors, fit in float32."""
    q, k, w = (float(_clean(t).abs().amax()) if t.numel() else 1.0 for t in (s.q, s.k, s.weights))
    return all(2.0**-30 < product < 2.0**40 for product in (q * k, q * k * w))


def uncertain(s: Scored, dtype: torch.dtype, grade: Grade, dscores: Tensor | None = None) -> Uncertain:
    """Returns the error variances of the indexer's products and scores `s`; dtype: that of q and k; grade: the
    precision of the program. dscores: the gradient of the scores [rows, keys], needed if variances of gradients are
    computed from the result."""
    few = s.dots.numel() <= _FEW or not _fits(s) or (dscores is not None and faint(_clean(dscores)))
    error_dtype = torch.float64 if few else torch.float32
    a, r, n, heads = grade.sums(dtype), grade.step(dtype), s.q.shape[-1], len(s.q)
    squared_dots = _clean(s.dots.to(error_dtype)).square()
    products = (a * n + r) * products_of_squares(s.q, s.k[None], error_dtype)
    products = products.add_(squared_dots, alpha=a * n / 3 + a + 2 * r)
    unsure = (
        (squared_dots < _OPEN**2 * products) & (squared_dots > 0)
        if s.relu
        else torch.zeros_like(squared_dots, dtype=torch.bool)
    )
    live = (s.dots > 0) | unsure if s.relu else torch.ones_like(unsure)
    weights = _clean(s.weights.to(error_dtype)).square()
    terms = (weights * squared_dots).masked_fill_(~live, 0).sum(0)
    total = (weights * products).masked_fill_(~live, 0).sum(0) + (a + r + a * heads) * terms
    scores = s.factor**2 * total + (a * heads / 3 + r) * _clean(s.scores.to(error_dtype)).square()
    return Uncertain(products, scores, unsure, live)


def statistics(x: Index, b: int, rows: slice, grade: Grade) -> dict[str, Wanted]:
    """Returns softmax max and sum of the indexer's scores I of a range of rows of sequence b, [1, rows, 1], with error
    variances (var); y = exp(I - max) / sum; a, r: relative variances of one addition and one rounding; n: keys.

    max   var(I) at the maximum
    sum   sum^2 (sum_j y^2 (var(I) + t) + (1 - 2 y_max) var(I at the maximum) + a n / 3 + r)
    t     of the exponential: a (2 (I - max)^2 + 8) + r ((I - max)^2 + 4)
    """
    s, visible, dtype = x.scored(b, rows, torch.float64), x.visible(b, rows), x.problem.torch_dtype
    top, total = softmax(s.scores, visible.double())
    u, a, r = uncertain(s, dtype, grade), grade.sums(dtype), grade.step(dtype)
    if not visible.shape[-1]:
        return {n: Wanted(t[None], torch.zeros_like(t[None])) for n, t in (("max", top), ("sum", total))}
    left = _clean(s.scores - top).square()
    y = _clean((s.scores - top).exp() / total).masked_fill(~visible, 0)
    peak = s.scores.masked_fill(~visible, -torch.inf).argmax(-1, keepdim=True)
    at, weight = u.scores.double().gather(-1, peak), y.gather(-1, peak)
    e = u.scores + (2 * a + r) * left + 8 * a + 4 * r
    relative = (y.square() * e).sum(-1, keepdim=True) + (1 - 2 * weight) * at
    relative = relative.clamp(min=0) + a * visible.sum(-1, keepdim=True) / 3 + r
    live = visible.any(-1, keepdim=True)
    variances = at.masked_fill(~live, 0), total.square() * relative
    return {n: Wanted(v[None], t[None]) for n, v, t in zip(("max", "sum"), (top, total), variances, strict=True)}


@dataclass(frozen=True, eq=False)
class Spread:
    """Error variances of log y and p, the indexer's and the target's probabilities of keys: of independent errors per
    key [rows, keys], of common errors of a row's keys [rows, 1]."""

    # of_y, y_row: variance of log y of each key, and the common one from the row's sum.
    of_y: Tensor
    y_row: Tensor
    # of_p, p_row: variance of p of each key, and the common one, relative to p, from the row's divisor.
    of_p: Tensor
    p_row: Tensor
    p: Tensor  # the target probabilities, [rows, keys]
    # Each key's fraction of the row's sum, by which the error of its score changes all y of the row; None if the sum is
    # an input.
    shares: Tensor | None

    def of_pairs(self, by_y: Tensor, by_p: Tensor) -> Tensor:
        """Returns [rows, keys]: variance of by_y * log y + by_p * p, of the indexer's probabilities y and targets p."""
        of_y = self.of_y
        if self.shares is not None:
            of_y = of_y * (1 - 2 * self.shares) + (self.shares.square() * of_y).sum(-1, keepdim=True)
        result = by_y.square() * (of_y.clamp(min=0) + self.y_row)
        return result + by_p.square() * (self.of_p + self.p.square() * self.p_row)

    def of_sums(self, by_y: Tensor, by_p: Tensor) -> Tensor:
        """Returns [.., rows]: the variance, by rounding errors, of sum_keys(by_y log y + by_p p) with coefficients by_y
        and by_p; y: the indexer's softmax over keys, p: the target's."""
        full = by_y.sum(-1, keepdim=True)
        each = by_y if self.shares is None else by_y - self.shares * full
        result = (each.square() * self.of_y + by_p.square() * self.of_p).sum(-1)
        rows = full.square() * self.y_row + (by_p * self.p).sum(-1, keepdim=True).square() * self.p_row
        return result + rows[..., 0]


def spread(c: Compared, u: Uncertain, dtype: torch.dtype, grade: Grade) -> Spread:
    """Returns the error variances of the distributions c, the indexer's y and its target p, [rows, keys]; u: variances
    of the scores I; a, r: of one addition and one rounding, relative; n: keys of a row.

    of_y    var(I) + a (2 (I - max)^2 + 8) + r ((I - max)^2 + 4)
    y_row   (a + r) (2 + log(sum)^2), plus a n / 3 if the call computes the sum
    of_p    from the errors of the attention's scores, by target(); 0 for a given target
    """
    a, r, error_dtype = grade.sums(dtype), grade.step(dtype), u.scores.dtype
    left = _clean((c.scored.scores - c.top).to(error_dtype)).square()
    of_y = u.scores + (2 * a + r) * left + 8 * a + 4 * r
    y_row = (a + r) * (2 + _clean(c.total.to(error_dtype).log()).square())
    if c.own_statistics:
        y_row = y_row + a * c.times.square().sum(-1, keepdim=True).to(error_dtype) / 3
    if c.attended is None:
        assert c.given is not None
        none = torch.zeros_like(of_y)
        return Spread(of_y, y_row, none, torch.zeros_like(y_row), none, _shares(c, error_dtype))
    of_p, p_row = target(c.attended, dtype, grade, error_dtype)
    p_row = p_row.masked_fill(~(c.times > 0).any(-1, keepdim=True), 0)  # a sink may take all of a row without keys
    p = _clean(c.p.to(error_dtype))
    return Spread(of_y, y_row, of_p, p_row, p, _shares(c, error_dtype))


def _shares(c: Compared, error_dtype: torch.dtype) -> Tensor | None:
    return _clean((c.times * c.y).to(error_dtype)) if c.own_statistics else None


def _of_mass(given: Given, a: float) -> Tensor:
    """Returns [rows, 1]: relative variance of the sum of a given target over n keys, a (1 + n (1 / 3 + sum_j p_j^2 /
    sum^2)); a: relative variance of one addition."""
    if given.unit:
        return torch.zeros_like(given.mass)
    p, mass = _clean(given.p), _clean(given.mass).square()
    n = given.read.sum(-1, keepdim=True)
    return (a * (1 + n / 3 + n * p.square().sum(-1, keepdim=True) / mass)).masked_fill(mass == 0, 0)


def target(x: Attended, dtype: torch.dtype, grade: Grade, error_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns (variance of p [rows, keys], relative variance common to a row's keys [rows, 1]); x: the attention's
    scores s and probabilities P of H heads; p = sum_h P_h / N, N: H less the sinks' probabilities; a, r: relative
    variances of one addition and one rounding; n: dim; Q: sum_d q^2 k^2.

    e     a (n (s^2 / 3 + Q) + 5 s^2 + 2 max^2 + (s - lse)^2 + 8) + r (Q + 5 s^2 + (s - lse)^2 + 4)
    of_p  sum_h P_h^2 e_h / N^2 + (a H / 3 + 3 a + 2 r) p^2 + a H sum_h P_h^2 / N^2
    row   2 (a + r) + (a + r) mean_h(1 + lse^2) / H
          with sinks plus sum_h P_sink^2 e_sink / N^2 + a H (1 / 3 + H / (6 N^2))
    """
    a, r, heads = grade.sums(dtype), grade.step(dtype), len(x.scores)
    scores, lse = _clean(x.scores.to(error_dtype)), _clean(x.lse.to(error_dtype))
    shares, divisor = _clean((x.shares / x.divisor).to(error_dtype)), x.divisor.to(error_dtype).nan_to_num(1.0)
    e = (a * x.dim + r) * _clean(x.squares.to(error_dtype)) + (a + r) * (scores - lse).square()
    e += (a * x.dim / 3 + 5 * a + 5 * r) * scores.square() + 2 * a * lse.square() + 8 * a + 4 * r
    squares = shares.square()
    of_p = (squares * (e + a * heads)).sum(0)
    of_p = of_p + (a * heads / 3 + 3 * a + 2 * r) * _clean(x.target.to(error_dtype)).square()
    row = 2 * (a + r) + (a + r) * (1 + lse.square()).mean(0) / heads
    if x.at_sinks is not None:
        at = _clean(x.at_sinks.to(error_dtype))
        e = (2 * a + r) * (at.clamp(min=1e-30).log().square() + 2 * lse.square()) + 8 * a + 4 * r
        row = row + (at.square() * e).sum(0) / divisor.square() + a * heads * (1 / 3 + heads / (6 * divisor.square()))
    return of_p, row


def of_loss(c: Compared, spreads: Spread, terms: int, dtype: torch.dtype, grade: Grade) -> Tensor:
    """Returns [1]: the error variance of the rows' contribution to the indexer's loss, the sum over keys of p (log p -
    log y), of target probabilities p and the indexer's y.

    a, r: relative variances of one addition and one rounding; I: the indexer's scores.

    row    variance of its first-order change, with slopes p - y sum p in I and log p - log y + 1 in p (`spreads`)
           + p^2 (a (log y^2 + 2 log p^2 + 2 d^2 + 2) + r (log y^2 + log p^2 + 2 d^2)),  d = log p - log y
           + a n (t^2 / 3 + sum_j t_j^2)        a row's sum t of its n keys
    all    a rows sum of t^2                    their sum over `terms` rows
    """
    a, r, error_dtype = grade.sums(dtype), grade.step(dtype), spreads.of_y.dtype
    by_y, by_p, losses = (_clean(t.to(error_dtype)) for t in (c.loss_by_y, c.loss_by_p, c.losses))
    log_p, log_y = (t.to(error_dtype) for t in c.logs)
    apart = 2 * (log_p - log_y).square()
    logs = a * (log_y.square() + 2 * log_p.square() + apart + 2) + r * (log_y.square() + log_p.square() + apart)
    n, total = c.times.square().sum(-1).to(error_dtype), losses.sum(-1).square()
    variance = spreads.of_sums(by_y, by_p) + (_clean(c.p.to(error_dtype)) * c.times.to(error_dtype)).square().mul(
        logs
    ).sum(-1)
    variance = variance + a * n * (total / 3 + losses.square().sum(-1)) + (a * terms + r) * total
    return variance.double().sum().reshape(1)


def of_gradients(
    s: Scored, u: Uncertain, times: Tensor, dscores: Tensor, slopes: tuple[Spread, Tensor, Tensor] | None, rows: int,
    dtype: torch.dtype, grade: Grade, squares: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Returns the error variances of an indexer's gradients, by kind (dq, dk, dweights), before their sum over all
    rows.

    S_h = q_h . k; dI: gradient of the scores I = sum_h w_h max(0, S_h); y, p: probabilities, the indexer's and the
    target. a, r, w: relative variances of one addition, of rounding a value and a weight; n: terms of a sum.

    s, u: scores of the rows and their variances; dscores: dI; rows: the number of rows that are summed.
    slopes: (Spread: variances of y and p, derivative of dI by log y, derivative of dI by p); None if dI is an input.
    times: how often a row selects a key; equal terms have equal rounding errors, so m of them count m^2.
    squares: sum of dI^2 over the list entries of a key, which exceeds dI^2 if they cancel; None: keys are listed once.

    dI        y^2 var(log y) + var(p), without the common error of a row's keys
    dS        w_h^2 var(dI) + (w_h dI)^2 (w + 2 a + a n) where S > 0; where its sign is open (w_h dI)^2 / 4
    dq        sum_j var(dS) k^2, plus w_h^2 (sum_j y k)^2 and w_h^2 (sum_j p k)^2 times the common variances of the row
    dk        sum_ij var(dI) (sum_h w_h q)^2 + the variance of roundings of dS, times q^2
    dweights  sum_j var(dI) max(0, S)^2 + dI^2 var(S) + (dI max(0, S))^2 (a n + 2 a + 2 r)
    """
    error_dtype, a, r, w = u.scores.dtype, grade.sums(dtype), grade.step(dtype), grade.weight(dtype)
    visible, often = times > 0, times.to(error_dtype).square()
    keys = often.sum(-1, keepdim=True)
    clean = _clean(dscores.to(error_dtype)).masked_fill(~visible, 0)
    added = clean.square() if squares is None else _clean(squares.to(error_dtype)).masked_fill(~visible, 0)
    squares = torch.maximum(clean.square(), added)  # equal entries have equal roundings
    live = u.live & ~u.open & visible
    weights = _clean(s.weights.to(error_dtype))
    rounds = weights.square() * squares * (w + 2 * a) + (quantum(dtype) if w else 0.0)
    rounds = rounds.masked_fill_(~live, 0)
    rounds += (weights.square() * clean.square() / 4).masked_fill_(~(u.open & visible), 0)
    terms = (weights.square() * added).masked_fill_(~live, 0) * a
    k, q = _clean(s.k.to(error_dtype)), _clean(s.q.to(error_dtype))
    dq, dk = (rounds + keys * terms) @ k.square(), (rounds + len(s.q) * rows * often * terms).mT @ q.square()
    activations = _clean(s.activations.to(error_dtype))
    each = (squares * u.products).masked_fill_(~(u.live & visible), 0)
    each += (squares * activations.square()) * (a * keys + 2 * a + 2 * r)
    dweights, dk = each.sum(-1), dk.sum(0)
    if slopes is not None:
        result, by_y, by_p = slopes[0], *(_clean(t.to(error_dtype)) for t in slopes[1:])
        pairs = result.of_pairs(by_y, by_p)
        dweights = dweights + result.of_sums(by_y * activations, by_p * activations)
        # Rounding dI to 16 bits may dominate its error, in every row and for every key.
        if w > 0 and all(bool((pairs.sum(i) <= _LITTLE * w * squares.sum(i)).all()) for i in (0, 1)):
            each = (weights.square() * pairs).masked_fill_(~live, 0)
            dq, dk = dq + each @ k.square(), dk + (each.mT @ q.square()).sum(0)
        else:
            dq = dq + weights.square() * _of_rows(result, by_y, by_p, live.to(error_dtype), k)
            dk = dk + _of_keys(pairs, live * weights, q)
    return {"dq": dq.double(), "dk": dk.double()[None], "dweights": dweights.double().T[None]}


def _of_rows(x: Spread, by_y: Tensor, by_p: Tensor, live: Tensor, k: Tensor) -> Tensor:
    """Returns the variance of sum_j (by_y log y + by_p p) k over pairs that are `live`, [heads, rows, dim]. by_y, by_p:
    factors [.., rows, keys]; x: the variances of y and p. live: [heads, rows, keys]."""
    result = (live * (by_y.square() * x.of_y + by_p.square() * x.of_p)) @ k.square()
    full = (live * by_y) @ k
    if x.shares is not None:
        lost = x.shares * x.of_y
        result = (
            result - 2 * full * ((live * (by_y * lost)) @ k) + full.square() * (x.shares * lost).sum(-1, keepdim=True)
        )
        result = result.clamp(min=0)
    return result + full.square() * x.y_row + ((live * (by_p * x.p)) @ k).square() * x.p_row


def _of_keys(pairs: Tensor, weights: Tensor, q: Tensor) -> Tensor:
    """Returns the variance of an indexer's key gradients [keys, dim] from that of dI, the scores' gradient, `pairs`
    [rows, keys]; weights: w_h [heads, rows, keys], 0 where the product q_h . k is not positive."""
    result = q.new_zeros(pairs.shape[1], q.shape[-1])
    step = max(1, _BUFFER // max(result.numel(), 1))
    for i in range(0, len(pairs), step):
        here = slice(i, i + step)
        sums = weights[:, here].permute(1, 2, 0) @ q[:, here].movedim(0, 1)
        result += (sums.square() * pairs[here].unsqueeze(-1)).sum(0)
    return result


def wanted(
    x: Index, b: int, rows: slice, grade: Grade, dtypes: dict[str, torch.dtype] | None = None
) -> dict[str, Wanted]:
    """Returns the exact results of a range of rows of sequence b with their error variances, by kind.

        indexer_topk      values [1, rows, top_k], indices (positions, with the variances of their scores) and scores
                          [1, rows, keys], which are not stored
        indexer_lse       max and sum [1, rows, 1]
        indexer_loss      dq [heads, rows, dim], dweights [1, rows, heads]; and the rows' contribution to loss [1] and
                          dk [1, keys, dim], for completed() after the sum over rows
        indexer_backward  the same without a loss

    x: the call, whose op_kind is listed above; grade: the steps that round; dtypes: dtypes of stored results by kind.
    """
    if x.op_kind == "indexer_topk":
        s, visible = x.scored(b, rows, torch.float64), x.visible(b, rows)
        scores, values, indices = chosen(x, s, visible)
        variance = uncertain(s, x.problem.torch_dtype, grade).scores.double()
        of_values = at_keys(variance, indices)[None]
        results = {"values": Wanted(values[None], of_values), "indices": Wanted(indices[None], of_values)}
        done = results | {"scores": Wanted(scores[None], variance[None])}
        kinds: tuple[str, ...] = ("values",)
    elif x.op_kind == "indexer_lse":
        done, kinds = statistics(x, b, rows, grade), ("max", "sum")
    else:
        done, kinds = _with_gradients(x, b, rows, grade), ("dq", "dweights")
        kinds = (*kinds, "y") if "y" in done else kinds
    for kind in kinds:
        done[kind] = completed(x, b, kind, done[kind], grade, (dtypes or {}).get(kind))
    return done


def _with_gradients(x: Index, b: int, rows: slice, grade: Grade) -> dict[str, Wanted]:
    dtype, length = x.problem.torch_dtype, int(x.extents.q_len[b])
    variances, values = {}, {}
    if x.op_kind == "indexer_backward":
        s, (dscores, squares, times), slopes = x.scored(b, rows, torch.float64), given(x, b, rows, torch.float64), None
        u = uncertain(s, dtype, grade, dscores)
    else:
        c = compared(x, b, rows, torch.float64)
        s, dscores, times, squares = c.scored, c.dscores, c.times, c.dscores.square() / c.times.clamp(min=1)
        if c.given is not None:
            squares = c.given.squares
        u = uncertain(s, dtype, grade, dscores)
        off = spread(c, u, dtype, grade)
        slopes = off, c.by_y, c.by_p
        values["loss"] = c.losses.sum().reshape(1)
        if c.given is not None:
            of_y = off.of_pairs(c.y.to(off.of_y.dtype), torch.zeros_like(off.of_y)).double() + LEAST_WEIGHT**2
            values["y"], variances["y"] = (c.given.of_elements(t)[None] for t in (c.y, of_y))
            slopes = replace(off, y_row=off.y_row + _of_mass(c.given, grade.sums(dtype))), c.by_y, c.by_p
        variances["loss"] = of_loss(c, off, int(x.extents.q_len.sum()), dtype, grade)
    values |= gradients(s, dscores, times > 0)
    variances |= of_gradients(s, u, times, dscores, slopes, length, dtype, grade, squares)
    return {kind: Wanted(value, variances[kind]) for kind, value in values.items()}


def completed(
    x: Index, b: int, kind: str, total: Wanted, grade: Grade, stored: torch.dtype | None = None
) -> Wanted:  # fmt: skip
    """Returns an expected result with the variance of the errors of its last sum and of its rounding added.
    total: the exact result of sequence b (of all sequences if kind is "loss"), and the error variance of its terms.
    kind: "dq", "dk", "dweights" or "loss", summed over keys or rows in the precision `grade`; other results are not
    summed. stored: the dtype to which the result is rounded; None: that of the call."""
    variance, e, dtype = total.variance, x.extents, x.problem.torch_dtype
    terms = {"dq": e.kv_len[b], "dweights": e.kv_len[b], "dk": e.q_len[b] * x.heads, "loss": e.q_len.sum()}.get(kind, 0)
    if terms:
        variance = variance + summed(total.value, int(terms), dtype, grade)
    stored = stored or x.stored(kind)
    baseline = None if total.baseline is None else total.baseline.to(stored)
    return Wanted(total.value, grade.stored(total.value, variance, stored), baseline)


def at_keys(variance: Tensor, indices: Tensor) -> Tensor:
    """Returns `variance`, [rows, keys], at the keys `indices`, [rows, entries]. Entries that are not the index of a
    key, such as -1, get 0."""
    if not variance.shape[-1]:
        return torch.zeros(indices.shape, dtype=variance.dtype)
    listed = indices.long()
    inside = (listed >= 0) & (listed < variance.shape[-1])
    return variance.gather(-1, listed.where(inside, 0)).masked_fill(~inside, 0)
