"""Which tokens lie on which rank, in which order: a pure function of schedule, lengths and the shape of the world.

Cuts lie on multiples of CUT tokens, counted from each sequence's start.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fusion_attention.ir.problem import CUT

SCHEDULES = ("allgather", "ring", "zigzag", "ulysses", "ulysses+ring")
# Those that give a rank an early and a late part of each sequence, so that causal bands load all ranks alike.
_BALANCED = ("allgather", "zigzag", "ulysses+ring")


class Chunk(NamedTuple):
    """Neighbouring tokens of one sequence: from `first`, before `end`."""

    sequence: int
    first: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The layout of the tokens of sequences on ranks.

    Attributes:
        lengths: tokens of each sequence.
        ranks: the chunks of each rank, in the order in which they lie there; none is empty.
    """

    lengths: tuple[int, ...]
    ranks: tuple[tuple[Chunk, ...], ...]

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(sum(chunk.end - chunk.first for chunk in chunks) for chunks in self.ranks)

    def token_indices(self, rank: int) -> np.ndarray:
        """The indices of a rank's tokens among those of all sequences, end to end: int64, in local order."""
        starts = np.cumsum((0, *self.lengths))
        parts = [np.arange(p.first, p.end) + starts[p.sequence] for p in self.ranks[rank]]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

    def positions(self, rank: int) -> np.ndarray:
        """Where the tokens of a rank stand within their sequences: int64, in local order."""
        parts = [np.arange(p.first, p.end) for p in self.ranks[rank]]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


@functools.lru_cache(maxsize=256)
def layout_of(schedule: str, lengths: tuple[int, ...], shape: tuple[int, ...]) -> Layout:
    """The layout of sequences on a world of a shape: (ranks,), or (ring, ulysses) of "ulysses+ring"."""
    if schedule == "ulysses":  # heads are what ranks divide: each needs no more than an equal part of the tokens
        ranks = _divided(tuple(Chunk(b, 0, n) for b, n in enumerate(lengths) if n), shape[0])
        return Layout(lengths, tuple(ranks))
    shares = _Shares(lengths, shape[0])
    count = (2 if schedule in _BALANCED else 1) * shape[0]
    # Long sequences first: what they leave uneven shorter ones fill up.
    for b in sorted(range(len(lengths)), key=lambda b: (-lengths[b], b)):
        if lengths[b] >= count * CUT:
            shares.divide(b, count)
        else:
            shares.place(b)
    ranks = [joined(chunks) for chunks in shares.chunks]
    if len(shape) == 2:
        ranks = [chunk for chunks in ranks for chunk in _divided(chunks, shape[1])]
    return Layout(lengths, tuple(ranks))


class _Shares:
    """What each rank has been given so far."""

    def __init__(self, lengths: tuple[int, ...], ranks: int) -> None:
        self.lengths = lengths
        self.chunks: list[list[Chunk]] = [[] for _ in range(ranks)]
        self.tokens, self.pairs = [0] * ranks, [0] * ranks
        self.all_tokens, self.all_pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)

    def load(self, rank: int) -> int:
        """What a rank has most of, memory or causal pairs, as a share of the whole; in integers, so that every rank
        finds the same."""
        return max(self.tokens[rank] * self.all_pairs, self.pairs[rank] * self.all_tokens)

    def divide(self, b: int, count: int) -> None:
        """A long sequence: a chunk of it to every rank, or an early and a late one."""
        ranks = len(self.chunks)
        owners = [*range(ranks), *reversed(range(ranks))][:count]
        tiles = -(-self.lengths[b] // CUT)
        sizes = [tiles // count] * count
        # One tile more for those that have least.
        for at in sorted(range(count), key=lambda at: (at >= ranks, self.load(owners[at]), at))[: tiles % count]:
            sizes[at] += 1
        self._give(b, sizes, owners)

    def place(self, b: int) -> None:
        """A short sequence: to one rank where it is no more than a rank's share of all, else in parts of that size."""
        length, ranks = self.lengths[b], len(self.chunks)
        tiles, parts = -(-length // CUT), -(-length * ranks // max(self.all_tokens, 1))
        parts = min(tiles, parts)
        idle = sorted(range(ranks), key=lambda rank: (self.load(rank), rank))
        self._give(b, [tiles * (at + 1) // parts - tiles * at // parts for at in range(parts)], idle)

    def _give(self, b: int, sizes: list[int], owners: list[int]) -> None:
        first = 0
        for size, rank in zip(sizes, owners, strict=False):
            end = min(first + size * CUT, self.lengths[b])
            self.tokens[rank] += end - first
            self.pairs[rank] += (end * (end + 1) - first * (first + 1)) // 2
            self.chunks[rank].append(Chunk(b, first, end))
            first = end


def joined(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Chunks in order, those of no token left out; neighbours are one."""
    results: list[Chunk] = []
    for chunk in sorted(chunk for chunk in chunks if chunk.end > chunk.first):
        if results and results[-1].sequence == chunk.sequence and results[-1].end == chunk.first:
            results[-1] = results[-1]._replace(end=chunk.end)
        else:
            results.append(chunk)
    return tuple(results)


def _divided(chunks: tuple[Chunk, ...], parts: int) -> list[tuple[Chunk, ...]]:
    """The tokens of one share in their order, divided among ranks at cuts of their sequences."""
    begins = list(itertools.accumulate((p.end - p.first for p in chunks), initial=0))

    def edge(at: int) -> int:
        """The first cut at or behind so many equal parts."""
        wanted = -(-begins[-1] * at // parts)
        here = bisect.bisect_right(begins, wanted) - 1
        if here == len(chunks) or begins[here] == wanted:
            return wanted
        p = chunks[here]
        token = p.first + wanted - begins[here]
        return begins[here] + min(-(-token // CUT) * CUT, p.end) - p.first

    edges = (*map(edge, range(parts)), begins[-1])
    return [
        joined(
            Chunk(p.sequence, p.first + max(a - begin, 0), min(p.end, p.first + b - begin))
            for p, begin in zip(chunks, begins, strict=False)
        )
        for a, b in itertools.pairwise(edges)
    ]
