"""The formulas of the indexer and of its loss on some rows, in any precision, with what a mistake may change of them.

Equality with the golden back end is tested. Refuses to know any interface's words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fusion_attention.judging import expected_index_error as errors
from fusion_attention.judging.expected_error import Grade, products_of_squares
from fusion_attention.judging.setting import selected_times
from fusion_attention.waist.problem import Extents

Tensor = torch.Tensor
_LEAST = 1e-8


@dataclass(frozen=True, eq=False)
class Index:
    """A call of the indexer's family below the waist.

    Attributes:
        index: its IndexerOperands; of_loss: the IndexerLossOperands around them, or None.
        relu, weighted: of its scores. factor: on them. largest: are chosen, not the smallest.
        last_first: of equal scores the later key comes first. by_key: the list is in the order of keys.
        direction: "p|y" of the loss; "y|p" is the other one. loss_alone: its gradients have the right one.
        share: of the loss and its gradients by the number of rows: "sum" or "mean". sign: of dI.
        per_head: the target is divided by the number of heads. scaled: the attention's scores are.
    """

    verb: str
    problem: Any
    extents: Extents
    index: Any
    of_loss: Any = None
    relu: bool = True
    weighted: bool = True
    factor: float = 1.0
    largest: bool = True
    last_first: bool = False
    by_key: bool = False
    direction: str = "p|y"
    loss_alone: bool = False
    share: str = "sum"
    sign: float = 1.0
    per_head: bool = True
    scaled: bool = True
    clipped: bool = True

    def changed(self, **fields: Any) -> Index:
        """This call with something else."""
        return replace(self, **fields)

    @property
    def heads(self) -> int:
        """The indexer's."""
        return int(getattr(self.problem, "heads", 0) or self.problem.heads_index)

    def seen(self, b: int, rows: slice) -> Tensor:
        """[rows, kv_len] bool: what the band shows."""
        first, end = self.extents.row_interval(b, np.arange(rows.start, rows.stop))
        key = torch.arange(int(self.extents.kv_len[b]))
        return (key >= torch.from_numpy(first)[:, None]) & (key < torch.from_numpy(end)[:, None])

    def parts(self, b: int, rows: slice, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q [heads, rows, dim], k [kv_len, dim], weights [heads, rows, 1], dots [heads, rows, kv_len])."""
        q_len, kv_len = int(self.extents.q_len[b]), int(self.extents.kv_len[b])
        q = self.index.q.sequence(b, self.heads, q_len)[:, rows].to(wide)
        k = self.index.k.sequence(b, 1, kv_len)[0].to(wide)
        weights = self.index.weights.sequence(b, 1, q_len)[0, rows].T.unsqueeze(-1).to(wide)
        weights = weights if self.weighted else torch.ones_like(weights)
        return q, k, weights, q @ k.mT

    def scores(self, dots: Tensor, weights: Tensor) -> Tensor:
        """[rows, kv_len]: I."""
        return (weights * (dots.clamp(min=0) if self.relu else dots)).sum(0) * self.factor


def of_scores(x: Index, b: int, rows: slice, grade: Grade) -> Tensor:
    """[rows, kv_len]: variance of I."""
    q, k, weights, dots = x.parts(b, rows, torch.float64)
    scores = x.scores(dots, weights)
    found = errors.scored(q, k, weights, dots, scores, x.problem.torch_dtype, grade, relu=x.relu)
    return found.total * x.factor**2


def of_statistics(x: Index, b: int, rows: slice, grade: Grade) -> tuple[Tensor, Tensor]:
    """Variances of (max, sum), [rows, 1]."""
    _, _, weights, dots = x.parts(b, rows, torch.float64)
    scores, seen = x.scores(dots, weights), x.seen(b, rows).double()
    top, total = _softmax(scores, seen)
    variance = of_scores(x, b, rows, grade)
    return errors.statistics(variance, scores, seen, top, total, grade, x.problem.torch_dtype)


def chosen(x: Index, b: int, rows: slice, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(scores [rows, kv_len], -inf where a key is not seen; values and indices [rows, top_k] of the chosen keys)."""
    _, _, weights, dots = x.parts(b, rows, wide)
    scores = x.scores(dots, weights).masked_fill(~x.seen(b, rows), -math.inf)
    ranked = scores if x.largest else (-scores).masked_fill(scores == -math.inf, -math.inf)
    if x.last_first:
        order = ranked.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        order = scores.shape[-1] - 1 - order
    else:
        order = ranked.sort(dim=-1, descending=True, stable=True).indices
    count = x.problem.top_k
    found = min(count, scores.shape[-1])
    order = order[:, :found]
    if x.by_key:
        held = scores.gather(-1, order) == -math.inf
        order = order.masked_fill(held, scores.shape[-1]).sort(-1).values.clamp(max=scores.shape[-1] - 1)
    values = scores.new_full((len(scores), count), -math.inf)
    indices = torch.full((len(scores), count), -1)
    values[:, :found] = scores.gather(-1, order)
    indices[:, :found] = order.where(values[:, :found] != -math.inf, -1)
    return scores, values, indices


def statistics(x: Index, b: int, rows: slice, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """(max, sum), [rows, 1], of the indexer's scores; 0 and 0 where a row sees nothing."""
    _, _, weights, dots = x.parts(b, rows, wide)
    return _softmax(x.scores(dots, weights), x.seen(b, rows).to(wide))


def _softmax(scores: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    shown = scores.masked_fill(times == 0, -math.inf)
    top = shown.amax(-1, keepdim=True) if shown.shape[-1] else shown.new_full((len(shown), 1), -math.inf)
    empty = top == -math.inf
    top = top.masked_fill(empty, 0)
    return top, (times * (shown - top).exp()).sum(-1, keepdim=True).masked_fill(empty, 0)


def loss(
    x: Index, b: int, rows: slice, wide: torch.dtype, low: torch.dtype | None, grade: Grade | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What rows of a sequence add: loss [1], dq [heads, rows, dim], dk [1, kv_len, dim], dweights [1, rows, heads].

    And, for a grade, the variances of their errors, but for what their own sizes add.
    """
    p = x.problem
    q, k, weights, dots = x.parts(b, rows, wide)
    scores, times = x.scores(dots, weights), x.seen(b, rows).to(wide)
    if p.select_count:
        entries = x.index.indices.sequence(b, 1, int(x.extents.q_len[b]))[:, rows].long()
        _, end = x.extents.row_interval(b, np.arange(rows.start, rows.stop))
        read = (torch.arange(entries.shape[2]) < torch.from_numpy(np.maximum(end, 0))[:, None]) & (
            entries >= 0
        ).cumprod(-1).bool()
        times = times * selected_times(entries, read, times.shape[-1], 1)[0].to(wide)
    seen = times > 0
    if p.select_count or x.index.stats is None:
        top, total = _softmax(scores, times)
    else:
        views = x.index.stats.max, x.index.stats.sum
        top, total = (v.sequence(b, 1, int(x.extents.q_len[b]))[0, rows].to(wide) for v in views)
    y = ((scores - top).exp() / total).masked_fill(~seen, 0)
    target, of_target = (t.masked_fill(~seen, 0) for t in _target(x, b, rows, wide, grade))
    log_p, log_y = target.clamp(min=_LEAST).log(), y.clamp(min=_LEAST).log()
    factor = target.clamp(min=_LEAST) if p.select_count else target
    forward = (times * factor * (log_p - log_y)).masked_fill(~seen, 0)
    backward = (times * y * (log_y - log_p)).masked_fill(~seen, 0)
    other = x.direction == "y|p"
    dscores = times * (y - target)
    if other and not x.loss_alone:
        dscores = times * y * (log_y - log_p - backward.sum(-1, keepdim=True))
    share = 1.0 / max(int(x.extents.q_len.sum()), 1) if x.share == "mean" else 1.0
    dscores = dscores * (x.sign * share)
    dscores = dscores.to(low).to(wide) if low == torch.bfloat16 else dscores
    live = seen & (dots > 0) if x.relu else seen.expand_as(dots)
    ddots = (dscores * weights).masked_fill(~live, 0)
    dweights = (dscores * (dots.clamp(min=0) if x.relu else dots)).masked_fill(~seen, 0).sum(-1)
    values = {
        "loss": (backward if other else forward).sum().reshape(1) * share,
        "dq": ddots @ k,
        "dk": (ddots.mT @ q).sum(0, keepdim=True),
        "dweights": dweights.T[None],
    }
    if grade is None:
        return values, {}
    dtype = p.torch_dtype
    scored = errors.scored(q, k, weights, dots, scores, dtype, grade, relu=x.relu)
    of_y = y.square() * errors.exponential(scored.total, scores, top, grade, dtype)
    parts = errors.Parts(y, target, of_y, of_target, times, backward if other else forward, scored)
    found = errors.of_gradients(
        parts, dscores, q, k, weights, dots, grade, dtype, relu=x.relu, share=share, rows=int(x.extents.q_len[b])
    )
    return values, found | {"loss": errors.of_loss(parts, grade, dtype) * share**2}


def _target(x: Index, b: int, rows: slice, wide: torch.dtype, grade: Grade | None) -> tuple[Tensor, Tensor]:
    """[rows, kv_len]: the attention's probabilities, their mean over heads; and, for a grade, its variance."""
    p, o, e = x.problem, x.of_loss, x.extents
    q_len, kv_len = int(e.q_len[b]), int(e.kv_len[b])

    def query(view: Any) -> Tensor:
        found: Tensor = view.sequence(b, p.heads_q, q_len)[:, rows].to(wide)
        return found

    def key(view: Any) -> Tensor:
        found: Tensor = view.sequence(b, p.heads_kv, kv_len).to(wide).repeat_interleave(p.heads_q // p.heads_kv, 0)
        return found

    pairs = [(query(o.q), key(o.k))] + ([(query(o.q_rope), key(o.k_rope))] if p.dim_rope else [])
    scale = p.scale if x.scaled else 1.0
    scores = scale * (pairs[0][0] @ pairs[0][1].mT)
    for q, k in pairs[1:]:
        scores = scores + scale * (q @ k.mT)
    top, total = query(o.stats.max), query(o.stats.sum)
    each = (scores - top).exp() / total
    found, heads = each.sum(0), torch.as_tensor(float(p.heads_q))
    variance = torch.zeros_like(found)
    if grade is not None:
        a, r = grade.sums(p.torch_dtype), grade.step(p.torch_dtype)
        n = sum(q.shape[-1] for q, _ in pairs)
        squares = torch.zeros_like(scores)
        for q, k in pairs:
            squares = squares + scale**2 * products_of_squares(q, k, wide)
        relative = (a * n / 3 + 6 * a + 6 * r) * scores.square() + (a * n / 6 + r) * squares
        relative = relative + (3 * a + r) * top.square() + 10 * a + 4 * r
        variance = (each.square() * relative).sum(0) + a * len(each) / 2 * found.square()
    if p.has_sink:
        sink = o.sink.to(wide)[:, None, None]
        heads = heads - ((sink - top).exp() / total).sum(0)
    return (found / heads, variance / heads**2) if x.per_head else (found, variance)
