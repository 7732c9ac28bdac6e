"""Distribution of tokens over ranks: a pure function of schedule, lengths and the shape of the group.

Sequences are divided at multiples of CHUNK_UNIT tokens from their start.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fusion_attention.ir.problem import CHUNK_UNIT

SCHEDULES = ("allgather", "ring", "zigzag", "ulysses", "ulysses+ring")
# Schedules that give a rank an early and a late chunk of each sequence, which balances causal bands.
_BALANCED = ("allgather", "zigzag", "ulysses+ring")


class Chunk(NamedTuple):
    """Adjacent tokens of one sequence: first <= token < end."""

    sequence: int
    first: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The distribution of the tokens of sequences over ranks."""

    lengths: tuple[int, ...]  # tokens of each sequence
    ranks: tuple[tuple[Chunk, ...], ...]  # for each rank, its chunks in local order; no chunk is empty

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of tokens of each rank."""
        return tuple(sum(chunk.end - chunk.first for chunk in chunks) for chunks in self.ranks)

    def token_indices(self, rank: int) -> np.ndarray:
        """Returns the indices of a rank's tokens among the concatenated sequences: int64, in local order."""
        starts = np.cumsum((0, *self.lengths))
        parts = [np.arange(p.first, p.end) + starts[p.sequence] for p in self.ranks[rank]]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

    def positions(self, rank: int) -> np.ndarray:
        """Returns the positions of a rank's tokens within their sequences: int64, in local order."""
        parts = [np.arange(p.first, p.end) for p in self.ranks[rank]]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


@functools.lru_cache(maxsize=256)
def layout_of(schedule: str, lengths: tuple[int, ...], shape: tuple[int, ...]) -> Layout:
    """Returns the distribution of sequences' tokens over ranks by a schedule ("zigzag", "ring", "ulysses", ...);
    lengths: tokens of each sequence; shape: (ranks,), or (ring, ulysses) ranks for "ulysses+ring"."""
    if schedule == "ulysses":  # heads are divided, so only tokens need balance
        ranks = _divided(tuple(Chunk(b, 0, n) for b, n in enumerate(lengths) if n), shape[0])
        return Layout(lengths, tuple(ranks))
    shares = _Shares(lengths, shape[0])
    count = (2 if schedule in _BALANCED else 1) * shape[0]
    # Long sequences first: shorter ones balance the rest.
    for b in sorted(range(len(lengths)), key=lambda b: (-lengths[b], b)):
        if lengths[b] >= count * CHUNK_UNIT:
            shares.divide(b, count)
        else:
            shares.place(b)
    ranks = [joined(chunks) for chunks in shares.chunks]
    if len(shape) == 2:
        ranks = [chunk for chunks in ranks for chunk in _divided(chunks, shape[1])]
    return Layout(lengths, tuple(ranks))


class _Shares:
    """The chunks of sequences given to each rank so far, and its numbers of tokens and of causal (row, key) pairs."""

    def __init__(self, lengths: tuple[int, ...], ranks: int) -> None:
        self.lengths = lengths
        self.chunks: list[list[Chunk]] = [[] for _ in range(ranks)]
        self.tokens, self.pairs = [0] * ranks, [0] * ranks
        self.all_tokens, self.all_pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)

    def load(self, rank: int) -> int:
        """Returns max(rank's tokens / all tokens, its causal (row, key) pairs / all pairs), times both totals to be an
        integer; for comparing ranks."""
        return max(self.tokens[rank] * self.all_pairs, self.pairs[rank] * self.all_tokens)

    def divide(self, b: int, count: int) -> None:
        """Divides a long sequence b into `count` chunks and assigns them: one per rank, or an early and a late one."""
        ranks = len(self.chunks)
        owners = [*range(ranks), *reversed(range(ranks))][:count]
        tiles = -(-self.lengths[b] // CHUNK_UNIT)
        sizes = [tiles // count] * count
        # The remaining tiles go to the ranks with the lowest load.
        for at in sorted(range(count), key=lambda at: (at >= ranks, self.load(owners[at]), at))[: tiles % count]:
            sizes[at] += 1
        self._give(b, sizes, owners)

    def place(self, b: int) -> None:
        """Assigns a short sequence b to the rank with the lowest load; one longer than the ranks' average is split
        among several."""
        length, ranks = self.lengths[b], len(self.chunks)
        tiles, parts = -(-length // CHUNK_UNIT), -(-length * ranks // max(self.all_tokens, 1))
        parts = min(tiles, parts)
        idle = sorted(range(ranks), key=lambda rank: (self.load(rank), rank))
        self._give(b, [tiles * (at + 1) // parts - tiles * at // parts for at in range(parts)], idle)

    def _give(self, b: int, sizes: list[int], owners: list[int]) -> None:
        """Assigns consecutive chunks of sequence b to ranks (owners); sizes: of the chunks, in CHUNK_UNIT tokens."""
        first = 0
        for size, rank in zip(sizes, owners, strict=False):
            end = min(first + size * CHUNK_UNIT, self.lengths[b])
            self.tokens[rank] += end - first
            self.pairs[rank] += (end * (end + 1) - first * (first + 1)) // 2
            self.chunks[rank].append(Chunk(b, first, end))
            first = end


def joined(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Returns chunks of sequences sorted by sequence and position, adjacent ones merged and empty ones removed."""
    results: list[Chunk] = []
    for chunk in sorted(chunk for chunk in chunks if chunk.end > chunk.first):
        if results and results[-1].sequence == chunk.sequence and results[-1].end == chunk.first:
            results[-1] = results[-1]._replace(end=chunk.end)
        else:
            results.append(chunk)
    return tuple(results)


def _divided(chunks: tuple[Chunk, ...], parts: int) -> list[tuple[Chunk, ...]]:
    """Divides chunks into `parts` lists of about equal numbers of tokens, at multiples of CHUNK_UNIT tokens."""
    begins = list(itertools.accumulate((p.end - p.first for p in chunks), initial=0))

    def edge(at: int) -> int:
        """Returns the number of tokens before part `at`, rounded up to a multiple of CHUNK_UNIT in its sequence."""
        wanted = -(-begins[-1] * at // parts)
        here = bisect.bisect_right(begins, wanted) - 1
        if here == len(chunks) or begins[here] == wanted:
            return wanted
        p = chunks[here]
        token = p.first + wanted - begins[here]
        return begins[here] + min(-(-token // CHUNK_UNIT) * CHUNK_UNIT, p.end) - p.first

    edges = (*map(edge, range(parts)), begins[-1])
    return [
        joined(
            Chunk(p.sequence, p.first + max(a - begin, 0), min(p.end, p.first + b - begin))
            for p, begin in zip(chunks, begins, strict=False)
        )
        for a, b in itertools.pairwise(edges)
    ]
