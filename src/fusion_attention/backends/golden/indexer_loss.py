"""The indexer's softmax statistics, and its Kullback-Leibler loss against attention, in float64.

This module builds complete score matrices. Sums are over the entries of a list, so a token that is listed several times
counts several times. Keys that are not visible, or not selected, never reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fusion_attention.backends.golden.attention import weighted_sum
from fusion_attention.backends.golden.indexer import dots_of
from fusion_attention.backends.golden.sparse_indices import added_up, scanned
from fusion_attention.ir.memory_views import PagedView, RowView
from fusion_attention.ir.problem import (
    Extents,
    IndexerGrads,
    IndexerLossOperands,
    IndexerLossProblem,
    IndexerOperands,
    IndexerProblem,
)

Tensor = torch.Tensor
_INF = float("inf")
_LEAST = 1e-8  # lower bound of probabilities in the logarithms


@dataclass(frozen=True, eq=False)
class _Scores:
    """An indexer's inputs for one sequence, products q . k (dots), and scores I = sum_h w_h * max(0, dots) (total)."""

    q: Tensor  # [heads, q_len, dim]
    k: Tensor  # [1, kv_len, dim]
    weights: Tensor  # [heads, q_len, 1]
    dots: Tensor  # [heads, q_len, kv_len]
    total: Tensor  # [q_len, kv_len]: I


def _scores(operands: IndexerOperands, extents: Extents, b: int, heads: int) -> _Scores:
    q, k, weights, dots = dots_of(heads, extents, operands, b)
    return _Scores(q, k, weights, dots, (weights * dots.clamp(min=0)).sum(0))


def _shown(extents: Extents, b: int, ratio: int, device: torch.device) -> Tensor:
    """Returns float64 [q_len, kv_len] of sequence b: 1 for keys that a row sees, else 0; ratio: tokens per key."""
    edges = extents.row_interval(b, np.arange(extents.q_len[b]), ratio)
    first, end = (torch.from_numpy(edge).to(device)[:, None] for edge in edges)
    key = torch.arange(int(extents.kv_len[b]), device=device)
    return ((key >= first) & (key < end)).double()


def _statistics(scores: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (max, sum) [q_len, 1] of a softmax of scores [q_len, kv_len] that counts each key `times` [q_len,
    kv_len]; (-inf, 0) for a row without keys."""
    masked = scores.where(times > 0, -_INF)
    row_max = torch.cat((masked, masked.new_full((len(masked), 1), -_INF)), -1).amax(-1, keepdim=True)
    row_sum = (times * (masked - row_max).exp()).where(times > 0, 0).sum(-1, keepdim=True)
    return row_max, row_sum.where(row_max != -_INF, 0)


@torch.no_grad()
def indexer_lse(problem: IndexerProblem, extents: Extents, schedule: None, operands: IndexerOperands) -> None:
    """Writes max and sum of exp(I_j - max) of each row's indexer scores I over visible keys; -inf and 0 without any."""
    assert operands.stats is not None
    for b in range(len(extents)):
        scores = _scores(operands, extents, b, problem.heads).total
        result = _statistics(scores, _shown(extents, b, problem.ratio, scores.device))
        for view, values in zip((operands.stats.max, operands.stats.sum), result, strict=True):
            view.sequence(b, 1, len(scores)).copy_(values)


def _times(problem: IndexerLossProblem, extents: Extents, operands: IndexerLossOperands, b: int) -> Tensor:
    """Returns float64 [q_len, kv_len] of sequence b: how often each row's list contains each key (without lists 1); 0
    for keys that the row does not see."""
    shown = _shown(extents, b, problem.ratio, operands.loss.device)
    if not problem.select_count:
        return shown
    assert operands.index.indices is not None
    _, end = extents.row_interval(b, np.arange(len(shown)), problem.ratio)
    entries, read = scanned(operands.index.indices, end, b, 1, 1)
    return added_up(read.double(), entries, read, shown.shape[1])[0] * shown


def _target(
    problem: IndexerLossProblem, extents: Extents, operands: IndexerLossOperands, b: int, times: Tensor
) -> Tensor:
    """Returns p [q_len, kv_len] of sequence b: the mean over heads of the attention's probabilities, from its saved max
    and sum; 0 where `times` (how often each key counts) is 0."""
    p, (q_len, kv_len) = problem, times.shape
    assert operands.q is not None
    assert operands.k is not None
    assert operands.stats is not None

    def query(view: RowView) -> Tensor:
        return view.sequence(b, p.heads_q, q_len).double()

    def key(view: RowView | PagedView) -> Tensor:
        return view.sequence(b, p.heads_kv, kv_len).double().repeat_interleave(p.heads_q // p.heads_kv, 0)

    scores = query(operands.q) @ key(operands.k).mT
    if p.dim_rope:
        assert operands.q_rope is not None
        assert operands.k_rope is not None
        scores = scores + query(operands.q_rope) @ key(operands.k_rope).mT
    row_max, row_sum = query(operands.stats.max), query(operands.stats.sum)
    probabilities = ((p.scale * scores - row_max).exp() / row_sum).where(times > 0, 0)
    heads = torch.full_like(row_max[0], p.heads_q)
    if p.has_sink:
        assert operands.sink is not None
        heads = heads - ((operands.sink.double()[:, None, None] - row_max).exp() / row_sum).sum(0)
    return probabilities.sum(0) / heads


def _attended(
    problem: IndexerLossProblem, extents: Extents, operands: IndexerLossOperands, b: int, y: Tensor, times: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (loss, dI [q_len, kv_len]) of sequence b with the attention's probabilities as target; y: the indexer's
    probabilities; times: how often each key counts (0: hidden); both [q_len, kv_len]."""
    visible = times > 0
    p = _target(problem, extents, operands, b, times).where(visible, 0)
    factor = p.clamp(min=_LEAST) if problem.select_count else p
    losses = factor * (p.clamp(min=_LEAST).log() - y.clamp(min=_LEAST).log())
    return (times * losses).where(visible, 0).sum(), times * (y - p)


def _entries(
    problem: IndexerLossProblem, extents: Extents, operands: IndexerLossOperands, b: int, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (key, read), both [q_len, entries] like `target`, of sequence b: the key of each element of the target
    (of the row's list, or all keys in order), and true if the row reads it."""
    if not problem.select_count:
        key = torch.arange(target.shape[1], device=target.device).expand(len(target), -1)
        return key, key >= 0
    assert operands.index.indices is not None
    _, end = extents.row_interval(b, np.arange(len(target)), problem.ratio)
    entries, read = scanned(operands.index.indices, end, b, 1, 1)
    return entries[0], read[0]


def _given(
    problem: IndexerLossProblem, extents: Extents, operands: IndexerLossOperands, b: int, y: Tensor, times: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (loss, dI [q_len, kv_len]) of sequence b for the target that the caller passes (operands.target); also
    writes the indexer's probability of each element of the target, if operands.index.values is given.

    y: the indexer's probabilities; times: how often each key counts; both [q_len, kv_len].
    """
    assert operands.target is not None
    q_len, kv_len = y.shape
    target = operands.target.sequence(b, 1, q_len)[0].double()
    key, read = _entries(problem, extents, operands, b, target)
    key = key.clamp(0, kv_len)  # of_elements() appends a key kv_len that counts 0 times

    def of_elements(matrix: Tensor) -> Tensor:
        return torch.cat((matrix, matrix.new_zeros(q_len, 1)), 1).gather(1, key)

    read = read & (of_elements(times) > 0)
    p, y = target.where(read, 0), of_elements(y).where(read, 0)
    losses = (p * (p.clamp(min=_LEAST).log() - y.clamp(min=_LEAST).log())).where(read, 0)
    if operands.index.values is not None:
        operands.index.values.sequence(b, 1, q_len).copy_(y[None])
    mass = 1 if problem.unit_target else p.sum(-1, keepdim=True)
    return losses.sum(), added_up((y * mass - p)[None], key[None], read[None], kv_len)[0]


@torch.no_grad()
def indexer_loss(
    problem: IndexerLossProblem, extents: Extents, schedule: None, operands: IndexerLossOperands, grads: IndexerGrads
) -> None:
    """Writes the loss sum_j p_j (ln p_j - ln y_j) of target p, indexer's softmax y, and dq, dk, dweights; dI = y - p:

    dw_h = sum_j dI_j * max(0, S_hj), dS = dI * w * [S > 0], dq = dS k, dk = sum_h dS^T q, S = q . k
    """
    total = torch.zeros((), dtype=torch.float64, device=operands.loss.device)
    for b in range(len(extents)):
        s = _scores(operands.index, extents, b, problem.heads_index)
        times = _times(problem, extents, operands, b)
        visible = times > 0
        q_len, kv_len = times.shape
        if problem.select_count:
            row_max, row_sum = _statistics(s.total, times)
        else:
            saved = operands.index.stats
            assert saved is not None
            row_max, row_sum = (view.sequence(b, 1, q_len)[0].double() for view in (saved.max, saved.sum))
        y = ((s.total - row_max).exp() / row_sum).where(visible, 0)
        loss, dscores = (_given if problem.has_target else _attended)(problem, extents, operands, b, y, times)
        total += loss
        live = visible & (s.dots > 0)
        ddots = (dscores * s.weights).where(live, 0)
        dweights = (dscores * s.dots.clamp(min=0)).where(visible, 0).sum(-1)
        grads.dweights.sequence(b, 1, q_len).copy_(dweights.T[None])
        dq = weighted_sum(ddots, live, s.k.expand(problem.heads_index, -1, -1))
        grads.dq.sequence(b, problem.heads_index, q_len).copy_(dq)
        dk = weighted_sum(ddots.mT, live.mT, s.q).sum(0, keepdim=True)
        grads.dk.sequence(b, 1, kv_len).copy_(dk)
    operands.loss.copy_(total.expand(1))
