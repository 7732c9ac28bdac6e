"""Computes the indexer and its loss for some rows, in any precision; fields of a call (Index) reproduce mistakes.

Tests compare these formulas with the golden back end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fusion_attention.backends.golden.attention import weighted_sum
from fusion_attention.backends.golden.sparse_indices import added_up
from fusion_attention.ir.problem import Extents
from fusion_attention.judging.expected_error import products_of_squares

Tensor = torch.Tensor
_LEAST = 1e-8


@dataclass(frozen=True, eq=False)
class Index:
    """A call of an indexer (it scores and selects keys), its softmax statistics or its loss, with fields that reproduce
    mistakes of kernels."""

    # op_kind, problem, extents: the kind of call, its parameters, and lengths and mask bands of sequences.
    op_kind: str
    problem: Any
    extents: Extents
    index: Any  # the indexer's tensors q, k, weights (IndexerOperands)
    of_loss: Any = None  # the loss's tensors (IndexerLossOperands), which include these, or None
    grads: Any = None  # memory of gradients, of a backward
    own_statistics: bool = False  # True if the call computes the softmax statistics; else they are inputs
    # relu, weighted: False to omit max(0, .) or the head weights from scores.
    relu: bool = True
    weighted: bool = True
    factor: float = 1.0  # factor on scores
    largest: bool = True  # False to select the smallest scores
    last_first: bool = False  # True to list the later one of two keys with equal scores first
    by_key: bool = False  # True to list keys in their order
    direction: str = "p|y"  # of the divergence, "p|y", or (wrong) "y|p"
    loss_alone: bool = False  # True if only the loss has the wrong direction, not its gradients
    reduction: str = "sum"  # of the loss and its gradients over rows: "sum" or "mean"
    sign: float = 1.0  # sign of dI
    per_head: bool = True  # False if the target is not divided by the number of heads
    scaled: bool = True  # False if the attention's scores are not scaled
    weights_from: int = 0  # head h uses the weight of head h + weights_from
    unread: tuple[int, int] = (0, 0)  # (first, end) of keys that are never chosen
    shorter: int = 0  # number of entries that are missing at the end of full lists

    @property
    def heads(self) -> int:
        """The number of the indexer's heads."""
        return int(getattr(self.problem, "heads", 0) or self.problem.heads_index)

    def visible(self, b: int, rows: slice) -> Tensor:
        """Returns bool [rows, kv_len], true for keys within the mask's band of the query rows `rows` of sequence b."""
        first, end = self.extents.row_interval(b, np.arange(rows.start, rows.stop), self.problem.ratio)
        key = torch.arange(int(self.extents.kv_len[b]))
        unread = (key >= self.unread[0]) & (key < self.unread[1])
        return (key >= torch.from_numpy(first)[:, None]) & (key < torch.from_numpy(end)[:, None]) & ~unread

    def stored(self, kind: str) -> torch.dtype:
        """Returns the dtype in which the call returns an output of a kind ("dq", "values", "max", ...)."""
        p = self.problem
        names = {
            "dweights": p.weights_dtype,
            "values": "float32" if getattr(p, "wide_values", False) and p.dtype != "float64" else p.dtype,
        }
        if kind in ("max", "sum", "loss", "y"):
            return torch.float64 if p.dtype == "float64" and kind != "loss" else torch.float32
        return getattr(torch, names.get(kind, p.dtype))

    def scored(self, b: int, rows: slice, dtype: torch.dtype) -> Scored:
        """Returns products q . k and index scores of a range of query rows of sequence b with all keys, in `dtype`."""
        q_len, kv_len = int(self.extents.q_len[b]), int(self.extents.kv_len[b])
        q = self.index.q.sequence(b, self.heads, q_len)[:, rows].to(dtype)
        k = self.index.k.sequence(b, 1, kv_len)[0].to(dtype)
        weights = self.index.weights.sequence(b, 1, q_len)[0, rows].T.unsqueeze(-1).to(dtype)
        weights = weights.roll(-self.weights_from, 0) if self.weighted else torch.ones_like(weights)
        dots = q @ k.mT
        activations = dots.clamp(min=0) if self.relu else dots
        return Scored(
            q, k, weights, dots, activations, (weights * activations).sum(0) * self.factor, self.factor, self.relu
        )


@dataclass(frozen=True, eq=False)
class Scored:
    """An indexer's scores of some query rows over all keys.
    q [heads, rows, dim], k [keys, dim], weights [heads, rows, 1], dots = q . k [heads, rows, keys], activations =
    max(0, dots), scores = sum over heads of weights * activations [rows, keys]."""

    q: Tensor
    k: Tensor
    weights: Tensor
    dots: Tensor
    activations: Tensor
    scores: Tensor
    factor: float
    relu: bool


def chosen(x: Index, s: Scored, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Selects the top_k keys of each row by the indexer's scores `s`; visible: bool [rows, kv_len]; x has the order of
    ties. Returns scores [rows, kv_len], -inf for an invisible key; scores and indices of the selected keys [rows,
    top_k]."""
    scores = s.scores.masked_fill(~visible, -math.inf)
    ranked = scores if x.largest else (-scores).masked_fill(scores == -math.inf, -math.inf)
    if x.last_first:
        order = ranked.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        order = scores.shape[-1] - 1 - order
    else:
        order = ranked.sort(dim=-1, descending=True, stable=True).indices
    count = x.problem.top_k
    result = min(count - x.shorter, scores.shape[-1])
    order = order[:, :result]
    if x.by_key:
        is_hidden = scores.gather(-1, order) == -math.inf
        order = order.masked_fill(is_hidden, scores.shape[-1]).sort(-1).values.clamp(max=scores.shape[-1] - 1)
    values = scores.new_full((len(scores), count), -math.inf)
    indices = torch.full((len(scores), count), -1)
    values[:, :result] = scores.gather(-1, order)
    indices[:, :result] = order.where(values[:, :result] != -math.inf, -1)
    return scores, values, indices


def softmax(scores: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (max, sum of times * exp(score - max)), both [rows, 1], of scores [rows, keys]; 0 and 0 without keys.
    times: how often each key counts, [rows, keys]."""
    shown = scores.masked_fill(times == 0, -math.inf)
    top = shown.amax(-1, keepdim=True) if shown.shape[-1] else shown.new_full((len(shown), 1), -math.inf)
    empty = top == -math.inf
    top = top.masked_fill(empty, 0)
    return top, (times * (shown - top).exp()).masked_fill(times == 0, 0).sum(-1, keepdim=True).masked_fill(empty, 0)


@dataclass(frozen=True, eq=False)
class Attended:
    """The attention's probabilities for some query rows, from which the target of an indexer's loss is made."""

    scores: Tensor  # [heads, rows, keys]
    squares: Tensor  # sum of the squares of a score's dim terms, [heads, rows, keys]
    dim: int  # number of terms of a score
    lse: Tensor  # [heads, rows, 1]
    shares: Tensor  # probabilities of each head, [heads, rows, keys]
    divisor: Tensor  # [rows, 1]: number of heads, without the sinks' probabilities
    target: Tensor  # sum of the heads' probabilities / divisor, [rows, keys]
    at_sinks: Tensor | None  # the sinks' probabilities [heads, rows, 1], or None


@dataclass(frozen=True, eq=False)
class Compared:
    """The two distributions that an indexer's loss compares, for some query rows: y of the indexer and the target p,
    both [rows, keys]."""

    # scored, attended: the indexer's scores; the attention's probabilities, None if the target is an operand.
    scored: Scored
    attended: Attended | None
    times: Tensor  # how often a row selects a key, [rows, keys]
    # top, total: maximum and sum of the indexer's softmax, [rows, 1].
    top: Tensor
    total: Tensor
    own_statistics: bool  # True if the call computes top and total; else they are inputs
    y: Tensor
    p: Tensor
    logs: tuple[Tensor, Tensor]  # (log p, log y)
    losses: Tensor  # contributions to the loss, [rows, keys]
    dscores: Tensor  # dI, the gradient of the indexer's scores, [rows, keys]
    # by_y, by_p: derivatives of dI by log y and by p.
    by_y: Tensor
    by_p: Tensor
    # loss_by_y, loss_by_p: derivatives of the loss by log y and by p.
    loss_by_y: Tensor
    loss_by_p: Tensor
    given: Given | None = None  # the target, if it is an operand


@dataclass(frozen=True, eq=False)
class Given:
    """The target distribution of an indexer's loss that is an argument of the call, for some query rows."""

    p: Tensor  # [rows, elements]: the probabilities; 0 for elements that the operator does not read
    key: Tensor  # [rows, elements]: the index of each element's key; the number of keys for an element without a key
    read: Tensor  # [rows, elements], bool: true for elements that the operator reads
    mass: Tensor  # [rows, 1]: sum of p, or 1 if `unit`
    unit: bool  # True if p counts as a distribution that sums to 1
    # [rows, keys]: sum of dI^2, the squared gradients of the indexer's scores, over the elements of a key.
    squares: Tensor

    def of_elements(self, matrix: Tensor) -> Tensor:
        """Returns a matrix [rows, keys] at the keys of the target's elements, [rows, elements]; 0 where not read."""
        extended = torch.cat((matrix, matrix.new_zeros(len(matrix), 1)), 1)
        return extended.gather(1, self.key).masked_fill(~self.read, 0)


def compared(x: Index, b: int, rows: slice, dtype: torch.dtype, low: torch.dtype | None = None) -> Compared:
    """Returns the two distributions [rows, keys] that an indexer's loss compares, the indexer's and the target, for
    rows of sequence b. dtype: of the computation. low: bfloat16 if the call rounds dI, the gradient of the scores, also
    a result."""
    p, s = x.problem, x.scored(b, rows, dtype)
    times = x.visible(b, rows).to(dtype)
    if p.select_count:
        entries, read = _entries(x, b, rows)
        times = times * added_up(read.to(dtype), entries, read, times.shape[-1])[0]
    visible, own_statistics = times > 0, bool(p.select_count) or x.index.stats is None
    if own_statistics:
        top, total = softmax(s.scores, times)
    else:
        views = x.index.stats.max, x.index.stats.sum
        top, total = (v.sequence(b, 1, int(x.extents.q_len[b]))[0, rows].to(dtype) for v in views)
    y = ((s.scores - top).exp() / total).masked_fill(~visible, 0)
    if p.has_target:
        own_statistics = own_statistics or x.own_statistics
        begun = {"scored": s, "attended": None, "times": times, "top": top, "total": total, "y": y}
        return _compared_to_given(x, b, rows, {**begun, "own_statistics": own_statistics})
    a = _attended(x, b, rows, dtype)
    target = a.target.masked_fill(~visible, 0)
    log_p, log_y = target.clamp(min=_LEAST).log(), y.clamp(min=_LEAST).log()
    factor = target.clamp(min=_LEAST) if p.select_count else target
    divisor_share = 1.0 / max(int(x.extents.q_len.sum()), 1) if x.reduction == "mean" else 1.0
    times = (times * divisor_share).masked_fill(~visible, 0)
    high_p, high_y = target >= _LEAST, y >= _LEAST
    losses, of_y = times * factor * (log_p - log_y), -times * factor * high_y
    of_p = times * ((log_p - log_y) * (high_p if p.select_count else 1.0) + high_p)
    dscores, by_y, by_p = times * (y - target), times * y, -times
    if x.direction == "y|p":
        away, of_target = times * y * (log_y - log_p), -times * y / target.clamp(min=_LEAST) * high_p
        losses, of_y, of_p = away, away + times * y * high_y, of_target
        if not x.loss_alone:
            dscores = times * y * (log_y - log_p - away.sum(-1, keepdim=True) / divisor_share)
            by_y, by_p = dscores + times * y, of_target
    dscores = dscores * x.sign
    dscores = dscores.to(low).to(dtype) if low == torch.bfloat16 else dscores
    results = (losses, dscores, by_y, by_p, of_y, of_p)
    results = tuple(t.masked_fill(~visible, 0) for t in results)  # type: ignore[assignment]
    own_statistics = own_statistics or x.own_statistics
    return Compared(s, a, times / divisor_share, top, total, own_statistics, y, target, (log_p, log_y), *results)


def _compared_to_given(x: Index, b: int, rows: slice, begun: dict[str, Any]) -> Compared:
    """Compares an indexer's distribution of keys with a target that is an argument, for a range of rows of sequence b;
    begun: fields of the result that are computed already."""
    times, of_y = begun["times"], begun["y"]
    dtype, kv_len = of_y.dtype, of_y.shape[1]
    target = x.of_loss.target.sequence(b, 1, int(x.extents.q_len[b]))[0, rows].to(dtype)
    key, read = torch.arange(target.shape[1]).expand(len(target), -1), torch.ones_like(target, dtype=torch.bool)
    if x.problem.select_count:
        key, read = (t[0] for t in _entries(x, b, rows))
    g = Given(target, key.clamp(0, kv_len), read, target, x.problem.unit_target, target)
    g = replace(g, read=g.of_elements(times) > 0)
    p = target.masked_fill(~g.read, 0)
    mass = torch.ones_like(p[:, :1]) if g.unit else p.sum(-1, keepdim=True)
    y = g.of_elements(of_y)
    log_p, log_y = p.clamp(min=_LEAST).log(), y.clamp(min=_LEAST).log()
    each = (p, p * (log_p - log_y), (y * mass - p).square(), -p * (y >= _LEAST))
    summed = [added_up(t[None], g.key[None], g.read[None], kv_len)[0] for t in each]
    divisor_share = 1.0 / max(int(x.extents.q_len.sum()), 1) if x.reduction == "mean" else 1.0
    of_keys, losses, squares, by_log = (t * divisor_share for t in summed)
    by_y = (times * of_y * mass * divisor_share).masked_fill(times == 0, 0)
    mean = summed[0] / times.clamp(min=1)
    none = torch.zeros_like(mean)
    return Compared(
        **begun,
        p=mean,
        logs=(mean.clamp(min=_LEAST).log(), of_y.clamp(min=_LEAST).log()),
        losses=losses,
        dscores=(by_y - of_keys) * x.sign,
        by_y=by_y,
        by_p=none,
        loss_by_y=by_log,
        loss_by_p=none,
        given=replace(g, p=p, mass=mass, squares=squares * divisor_share),
    )


def _entries(x: Index, b: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Returns (selected key indices, bool: read entries) of a range of rows of sequence b, both [1, rows, entries]."""
    entries = x.index.indices.sequence(b, 1, int(x.extents.q_len[b]))[:, rows].long()
    _, end = x.extents.row_interval(b, np.arange(rows.start, rows.stop), x.problem.ratio)
    within = torch.arange(entries.shape[2]) < torch.from_numpy(np.maximum(end, 0))[:, None]
    return entries, within & (entries >= 0).cumprod(-1).bool()


def given(x: Index, b: int, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dI, sum of squares of its terms, number of terms) for each key of sequence b, all [rows, keys]. dI, the
    gradient of a key's score, is the sum of the given gradients of the selected scores that belong to this key."""
    entries, read = _entries(x, b, rows)
    _, end = x.extents.row_interval(b, np.arange(rows.start, rows.stop), x.problem.ratio)
    kv_len = int(x.extents.kv_len[b])
    read = read & (entries < torch.from_numpy(end)[:, None]) & (entries < kv_len)
    dvalues = x.grads.dvalues.sequence(b, 1, int(x.extents.q_len[b]))[:, rows].to(dtype)
    dscores, squares, times = (
        added_up(t, entries, read, kv_len)[0] for t in (dvalues, dvalues.square(), read.to(dtype))
    )
    return dscores, squares, times


def gradients(s: Scored, dscores: Tensor, visible: Tensor) -> dict[str, Tensor]:
    """Returns the rows' contributions to an indexer's gradients: dq [heads, rows, dim], dk [1, keys, dim], dweights
    [1, rows, heads]. s: the rows' scores; dscores: the gradient dI of the scores, and visible: bool, both [rows, keys].

    S = q . k,  dw_h = sum_j dI_j max(0, S_hj),  dS = dI w [S > 0],  dq = dS k,  dk = sum_h dS^T q
    """
    live = visible & (s.dots > 0) if s.relu else visible.expand_as(s.dots)
    ddots = (dscores * s.weights).masked_fill(~live, 0)
    dweights = (dscores * s.activations).masked_fill(~visible, 0).sum(-1)
    if s.k.isfinite().all() and s.q.isfinite().all():
        dq, dk = ddots @ s.k, ddots.mT @ s.q
    else:
        dq = weighted_sum(ddots, live, s.k.expand(len(s.q), -1, -1))
        dk = weighted_sum(ddots.mT, live.mT, s.q)
    return {"dq": dq, "dk": dk.sum(0, keepdim=True), "dweights": dweights.T[None]}


def _attended(x: Index, b: int, rows: slice, dtype: torch.dtype) -> Attended:
    p, o, e = x.problem, x.of_loss, x.extents
    q_len, kv_len = int(e.q_len[b]), int(e.kv_len[b])

    def query(view: Any) -> Tensor:
        result: Tensor = view.sequence(b, p.heads_q, q_len)[:, rows].to(dtype)
        return result

    def key(view: Any) -> Tensor:
        result: Tensor = view.sequence(b, p.heads_kv, kv_len).to(dtype).repeat_interleave(p.heads_q // p.heads_kv, 0)
        return result

    pairs = [(query(o.q), key(o.k))] + ([(query(o.q_rope), key(o.k_rope))] if p.dim_rope else [])
    scale = p.scale if x.scaled else 1.0
    scores = scale * torch.stack([q @ k.mT for q, k in pairs]).sum(0)
    squares = scale**2 * torch.stack([products_of_squares(q, k, dtype) for q, k in pairs]).sum(0)
    top, total = query(o.stats.max), query(o.stats.sum)
    shares, divisor, at_sinks = (scores - top).exp() / total, torch.full_like(top[0], float(p.heads_q)), None
    if p.has_sink:
        at_sinks = (o.sink.to(dtype)[:, None, None] - top).exp() / total
        divisor = divisor - at_sinks.sum(0)
    divisor = divisor if x.per_head else torch.ones_like(divisor)
    lse, dim = top + total.log(), sum(q.shape[-1] for q, _ in pairs)
    return Attended(scores, squares, dim, lse, shares, divisor, shares.sum(0) / divisor, at_sinks)
