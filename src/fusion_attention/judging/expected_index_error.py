"""How large the error of a right program is for the indexer and its loss: the model of expected_error, on some rows.

    I = sum_h w_h max(0, S_h),  S_h = q_h . k        var(S) = a (n (S^2 / 3 + Q / 6) + S^2) + r (2 S^2 + Q)
    var(I) = sum_h w_h^2 var(S_h) + 2 (a + r) sum_h (w_h S_h)^2 + a H (I^2 / 3 + sum_h (w_h S_h)^2 / 6) + r I^2

over the heads whose S is above 0, or so near to it that a right program may take it for more. All functions give
variances. Knows no interface's words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusion_attention.judging.expected_error import Grade, products_of_squares, rounding

Tensor = torch.Tensor
_NEAR = 4.0  # standard deviations of S within which its sign is open


@dataclass(frozen=True, eq=False)
class Scored:
    """Variances of S [heads, rows, keys] and of I [rows, keys]; open: where the sign of S is, bool."""

    dots: Tensor
    total: Tensor
    open: Tensor


def scored(
    q: Tensor, k: Tensor, weights: Tensor, dots: Tensor, total: Tensor, dtype: torch.dtype, grade: Grade, *, relu: bool
) -> Scored:
    """Of q [heads, rows, dim], k [keys, dim], weights [heads, rows, 1], dots = q . k and total = I."""
    a, r, n = grade.sums(dtype), grade.step(dtype), q.shape[-1]
    squares = products_of_squares(q, k[None], q.dtype)
    own = dots.square()
    variance = (a * n / 3 + a + 2 * r) * own + (a * n / 6 + r) * squares
    unsure = own <= _NEAR**2 * variance if relu else torch.zeros_like(dots, dtype=torch.bool)
    live = (dots > 0) | unsure if relu else torch.ones_like(unsure)
    terms = (weights.square() * own * live).sum(0)
    found = (weights.square() * variance * live).sum(0) + (2 * (a + r) + a * len(q) / 6) * terms
    return Scored(variance, found + (a * len(q) / 3 + r) * total.square(), unsure)


def statistics(variance: Tensor, scores: Tensor, times: Tensor, top: Tensor, total: Tensor, grade: Grade,
               dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of max and sum, [rows, 1]: e = var(I) + a (2 I^2 + 2 max^2 + 8), as of attention's."""
    a = grade.sums(dtype)
    shown = scores.masked_fill(times == 0, -torch.inf)
    e = exponential(variance, scores, top, grade, dtype)
    if not shown.shape[-1]:
        return torch.zeros_like(top), torch.zeros_like(total)
    weights = (times * (shown - top).exp()).nan_to_num(0.0, 0.0, 0.0)
    peak = variance.gather(-1, shown.argmax(-1, keepdim=True))
    n = (times > 0).sum(-1, keepdim=True)
    relative = (weights.square() * e).nan_to_num(0.0, 0.0, 0.0).sum(-1, keepdim=True)
    return peak + a * top.square(), relative + total.square() * (peak + a * (n / 3 + 1))


def exponential(variance: Tensor, scores: Tensor, top: Tensor, grade: Grade, dtype: torch.dtype) -> Tensor:
    """e of exp(I - max), whose maximum and sum may be saved ones."""
    a, r = grade.sums(dtype), grade.step(dtype)
    size = scores.square() + top.square()
    return (variance + (2 * a + r) * size + 10 * a + 4 * r).nan_to_num(0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Parts:
    """Of a loss on some rows, [rows, keys]: y and p, their variances, how often a key counts, what the loss adds."""

    y: Tensor
    p: Tensor
    of_y: Tensor
    of_p: Tensor
    times: Tensor
    losses: Tensor
    scores: Scored


def of_loss(x: Parts, grade: Grade, dtype: torch.dtype) -> Tensor:
    """Of the sum over rows and keys of p (log p - log y), but for what its size adds.

    sum (log p - log y + 1)^2 var(p) + (y sum_j p / y - p)^2 e_y, and each logarithm's own rounding.
    """
    a, r = grade.sums(dtype), grade.step(dtype)
    inside = x.y > 0
    ratio = (x.p.clamp(min=1e-8).log() - x.y.clamp(min=1e-8).log()).where(inside, 0)
    relative = (x.of_y / x.y.square().clamp(min=1e-60)).where(inside, 0)
    share = x.times * x.p
    moved = (x.times * x.y * share.sum(-1, keepdim=True) - share).square() + 0.0
    logs = share.square() * (4 * (a + r) * (ratio.square() + 4) + a * 400)
    terms = x.losses.square()
    found = (x.times * (ratio.abs() + 1)).square() * x.of_p + moved * relative + logs
    return found.sum().reshape(1) + a * terms.numel() / 6 * terms.sum()


def of_gradients(
    x: Parts, dscores: Tensor, q: Tensor, k: Tensor, weights: Tensor, dots: Tensor, grade: Grade, dtype: torch.dtype,
    *, relu: bool, share: float, rows: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Of dq [heads, rows, dim], dk [1, keys, dim] and dweights [1, rows, heads], but for what their sizes add.

    var(dI) = times^2 (var(y) + var(p)) + (w + a) dI^2
    dq   sum_j (w_h^2 var(dI) + (w_h dI)^2 (w + a n / 6)) k^2, where S > 0; of an open sign (w_h dI)^2 k^2
    """
    a, w = grade.sums(dtype), grade.weight(dtype)
    of_dscores = (x.times * share).square() * (x.of_y + x.of_p) + (w + 4 * a) * dscores.square()
    live = ((dots > 0) | x.scores.open) & (x.times > 0) if relu else (x.times > 0).expand_as(dots)
    terms = max(dots.shape[-1], rows)
    each = weights.square() * (of_dscores + (w + 2 * a + a * terms / 6) * dscores.square())
    each = (each + (weights * dscores).square() * x.scores.open).masked_fill(~live, 0)
    kept = (dots.clamp(min=0) if relu else dots).square()
    by_weights = of_dscores * kept + dscores.square() * (x.scores.dots * live + a * terms / 6 * kept)
    return {
        "dq": each @ k.square(),
        "dk": (each.mT @ q.square()).sum(0, keepdim=True),
        "dweights": by_weights.masked_fill(x.times == 0, 0).sum(-1).T[None],
    }


__all__ = ["Parts", "Scored", "exponential", "of_gradients", "of_loss", "rounding", "scored", "statistics"]
