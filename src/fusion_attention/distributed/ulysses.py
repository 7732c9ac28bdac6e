"""Exchange of heads for tokens: a rank receives all tokens of its line of ranks for some heads, and returns results.

A key head that several ranks need is sent to each of them, and its gradients are added in the order of ranks. Between
the two exchanges another schedule computes the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_attention.distributed.chunk_attention import Gradients, Keys, Rows, Saved
from fusion_attention.distributed.groups import Call
from fusion_attention.distributed.schedules import Results, ScheduleInputs
from fusion_attention.ir.merge import Partial
from fusion_attention.ir.problem import Problem

Tensor = torch.Tensor
Forward = Callable[[ScheduleInputs, Rows, Keys], Partial]
Backward = Callable[[ScheduleInputs, Rows, Keys, Saved], Results]
Ranges = list[tuple[int, int]]
Some = Sequence[Tensor | None]


def indivisible(problem: Problem, ranks: int) -> str:
    """Returns a reason if the heads cannot be divided among ranks; else ""."""
    q, kv = problem.heads_q, problem.heads_kv
    if q % ranks or (kv % ranks and ranks % kv):
        return f"expected N1 a multiple of {ranks} ranks, and N2 a multiple or a divisor, got N1={q}, N2={kv}"
    return ""


@dataclass(frozen=True, eq=False)
class Heads:
    """The heads and tokens of each rank of a line: the ranks that divide the heads among them."""

    call: Call  # the communication along the line
    of_q: Ranges  # the query heads [first, end) of each rank
    of_kv: Ranges  # its key heads
    rows: Sequence[int]  # its number of query tokens
    keys: Sequence[int]  # its number of keys
    inner: ScheduleInputs  # of the algorithm (gather or ring) for the attention of a rank's heads

    @classmethod
    def divided(cls, m: ScheduleInputs, line: Call, rest: Call) -> Heads:
        """Divides the heads of an attention call (m) among the ranks of the process group `line`; rest: the group of
        the ranks that get the same heads of other tokens."""
        p, ranks = m.full.problem, line.world
        n, group = p.heads_q // ranks, p.group
        of_q = [(rank * n, rank * n + n) for rank in range(ranks)]
        of_kv = [(first // group, (end - 1) // group + 1) for first, end in of_q]
        (first, end), (first_kv, end_kv) = of_q[line.rank], of_kv[line.rank]
        at = m.call.rank // ranks * ranks
        rows, keys = (side.placement.sizes[at : at + ranks] for side in (m.rows, m.keys))
        slopes, sink = m.full.slopes, m.full.sink
        full = replace(
            m.full,
            problem=replace(p, heads_q=n, heads_kv=end_kv - first_kv),
            first_head=first,
            slopes=None if slopes is None else slopes[:, first:end].contiguous(),
            sink=None if sink is None else sink[first:end].contiguous(),
        )
        inner = replace(m, full=full, call=rest, rows=m.rows.joined(ranks), keys=m.keys.joined(ranks))
        return cls(line, of_q, of_kv, rows, keys, inner)

    def forward(self, rows: Rows, keys: Keys, compute: Forward) -> Partial:
        """Exchanges tokens for heads, calls compute() for this rank's heads, and exchanges back: returns out and
        softmax statistics of this rank's tokens and all heads."""
        partial = compute(self.inner, *self._given(rows, keys))
        out, max_, sum_ = self._back("returning results", [partial.out, partial.max[..., None], partial.sum[..., None]])
        return Partial(out, max_[..., 0].contiguous(), sum_[..., 0].contiguous())

    def backward(self, rows: Rows, keys: Keys, saved: Saved, compute: Backward) -> Results:
        """Exchanges tokens for heads, calls compute(), and exchanges back; returns (gradients of this rank's tokens and
        all heads, of the sink). The sink's and a one-row bias's are of this rank's heads: sum over ranks."""
        given = [saved.dout, saved.out, saved.max[..., None], saved.sum[..., None]]
        dout, out, max_, sum_ = self._taken("exchanging gradients", given, self.of_q, self.rows)
        of_heads = Saved(dout, out, max_[..., 0].contiguous(), sum_[..., 0].contiguous())
        g, dsink = compute(self.inner, *self._given(rows, keys), of_heads)
        # Complete gradients are rounded before the exchange, partial ones (of a head on several ranks) after the sum.
        alone = len(set(self.of_kv)) == len(self.of_kv)
        of_keys = [t if t is None or not alone else t.to(keys.k.dtype) for t in (g.dk, g.dv, g.dk_rope)]
        of_rows = [None if t is None else t.to(rows.q.dtype) for t in (g.dq, g.dq_rope)]
        dq, dq_rope = self._back("returning gradients", of_rows)
        dk, dv, dk_rope = self._back_keys("returning gradients", of_keys)
        dbias = g.dbias
        if dbias is not None and rows.bias is not None:
            dbias = self._matrix_back(dbias, rows.bias, rows.q.shape[1])
        if dsink is not None:
            dsink = self._among_all(dsink, 0)
        return Gradients(dq, dk, dv, dq_rope, dk_rope, dbias), dsink

    def _given(self, rows: Rows, keys: Keys) -> tuple[Rows, Keys]:
        """Exchanges this rank's tokens with all heads for this rank's heads of all tokens of the line (the ranks that
        divide the heads); returns (queries, keys)."""
        q, q_rope = self._taken("exchanging rows", [rows.q, rows.q_rope], self.of_q, self.rows)
        k, v, k_rope = self._taken("exchanging keys", [keys.k, keys.v, keys.k_rope], self.of_kv, self.keys)
        bias, blocked = (self._matrix(t, rows.q.shape[1]) for t in (rows.bias, rows.blocked))
        rank = self.inner.call.rank
        in_rows, in_keys = self.inner.rows.chunks(rank), self.inner.keys.chunks(rank)
        return Rows(in_rows, q, q_rope, bias, blocked), Keys(in_keys, k, v, k_rope)

    def _matrix(self, t: Tensor | None, rows: int) -> Tensor | None:
        """Returns a bias or mask t, of this rank's `rows` query tokens and all heads, as one of all query tokens of the
        line of ranks and this rank's heads."""
        if t is None:
            return None
        first, end = self.of_q[self.call.rank]
        if t.shape[-2] == 1 != rows:  # one row for all tokens
            return t if t.shape[1] == 1 else t[:, first:end]
        (taken,) = self._taken("exchanging a matrix", [t.movedim(2, 1)], self._heads_of(t), self.rows)
        result: Tensor = taken.movedim(1, 2)
        return result

    def _heads_of(self, matrix: Tensor) -> Ranges:
        """Returns the heads [first, end) that each rank needs of a bias or mask; (0, 1) if one head serves all."""
        return self.of_q if matrix.shape[1] > 1 else [(0, 1)] * len(self.of_q)

    def _matrix_back(self, matrix: Tensor, like: Tensor, rows: int) -> Tensor:
        """Returns the gradient of this rank's bias `like`, with all heads, from `matrix`, the gradient with all query
        tokens of the line and this rank's heads; rows: this rank's number of query tokens."""
        if like.shape[-2] == 1 != rows:
            return matrix if like.shape[1] == 1 else self._among_all(matrix, 1)
        heads = self._heads_of(like)
        (parts,) = self._returned("returning gradients", [matrix.movedim(2, 1)], heads, self.rows)
        result: Tensor = torch.cat(parts, 2) if like.shape[1] > 1 else sum(parts[1:], parts[0])
        return result.movedim(1, 2)

    def _taken(self, step: str, tensors: Some, heads: Ranges, sizes: Sequence[int]) -> list[Any]:
        """Exchanges [batch, local tokens, all heads, dim] for [batch, all tokens, local heads, dim]; heads: range of
        each rank; sizes: tokens of each rank; step: the exchange's name in errors."""
        first, end = heads[self.call.rank]
        passing = [
            ([t[:, :, a:b].contiguous() for a, b in heads], [(t.shape[0], n, end - first, t.shape[-1]) for n in sizes])
            for t in tensors
            if t is not None
        ]
        result = iter(self.call.all_to_each(step, passing))
        return [None if t is None else torch.cat(next(result), 1) for t in tensors]

    def _back(self, step: str, tensors: Some) -> list[Any]:
        """Exchanges [batch, all tokens, local heads, dim] for [batch, local tokens, all heads, dim]; step: its name."""
        returned = self._returned(step, tensors, self.of_q, self.rows)
        return [None if parts is None else torch.cat(parts, 2) for parts in returned]

    def _back_keys(self, step: str, tensors: Some) -> list[Any]:
        """Exchanges gradients [batch, all keys, local key heads, dim] for [batch, local keys, all key heads, dim];
        several ranks' gradients of one head are added in rank order."""
        results: list[Any] = []
        for parts in self._returned(step, tensors, self.of_kv, self.keys):
            if parts is None:
                results.append(None)
                continue
            heads: dict[tuple[int, int], Tensor] = {}
            for place, gradient in zip(self.of_kv, parts, strict=True):
                heads[place] = heads[place] + gradient if place in heads else gradient
            results.append(torch.cat(list(heads.values()), 2))
        return results

    def _returned(self, step: str, tensors: Some, heads: Ranges, sizes: Sequence[int]) -> list[Any]:
        tokens = sizes[self.call.rank]
        passing = [
            (
                [shard.contiguous() for shard in t.split(list(sizes), 1)],
                [(t.shape[0], tokens, b - a, t.shape[-1]) for a, b in heads],
            )
            for t in tensors
            if t is not None
        ]
        result = iter(self.call.all_to_each(step, passing))
        return [None if t is None else next(result) for t in tensors]

    def _among_all(self, tensor: Tensor, axis: int) -> Tensor:
        """Returns `tensor`, which has this rank's query heads along `axis`, padded with zeros to all query heads."""
        first, end = self.of_q[self.call.rank]
        pad = (0, 0) * (tensor.dim() - 1 - axis) + (first, self.of_q[-1][1] - end)
        return torch.nn.functional.pad(tensor, pad)
