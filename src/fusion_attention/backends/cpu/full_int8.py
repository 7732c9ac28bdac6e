"""Attention with int8 queries, keys, values and weights, in blocks of rows and keys, with torch's matrix products.

Weights are rounded to int8 relative to the row's final maximum, so there are two passes over the keys. Products of
integers are exact in float32 in short blocks of keys, so bits do not depend on the number of threads.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from fusion_attention.backends.cpu import dequantize
from fusion_attention.ir import bias
from fusion_attention.ir.memory_views import Dequant
from fusion_attention.ir.problem import Extents, Operands, Problem

# Keys of a block: a sum of 512 products of two int8 is at most 2**23, so it is exact in float32.
_KEYS = 512
# Largest number of elements of query and key rows for which q . k is exact in float32.
_EXACT_DIM = 1024
# Maximum number of scores in memory at once.
_SCORES = 1 << 21
# Buffers of that size: scores, weights, integer weights, visible keys, a bias.
_BUFFERS = 5


def reasons_against(problem: Problem) -> list[str]:
    """Returns a sentence for each property of the problem that int8 attention (rounded weights) does not support."""
    p = problem
    table = (
        ("bias", p.bias, ("none", "matrix")),
        ("dropout", p.dropout, ("none",)),
        ("dim_rope", p.dim_rope, (0,)),
        ("has_sink", p.has_sink, (False,)),
        ("softcap", p.softcap, (0.0,)),
        ("has_blocked_tiles", p.has_blocked_tiles, (False,)),
    )
    return [
        f"the cpu back end computes {what} {', '.join(map(str, accepted))} with rounded weights, not {given}."
        for what, given, accepted in table
        if given not in accepted
    ]


@dataclass(eq=False)
class Schedule:
    """The division of int8 attention into blocks of query rows; rows: the number of query rows per block."""

    problem: Problem
    rows: int

    def workspace_bytes(self, threads: int) -> int:
        """Returns the bytes of scratch, for any number of threads."""
        p = self.problem
        return 4 * (_BUFFERS * p.heads_q * self.rows * _KEYS + _KEYS * p.heads_kv * (p.dim_qk + p.dim_v))


def plan(problem: Problem) -> Schedule:
    """Returns a Schedule: the most query rows per block whose scores, for all heads, fit the memory limit."""
    return Schedule(problem, max(1, _SCORES // (problem.heads_q * _KEYS)))


@torch.no_grad()
def run(schedule: Schedule, problem: Problem, extents: Extents, operands: Operands) -> int:
    """Writes attention's out, max and sum to `operands`; returns the number of rows without visible keys (out is 0)."""
    empty = 0
    for b in range(len(extents)):
        q_len = int(extents.q_len[b])
        for start in range(0, q_len, schedule.rows):
            rows = slice(start, min(start + schedule.rows, q_len))
            empty += _Block(problem, extents, operands, b, rows).compute()
    return empty


class _Block:
    """Computes int8 attention of the query rows `rows` (a range of positions) of sequence b, for all heads."""

    def __init__(self, problem: Problem, extents: Extents, operands: Operands, b: int, rows: slice) -> None:
        self.problem, self.operands, self.b, self.rows = problem, operands, b, rows
        edges = extents.row_interval(b, np.arange(rows.start, rows.stop))
        self.first, self.end = (torch.from_numpy(edge)[:, None] for edge in edges)
        begin, stop = int(edges[0].min()), int(edges[1].max())
        self.keys = [slice(j, min(j + _KEYS, stop)) for j in range(begin, stop, _KEYS)]
        q = operands.q.sequence(b, problem.heads_q, rows.stop)[:, rows]
        assert operands.weight_scale is not None
        self.weight_scale = operands.weight_scale
        self.factor, scale = problem.scale, _common_scale(operands.dequant_k, b, problem)
        self.exact = scale is not None and problem.dim_qk <= _EXACT_DIM
        if scale is not None:
            self.factor *= scale
        accum_dtype = torch.float32 if self.exact else torch.float64
        self.q = q.to(accum_dtype).reshape(problem.heads_kv, -1, problem.dim_qk)

    def compute(self) -> int:
        """Writes out, max and sum of the block's rows; returns the number of (row, head) pairs without visible keys."""
        p, o, b, rows = self.problem, self.operands, self.b, self.rows
        count = rows.stop - rows.start
        peak = torch.full((p.heads_q, count, 1), -math.inf)
        for keys in self.keys:
            peak = torch.maximum(peak, self._scores(keys).amax(-1, keepdim=True))
        empty = peak == -math.inf
        # A scale that is equal for all tokens is applied last, so that integers are summed.
        scaled_last = p.dequant_v != "token" and (o.dequant_v is None or o.dequant_v.offset is None)
        total = torch.zeros(p.heads_q, count, 1)
        out = torch.zeros(p.heads_kv, p.group * count, p.dim_v, dtype=torch.float64)
        for keys in self.keys:
            weights = (self._scores(keys) - peak.masked_fill(empty, 0.0)).exp()
            total += weights.sum(-1, keepdim=True)
            full = (self.weight_scale * weights).round().clamp(-128, 127)
            v = dequantize.values(p, o, b, keys)
            if not scaled_last:
                v, full = dequantize.dequantized(v.double(), o.dequant_v, b, keys), full.double()
            out += full.view(p.heads_kv, p.group * count, -1) @ v
        if scaled_last:
            out = dequantize.dequantized(out, o.dequant_v, b, slice(0, 1))
        result = out.view(p.heads_q, count, p.dim_v) / total.masked_fill(empty, 1.0)
        results = dequantize.rounded(p, o, result), peak, total
        for view, values in zip((o.out, o.stats.max, o.stats.sum), results, strict=True):
            view.sequence(b, p.heads_q, rows.stop)[:, rows].copy_(values)
        return int(empty.sum())

    def _scores(self, keys: slice) -> torch.Tensor:
        """Returns the scores of a range of keys, float32 [heads_q, rows, keys]; -inf for invisible keys."""
        p, o, b, rows = self.problem, self.operands, self.b, self.rows
        k = dequantize.keys(p, o, b, keys)
        if not self.exact:
            k = dequantize.dequantized(k.double(), o.dequant_k, b, keys)
        products = (self.q @ k.mT).float().view(p.heads_q, rows.stop - rows.start, -1)
        scores = products * self.factor
        if p.has_row_scale and o.row_scale is not None:
            scores = scores * o.row_scale.sequence(b, p.heads_q, rows.stop)[:, rows]
        if p.bias == "matrix" and o.bias is not None:
            added = bias.from_matrix(o.bias, b, p.heads_q, rows, keys).float()
            scores = scores + (p.scale * added if p.bias_scaled else added)
        key = torch.arange(keys.start, keys.stop)
        return scores.masked_fill(((key < self.first) | (key >= self.end)) | self._blocked(keys), -math.inf)

    def _blocked(self, keys: slice) -> torch.Tensor:
        """Returns bool, broadcasting to [heads_q, rows, keys], true for keys that the mask matrix hides; a single False
        without one."""
        p, view, rows = self.problem, self.operands.blocked, self.rows
        if not p.has_blocked or view is None:
            return torch.zeros(1, dtype=torch.bool)
        first = view.first_of(self.b)
        blocked = view.sequence(self.b, p.heads_q, rows.stop, max(keys.stop, first))[
            :, rows, max(keys.start - first, 0) :
        ]
        free = min(keys.stop, first) - min(keys.start, first)
        return torch.nn.functional.pad(blocked != 0, (free, 0))


def _common_scale(dequant: Dequant | None, b: int, p: Problem) -> float | None:
    """Returns the scale of sequence b's keys if all heads, channels and tokens have the same one and no offsets, else
    None; integer products are then exact."""
    if dequant is None:
        return 1.0
    if dequant.offset is not None or p.dequant_k != "channel":
        return None
    scale = dequant.scale.sequence(b, p.heads_kv, 1)
    one = scale.flatten()[0]
    return float(one) if bool((scale == one).all()) else None
