"""Attention and its gradients in float64, written like the formulas: the reference for all other back ends.

This module builds complete score matrices, and rounds only when it stores a result. The content of hidden keys never
reaches a result, and visible NaN and infinities propagate by the rules of IEEE 754. Clarity comes before speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from fusion_attention.backends.golden.sparse_indices import added_up, scanned
from fusion_attention.ir import bias
from fusion_attention.ir.dropout import keep_from_bits, keep_from_philox
from fusion_attention.ir.mask import blocked_by_tiles
from fusion_attention.ir.memory_views import Dequant, PagedView, RowView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem

_INF = float("inf")


@dataclass(frozen=True, eq=False)
class _Sequence:
    """Operands, scores and dropout of one sequence in float64; key and value heads are repeated to heads_q heads."""

    q: torch.Tensor  # [heads_q, q_len, dim_qk]
    k: torch.Tensor  # [heads_q, kv_len, dim_qk]
    v: torch.Tensor  # [heads_q, kv_len, dim_v]
    q_rope: torch.Tensor | None  # [heads_q, q_len, dim_rope]
    k_rope: torch.Tensor | None  # [heads_q, kv_len, dim_rope]
    in_band: torch.Tensor  # [q_len, 1] bool: the band has a key of the row, blocked or not
    scores: torch.Tensor  # [heads_q, q_len, kv_len]: -inf if and only if the key is not visible
    keep: torch.Tensor  # [heads_q, q_len, kv_len] bool: false for weights that dropout removes
    keep_factor: float  # factor on the other weights: 1 / keep_prob
    times: torch.Tensor  # [heads_q, q_len, kv_len], or one 1: how often the softmax counts a visible key
    slope: torch.Tensor | float  # [heads_q, q_len, kv_len]: derivative of a score by its product before the cap, or 1


def _kv_heads(problem: Problem, device: torch.device) -> torch.Tensor:
    """Returns the key head of each query head, int64 [heads_q]."""
    return torch.arange(problem.heads_q, device=device) // problem.group


def _visible(
    problem: Problem, extents: Extents, operands: Operands, b: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (visible [heads_q, q_len, keys], in_band [q_len, 1]) of sequence b, both bool; in_band: the row's
    interval (band) contains a key, masked or not. keys: those of the sequence, then its compressed ones."""
    q_len, kv_len = int(extents.q_len[b]), int(extents.kv_len[b])
    row = np.arange(q_len)
    first, end = (torch.from_numpy(edge).to(device)[:, None] for edge in extents.row_interval(b, row))
    key = torch.arange(extents.all_keys(b), device=device)
    visible = ((key >= first) & (key < end)).expand(problem.heads_q, -1, -1)
    if problem.compressed_ratio:
        bound = torch.from_numpy(extents.compressed_end(b, row, problem.compressed_ratio)).to(device)[:, None]
        visible = visible | ((key >= kv_len) & (key < kv_len + bound))
    if problem.has_blocked:
        assert operands.blocked is not None
        free = operands.blocked.sequence(b, problem.heads_q, q_len, kv_len) == 0
        visible = visible & F.pad(free, (operands.blocked.first_of(b), 0), value=True)
    if problem.has_blocked_tiles:
        assert operands.blocked_tiles is not None
        lengths = problem.heads_q, q_len, kv_len
        visible = visible & ~blocked_by_tiles(operands.blocked_tiles, operands.blocked_bits, b, *lengths)
    return visible, end > first


def _times(problem: Problem, extents: Extents, operands: Operands, b: int, device: torch.device) -> torch.Tensor:
    """Returns [heads_q, q_len, keys]: the number of times that each row's list of selected keys contains each key of
    sequence b; without lists, a single 1, [1, 1, 1]."""
    if not problem.select_count:
        return torch.ones(1, 1, 1, dtype=torch.float64, device=device)
    assert operands.indices is not None
    row, block, kv_len = np.arange(int(extents.q_len[b])), problem.select_block, int(extents.kv_len[b])
    if problem.compressed_ratio:
        assert extents.compressed is not None
        end, listed = extents.compressed_end(b, row, problem.compressed_ratio), int(extents.compressed.kv_len[b])
    else:
        end, listed = extents.row_interval(b, row)[1], kv_len
    entries, read = scanned(operands.indices, end, b, problem.heads_kv, block)
    times = added_up(read.double(), entries, read, -(-listed // block))
    # An entry selects all keys of its block; the band removes those after the row's last visible key.
    times = times.repeat_interleave(block, -1)[..., :listed]
    if problem.compressed_ratio:
        times = F.pad(times, (kv_len, 0), value=1.0)
    return times[_kv_heads(problem, device)]


def _bias(problem: Problem, extents: Extents, operands: Operands, b: int) -> torch.Tensor:
    """Returns the bias [heads_q, q_len, kv_len] of sequence b in float64, from a matrix, a table or ALiBi slopes."""
    lengths = int(extents.q_len[b]), int(extents.kv_len[b])
    rows, keys = slice(0, lengths[0]), slice(0, lengths[1])
    if problem.bias in ("slopes", "slopes_sqrt"):
        assert operands.slopes is not None
        root = problem.bias == "slopes_sqrt"
        return bias.from_slopes(operands.slopes[b].double(), int(extents.shift[b]), rows, keys, root)
    assert operands.bias is not None
    if problem.bias == "table":
        return bias.from_table(operands.bias, b, problem.heads_q, lengths, rows, keys).double()
    return bias.from_matrix(operands.bias, b, problem.heads_q, rows, keys).double()


def _keep(
    problem: Problem, extents: Extents, operands: Operands, b: int, device: torch.device
) -> tuple[torch.Tensor, float]:
    """Returns (bool [heads_q, q_len, keys], false for weights that dropout removes; factor on the other weights, 1 /
    keep_prob) of sequence b."""
    heads = problem.heads_q
    lengths = int(extents.q_len[b]), extents.all_keys(b)
    if problem.dropout == "none":
        return torch.ones(heads, *lengths, dtype=torch.bool, device=device), 1.0
    if problem.dropout == "bits":
        assert operands.drop_bits is not None
        keep = keep_from_bits(operands.drop_bits, b, heads, slice(0, lengths[0]), slice(0, lengths[1]))
    else:
        seed, offset = operands.seed, operands.offset
        stream, rows, keys = extents.drawn(b, heads)
        keep = keep_from_philox(seed, offset, problem.keep_prob, stream, heads, rows, keys)
    # The factor of a keep_prob below 1e-200 might overflow float64; results then underflow in float32.
    return keep.to(device), 1.0 / max(problem.keep_prob, 1e-200)


def _stored(problem: Problem, view: RowView | PagedView, b: int, length: int) -> torch.Tensor:
    """Returns the rows [heads_kv, length, dim] of sequence b in a view, in float64; stored integers are not scaled."""
    if problem.kv_dtype == "int4":
        packed = replace(view, dim=-(-view.dim // 2)).sequence(b, problem.heads_kv, length).int()
        halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., : view.dim]
        return ((halves ^ 8) - 8).double()  # two's complement in four bits
    return view.sequence(b, problem.heads_kv, length).double()


def _dequantised(
    problem: Problem, views: tuple[RowView | PagedView, RowView | None], b: int, length: int, dequant: Dequant | None
) -> torch.Tensor:
    """Returns keys or values [heads_kv, length, dim] of sequence b; the first may be a prefix of all sequences.

    Integers are dequantised as (stored + offset) * scale. views: of the sequence's rows, and of the prefix or None.
    """
    sequence_view, common = views
    shared = min(problem.common_keys, length)
    values = _stored(problem, sequence_view, b, length - shared)
    if common is not None:
        values = torch.cat((_stored(problem, common, 0, shared), values), dim=1)
    if dequant is None:
        return values
    if dequant.offset is not None:
        values = values + dequant.offset.sequence(b, problem.heads_kv, length)
    return values * dequant.scale.sequence(b, problem.heads_kv, length)


def _quantised(problem: Problem, operands: Operands, out: torch.Tensor) -> torch.Tensor:
    """Quantizes out [heads_q, q_len, dim_v]: round(out * out_scale + out_offset), saturated to int8; NaN becomes 0."""
    assert operands.out_scale is not None
    out = out * operands.out_scale.double()[:, None]
    if operands.out_offset is not None:
        out = out + operands.out_offset.double()[:, None]
    # torch rounds halves to even; adding a half before truncation rounds them away from zero.
    rounded = out.round() if problem.out_quant == "tensor" else (out + 0.5 * out.sign()).trunc()
    return rounded.clamp(-128, 127).nan_to_num(0.0)


def _load(problem: Problem, extents: Extents, operands: Operands, b: int) -> _Sequence:
    """Reads sequence b in float64 and returns it with its scores: scale * (q . k + q_rope . k_rope), capped if there is
    a softcap, plus bias; -inf for keys that are not visible. Integers are dequantised."""
    device = operands.q.keep[0].device
    q_len, kv_len = int(extents.q_len[b]), int(extents.kv_len[b])
    kv_heads = _kv_heads(problem, device)

    def query(view: RowView) -> torch.Tensor:
        return view.sequence(b, problem.heads_q, q_len).double()

    def key(
        view: RowView | PagedView,
        common: RowView | None,
        dequant: Dequant | None,
        compressed: RowView | PagedView | None,
    ) -> torch.Tensor:
        rows = _dequantised(problem, (view, common), b, kv_len, dequant)
        if compressed is not None:
            rows = torch.cat((rows, _stored(problem, compressed, b, extents.all_keys(b) - kv_len)), dim=1)
        return rows[kv_heads]

    q = query(operands.q)
    k = key(operands.k, operands.k_common, operands.dequant_k, operands.k_compressed)
    v = key(operands.v, operands.v_common, operands.dequant_v, operands.v_compressed)
    q_rope = k_rope = None
    scores = q @ k.mT
    if problem.dim_rope:
        assert operands.q_rope is not None
        assert operands.k_rope is not None
        q_rope = query(operands.q_rope)
        k_rope = operands.k_rope.sequence(b, problem.heads_kv, kv_len).double()[kv_heads]
        scores = scores + q_rope @ k_rope.mT
    scores = problem.scale * scores
    if problem.has_row_scale:
        assert operands.row_scale is not None
        scores = scores * query(operands.row_scale)
    slope: torch.Tensor | float = 1.0
    if problem.softcap:
        capped = (scores / problem.softcap).tanh()
        scores, slope = problem.softcap * capped, 1 - capped * capped
    if problem.bias != "none":
        added = _bias(problem, extents, operands, b)
        scores = scores + (problem.scale * added if problem.bias_scaled else added)
    visible, in_band = _visible(problem, extents, operands, b, device)
    times = _times(problem, extents, operands, b, device)
    visible = visible & (times > 0)
    keep, keep_factor = _keep(problem, extents, operands, b, device)
    return _Sequence(q, k, v, q_rope, k_rope, in_band, scores.where(visible, -_INF), keep, keep_factor, times, slope)


def _statistics(problem: Problem, operands: Operands, s: _Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the softmax's (max, sum), [heads_q, q_len, 1], before dropout. A row without visible keys has max -inf,
    and the sum kv_len if its result is the mean of V, else 0."""
    heads, q_len, kv_len = s.scores.shape
    # A sink acts as an additional key without a value; without a sink its score is -inf, which has no effect.
    sink = s.scores.new_full((heads, q_len, 1), -_INF)
    if problem.has_sink:
        assert operands.sink is not None
        sink = operands.sink.double()[:, None, None].expand_as(sink)
    row_max = torch.cat((s.scores, sink), dim=-1).amax(-1, keepdim=True)
    row_sum = ((s.scores - row_max).exp() * s.times).sum(-1, keepdim=True) + (sink - row_max).exp()
    takes_mean = torch.full_like(s.in_band, problem.empty_rows == "mean")
    if problem.empty_rows == "mean_in_band":
        takes_mean = s.in_band
    return row_max, row_sum.where(row_max != -_INF, takes_mean * kv_len)


def _weights(
    problem: Problem, operands: Operands, s: _Sequence, row_max: torch.Tensor, row_sum: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Returns (softmax, weights, live), each [heads_q, q_len, kv_len], and divisor [heads_q, q_len, 1], from the
    softmax's max and sum: weights / divisor is the probability of each live pair, before dropout.

    softmax (bool): visible pairs. live (bool): also all keys of rows without visible keys whose result is the mean of
    V. A key with score -inf is not visible, so NaN of its value does not reach the result.
    """
    empty = row_max == -_INF
    mean = empty & (row_sum > 0)
    softmax = (s.scores != -_INF) & ~empty
    weights = (s.scores - row_max).exp()
    # Weights that underflow stay positive, so that a visible infinite value reaches the result.
    weights = weights.masked_fill((weights == 0) & softmax, torch.finfo(torch.float64).tiny)
    weights = (weights * s.times).where(~mean, 1.0)
    if problem.has_weight_scale:
        assert operands.weight_scale is not None
        weights = (operands.weight_scale.double() * weights).round().clamp(-128, 127)
    return softmax, weights, softmax | mean, row_sum.where(row_sum != 0, 1.0)


def weighted_sum(weights: torch.Tensor, live: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns the sum over live n of weights [heads, m, n] * values [heads, n, d], [heads, m, d]; live: bool.

    Values that are not finite are added separately to the rows to which they are live, because 0 * NaN is NaN.
    """
    finite = values.isfinite().all(-1)  # [heads, n]
    total = weights.where(live & finite[:, None, :], 0) @ values.where(finite[..., None], 0)
    for n in (~finite).any(0).nonzero().flatten().tolist():
        wild = live[:, :, n] & ~finite[:, n, None]
        total += (weights[:, :, n, None] * values[:, n, None, :]).where(wild[..., None], 0)
    return total


@torch.no_grad()
def attention_forward(problem: Problem, extents: Extents, schedule: None, operands: Operands) -> None:
    """Writes out = sum_j M_j P_j v_j, and max and sum of each softmax; P: probabilities, M = keep / keep_prob."""
    for b in range(len(extents)):
        s = _load(problem, extents, operands, b)
        row_max, row_sum = _statistics(problem, operands, s)
        _, weights, live, divisor = _weights(problem, operands, s, row_max, row_sum)
        # The division is last: a NaN among the scores makes the complete row NaN, even if all of its keys are dropped.
        out = weighted_sum(weights * s.keep_factor, live & s.keep, s.v) / divisor
        if problem.out_quant != "none":
            out = _quantised(problem, operands, out)
        heads, q_len, _ = s.q.shape
        operands.out.sequence(b, heads, q_len).copy_(out)
        operands.stats.max.sequence(b, heads, q_len).copy_(row_max)
        operands.stats.sum.sequence(b, heads, q_len).copy_(row_sum)


@torch.no_grad()
def attention_backward(problem: Problem, extents: Extents, schedule: None, operands: Operands, grads: Grads) -> None:
    """Writes attention's gradients that are not None from saved out and softmax statistics (of these keys or more).

    dP = (dout . v) * M,  D = dout . out - dlse,  dS = P * (dP - D),  M = keep / keep_prob
    dq = scale * dS' k,  dk = scale * dS'^T q,  dv = (P * M)^T dout,  dbias = dS
    dS' = dS, or beneath a cap dS * (1 - tanh^2)
    dsink = -sum_i D_i * exp(sink - max_i) / sum_i

    A row without visible keys adds M * dout / n to dv if its result is the mean of n values; else its gradients are 0.
    """
    dsink = torch.zeros(problem.heads_q, dtype=torch.float64, device=operands.q.keep[0].device)
    if grads.dbias is not None and grads.owns_dbias:
        grads.dbias.keep.zero_()  # _add_bias_gradient then overwrites.
    for b in range(len(extents)):
        s = _load(problem, extents, operands, b)
        heads, q_len, _ = s.q.shape
        out, dout, row_max, row_sum = (
            view.sequence(b, heads, q_len).double()
            for view in (operands.out, grads.dout, operands.stats.max, operands.stats.sum)
        )
        softmax, weights, live, divisor = _weights(problem, operands, s, row_max, row_sum)
        probabilities = weights / divisor
        delta = (dout * out).sum(-1, keepdim=True)
        if grads.dlse is not None:
            delta = delta - grads.dlse.sequence(b, heads, q_len).double()
        dprobabilities = ((dout @ s.v.mT) * s.keep_factor).where(s.keep, 0)
        dscores = (probabilities * (dprobabilities - delta)).where(softmax, 0)
        dv = None
        if grads.dv is not None or problem.shares_kv:
            dv = weighted_sum(probabilities.mT * s.keep_factor, (live & s.keep).mT, dout)
        dproducts = problem.scale * s.slope * dscores
        for dq, k in ((grads.dq, s.k), (grads.dq_rope, s.k_rope)):
            if dq is not None and k is not None:
                dq.sequence(b, problem.heads_q, q_len).copy_(weighted_sum(dproducts, softmax, k))
        for dk, more, q in ((grads.dk, grads.dk_compressed, s.q), (grads.dk_rope, None, s.q_rope)):
            if dk is not None and q is not None:
                gradient = weighted_sum(dproducts.mT, softmax.mT, q)
                if dk is grads.dk and problem.shares_kv and dv is not None:  # values are the first elements of keys
                    gradient[..., : problem.dim_v] += dv
                _store_shared(problem, (dk, more), b, int(extents.kv_len[b]), gradient)
        if grads.dv is not None and dv is not None:
            _store_shared(problem, (grads.dv, grads.dv_compressed), b, int(extents.kv_len[b]), dv)
        if grads.dbias is not None:
            _add_bias_gradient(problem, grads, b, dscores)
        if grads.dsink is not None:
            assert operands.sink is not None
            at_sink = (operands.sink.double()[:, None, None] - row_max).exp() / row_sum
            dsink -= (delta * at_sink).where(row_max != -_INF, 0).sum((1, 2))
    if grads.dsink is not None:
        grads.dsink.copy_(dsink)


def _store_shared(
    problem: Problem, views: tuple[RowView, RowView | None], b: int, kv_len: int, per_query_head: torch.Tensor
) -> None:
    """Sums per_query_head, a gradient [heads_q, keys, dim] of sequence b, over the query heads of each key head; stores
    the first kv_len keys in the view views[0], compressed keys in views[1] (or None)."""
    _, keys, dim = per_query_head.shape
    total = per_query_head.new_zeros(problem.heads_kv, keys, dim)
    total.index_add_(0, _kv_heads(problem, total.device), per_query_head)
    first, compressed = views
    first.sequence(b, problem.heads_kv, kv_len).copy_(total[:, :kv_len])
    if compressed is not None:
        compressed.sequence(b, problem.heads_kv, keys - kv_len).copy_(total[:, kv_len:])


def _add_bias_gradient(problem: Problem, grads: Grads, b: int, dscores: torch.Tensor) -> None:
    """Adds dscores, dS [heads_q, q_len, kv_len] of sequence b (times scale if the bias is scaled), to grads.dbias."""
    assert grads.dbias is not None
    gradient = problem.scale * dscores if problem.bias_scaled else dscores
    q_len, kv_len = gradient.shape[1:]
    rows, keys = slice(0, q_len), slice(0, kv_len)
    if problem.bias == "table":
        bias.add_table_gradient(grads.dbias, b, (q_len, kv_len), gradient, rows, keys)
    else:
        bias.add_matrix_gradient(grads.dbias, b, gradient, rows, keys)
