"""The lightning indexer (scores keys, selects the top_k per row) and its gradients in float64, like the formulas.

This module builds complete score matrices and sorts complete rows. Keys that are not visible, or not selected, never
reach a result.
"""

import numpy as np
import torch

from fusion_attention.backends.golden.attention import weighted_sum
from fusion_attention.backends.golden.sparse_indices import added_up, scanned
from fusion_attention.ir.problem import Extents, IndexerGrads, IndexerOperands, IndexerProblem

_INF = float("inf")


def dots_of(
    heads: int, extents: Extents, operands: IndexerOperands, b: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (q, k, weights, q . k) of the indexer for sequence b, in float64.

    Their shapes are [heads, q_len, dim], [1, kv_len, dim], [heads, q_len, 1] and [heads, q_len, kv_len].
    """
    q_len, kv_len = int(extents.q_len[b]), int(extents.kv_len[b])
    q = operands.q.sequence(b, heads, q_len).double()
    k = operands.k.sequence(b, 1, kv_len).double()
    weights = operands.weights.sequence(b, 1, q_len).double()[0].T.unsqueeze(-1)
    return q, k, weights, q @ k.mT


@torch.no_grad()
def indexer_topk(problem: IndexerProblem, extents: Extents, schedule: None, operands: IndexerOperands) -> None:
    """Writes the indices, and the values, of the top_k largest scores I = sum_h w_h * max(0, q_h . k) of every row.

    Scores descend, equal ones by ascending index; NaN sorts before all numbers. A key with score -inf is not visible.
    """
    assert operands.indices is not None
    for b in range(len(extents)):
        _, _, weights, dots = dots_of(problem.heads, extents, operands, b)
        q_len, kv_len = dots.shape[1:]
        edges = extents.row_interval(b, np.arange(q_len), problem.ratio)
        first, end = (torch.from_numpy(edge).to(dots.device)[:, None] for edge in edges)
        key = torch.arange(kv_len, device=dots.device)
        scores = (weights * dots.clamp(min=0)).sum(0).where((key >= first) & (key < end), -_INF)
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        result = min(problem.top_k, kv_len)
        indices = order.new_full((q_len, problem.top_k), -1)
        values = scores.new_full((q_len, problem.top_k), -_INF)
        values[:, :result] = scores[:, :result]
        indices[:, :result] = order[:, :result].where(values[:, :result] != -_INF, -1)
        operands.indices.sequence(b, 1, q_len).copy_(indices)
        if operands.values is not None:
            operands.values.sequence(b, 1, q_len).copy_(values)


@torch.no_grad()
def indexer_backward(
    problem: IndexerProblem, extents: Extents, schedule: None, operands: IndexerOperands, grads: IndexerGrads
) -> None:
    """Writes an indexer's dq, dk and dweights; dI_j: sum of dvalues (of selected scores) over the list entries j.

    dw_h = sum_j dI_j * max(0, S_hj), dS = dI * w * [S > 0], dq = dS k, dk = sum_h dS^T q, S = q . k
    """
    assert operands.indices is not None
    assert grads.dvalues is not None
    for b in range(len(extents)):
        q, k, weights, dots = dots_of(problem.heads, extents, operands, b)
        heads, q_len, kv_len = dots.shape
        _, end = extents.row_interval(b, np.arange(q_len), problem.ratio)
        entries, read = scanned(operands.indices, end, b, 1, 1)
        read = read & (entries < torch.from_numpy(end).to(q.device)[:, None])
        dvalues = grads.dvalues.sequence(b, 1, q_len).double()
        chosen = added_up(read.double(), entries, read, kv_len) > 0  # [1, q_len, kv_len]
        dscores = added_up(dvalues, entries, read, kv_len)
        dweights = (dscores * dots.clamp(min=0)).where(chosen, 0).sum(-1)  # [heads, q_len]
        live = chosen & (dots > 0)
        ddots = (dscores * weights).where(live, 0)
        grads.dweights.sequence(b, 1, q_len).copy_(dweights.T[None])
        grads.dq.sequence(b, heads, q_len).copy_(weighted_sum(ddots, live, k.expand(heads, -1, -1)))
        dk = weighted_sum(ddots.mT, live.mT, q).sum(0, keepdim=True)
        grads.dk.sequence(b, 1, kv_len).copy_(dk)
