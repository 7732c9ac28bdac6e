"""One tile of query rows and the keys it meets: scores, what is not seen, what is kept.

Query heads that share a key/value head lie below each other, so that one matmul serves the group and no K or V is
repeated: panels and scores are [heads_kv, group * rows, ...], masks are [1 or heads_q, rows, keys]. Refuses to know
softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fusion_attention import bias, dropout
from fusion_attention.backends.cpu import panels
from fusion_attention.backends.cpu.tiling import Schedule
from fusion_attention.kv import MatrixView, RowView
from fusion_attention.problem import Extents, Operands, Problem


def steps(begin: int, end: int, size: int) -> Iterator[slice]:
    """[begin, end) in pieces of `size`."""
    return (slice(first, min(first + size, end)) for first in range(begin, end, size))


@dataclass(frozen=True, eq=False)
class RowTile:
    """Rows of one sequence, the keys [begin, end) that some of them see, and [full_begin, full_end) that all see."""

    problem: Problem
    extents: Extents
    operands: Operands
    seq: int
    rows: slice
    begin: int
    full_begin: int
    full_end: int
    end: int

    @property
    def kv_len(self) -> int:
        """Keys of the sequence, seen or not."""
        return int(self.extents.kv_len[self.seq])

    def fold(self, by_head: torch.Tensor) -> torch.Tensor:
        """[1 or heads_q, rows, n] as [heads_kv, group * rows, n]."""
        p = self.problem
        by_head = by_head.expand(p.heads_q, *by_head.shape[1:])
        return by_head.reshape(p.heads_kv, p.group * by_head.shape[1], by_head.shape[2])

    def by_head(self, folded: torch.Tensor) -> torch.Tensor:
        """[heads_kv, group * rows, n] as [heads_q, rows, n]."""
        return folded.view(self.problem.heads_q, -1, folded.shape[-1])

    def load(self, view: RowView, tail: RowView | None = None) -> torch.Tensor:
        """The tile's rows, float32 [heads_kv, group * rows, dim]."""
        return self.fold(panels.load(view, tail, self.seq, self.problem.heads_q, self.rows))

    def load_keys(self, view: RowView, tail: RowView | None, keys: slice) -> torch.Tensor:
        """Key or value rows, float32 [heads_kv, keys, dim]."""
        return panels.load(view, tail, self.seq, self.problem.heads_kv, keys)

    def store(self, view: RowView, values: torch.Tensor, tail: RowView | None = None) -> None:
        """Writes [heads_kv, group * rows, dim] to the tile's rows."""
        panels.store(view, tail, self.seq, self.rows, self.by_head(values))

    def bias(self, keys: slice) -> torch.Tensor | None:
        """What is added to the scores, before scaling: [heads_q, rows, keys]."""
        p, ops = self.problem, self.operands
        if p.bias == "none":
            return None
        if p.bias in ("matrix", "table"):
            assert ops.bias is not None
            if p.bias == "matrix":
                return bias.from_matrix(ops.bias, self.seq, p.heads_q, self.rows, keys)
            return bias.from_table(ops.bias, self.seq, p.heads_q, self._lengths(), self.rows, keys)
        assert ops.slopes is not None
        shift = int(self.extents.shift[self.seq])
        return bias.from_slopes(ops.slopes[self.seq], shift, self.rows, keys, p.bias == "slopes_sqrt")

    def add_bias_gradient(self, view: MatrixView, gradient: torch.Tensor, keys: slice) -> None:
        """Adds the scores' gradient [heads_kv, group * rows, keys] to where bias() read."""
        gradient = self.by_head(gradient)
        if self.problem.bias_scaled:
            gradient = gradient * self.problem.scale
        if self.problem.bias == "matrix":
            bias.add_matrix_gradient(view, self.seq, gradient, self.rows, keys)
        elif self.problem.bias == "table":
            bias.add_table_gradient(view, self.seq, self._lengths(), gradient, self.rows, keys)

    def scores(self, q: torch.Tensor, k: torch.Tensor, keys: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(scores [heads_kv, group * rows, keys] with -inf where a key is not seen, the mask of such keys)."""
        p = self.problem
        s = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=p.scale)
        added = self.bias(keys)
        if added is not None:
            self.by_head(s).add_(added, alpha=p.scale if p.bias_scaled else 1.0)
        unseen = self._unseen(keys)
        if unseen is not None:
            self.by_head(s).masked_fill_(unseen, -math.inf)
        return s, unseen

    def kept(self, keys: slice) -> torch.Tensor | None:
        """The pairs that dropout keeps, bool [heads_q, rows, keys]; None without dropout."""
        p, ops = self.problem, self.operands
        if p.dropout == "none":
            return None
        if p.dropout == "bits":
            assert ops.drop_bits is not None
            return dropout.keep_from_bits(ops.drop_bits, self.seq, p.heads_q, self.rows, keys)
        stream = self.seq * p.heads_q
        return dropout.keep_from_philox(ops.seed, ops.offset, p.keep_prob, stream, p.heads_q, self.rows, keys)

    def narrow(self, weights: torch.Tensor) -> torch.Tensor:
        """Second operands of a matmul are rounded to the input dtype for bfloat16 only (ruling 10)."""
        return weights.bfloat16().float() if self.problem.dtype == "bfloat16" else weights

    def sees_band(self) -> torch.Tensor:
        """[1, rows, 1]: the rows to which the band leaves a key, whatever `blocked` takes."""
        first, end = self.extents.row_interval(self.seq, np.arange(self.rows.start, self.rows.stop))
        return torch.from_numpy(end > first)[None, :, None]

    def _lengths(self) -> tuple[int, int]:
        return int(self.extents.q_len[self.seq]), self.kv_len

    def _unseen(self, keys: slice) -> torch.Tensor | None:
        """[1 or heads_q, rows, keys], true where a row does not see a key; None where all is seen."""
        outside = None
        if keys.start < self.full_begin or keys.stop > self.full_end:
            first, end = self.extents.row_interval(self.seq, np.arange(self.rows.start, self.rows.stop))
            key = np.arange(keys.start, keys.stop)
            outside = torch.from_numpy((key < first[:, None]) | (key >= end[:, None]))[None]
        view = self.operands.blocked if self.problem.has_blocked else None
        if view is None:
            return outside
        heads = 1 if view.stride_head[self.seq] == 0 else self.problem.heads_q
        blocked = view.sequence(self.seq, heads, self.rows.stop, keys.stop)[:, self.rows, keys].bool()
        return blocked if outside is None else blocked | outside


def row_tiles(problem: Problem, extents: Extents, schedule: Schedule, operands: Operands, b: int) -> Iterator[RowTile]:
    """The tiles of sequence b, in order."""
    t = schedule.tiles
    own = slice(int(schedule.first[b]), int(schedule.first[b + 1]))
    columns = (t.row0, t.row1, t.begin, t.full_begin, t.full_end, t.end)
    for row0, row1, *edges in zip(*(column[own].tolist() for column in columns), strict=True):
        yield RowTile(problem, extents, operands, b, slice(row0, row1), *edges)
