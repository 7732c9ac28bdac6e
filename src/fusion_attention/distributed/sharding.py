"""Which tokens lie on which rank, in which order: a pure function of schedule, lengths and the shape of the world.

Cuts lie on multiples of CUT tokens, counted from each sequence's start. Refuses to know tensors and groups.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Rows of a kernel's tile: a sequence cut at its multiples is computed tile by tile as a whole one is.
CUT = 64
SCHEDULES = ("allgather", "ring", "zigzag", "ulysses", "ulysses+ring")
# Those that give a rank an early and a late part of each sequence, so that causal bands load all ranks alike.
_BALANCED = ("allgather", "zigzag", "ulysses+ring")


class Piece(NamedTuple):
    """Neighbouring tokens of one sequence: from `first`, before `end`."""

    sequence: int
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Layout:
    """How the tokens of sequences lie on ranks.

    Attributes:
        lengths: tokens of each sequence.
        ranks: the pieces of each rank, in the order in which they lie there; none is empty.
    """

    lengths: tuple[int, ...]
    ranks: tuple[tuple[Piece, ...], ...]

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(sum(piece.end - piece.first for piece in pieces) for pieces in self.ranks)

    def whole(self, rank: int) -> np.ndarray:
        """Where the tokens of a rank stand among the tokens of all sequences, end to end: int64, in local order."""
        starts = np.cumsum((0, *self.lengths))
        parts = [np.arange(p.first, p.end) + starts[p.sequence] for p in self.ranks[rank]]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

    def positions(self, rank: int) -> np.ndarray:
        """Where the tokens of a rank stand within their sequences: int64, in local order."""
        parts = [np.arange(p.first, p.end) for p in self.ranks[rank]]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


@functools.lru_cache(maxsize=256)
def layout(schedule: str, lengths: tuple[int, ...], shape: tuple[int, ...]) -> Layout:
    """The layout of sequences on a world of a shape: (ranks,), or (ring, ulysses) of "ulysses+ring"."""
    ring = shape[0]
    chunks = 2 * ring if schedule in _BALANCED else ring
    shares = _Shares(ring)
    # Long sequences first: what they leave uneven short ones fill up.
    for b in sorted(range(len(lengths)), key=lambda b: (-lengths[b], b)):
        if lengths[b] >= chunks * CUT:
            for at, (first, end) in enumerate(_chunks(lengths[b], chunks)):
                shares.add(min(at, 2 * ring - 1 - at) if chunks > ring else at, Piece(b, first, end))
        else:
            shares.place(b, lengths[b])
    ranks = [_joined(pieces) for pieces in shares.pieces]
    if len(shape) == 2:
        ranks = [part for pieces in ranks for part in _divided(pieces, shape[1])]
    return Layout(lengths, tuple(ranks))


def _chunks(length: int, count: int) -> list[tuple[int, int]]:
    """(first, end) of `count` parts of a sequence, which differ by CUT tokens at most."""
    tiles = -(-length // CUT)
    edges = [min(tiles * at // count * CUT, length) for at in range(count + 1)]
    return list(zip(edges, edges[1:], strict=False))


class _Shares:
    """What each rank has been given so far."""

    def __init__(self, ranks: int) -> None:
        self.pieces: list[list[Piece]] = [[] for _ in range(ranks)]
        self.tokens, self.pairs = [0] * ranks, [0] * ranks

    def add(self, rank: int, piece: Piece) -> None:
        if piece.end > piece.first:
            self.pieces[rank].append(piece)
            self.tokens[rank] += piece.end - piece.first
            self.pairs[rank] += (piece.end * (piece.end + 1) - piece.first * (piece.first + 1)) // 2

    def place(self, b: int, length: int) -> None:
        """A short sequence: in one piece where that leaves memory balanced, else in several neighbouring ones."""
        self.add(min(range(len(self.tokens)), key=lambda rank: (self.tokens[rank], self.pairs[rank], rank)), Piece(b, 0, length))


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Pieces in order; neighbours are one."""
    found: list[Piece] = []
    for piece in sorted(pieces):
        if found and found[-1].sequence == piece.sequence and found[-1].end == piece.first:
            found[-1] = found[-1]._replace(end=piece.end)
        else:
            found.append(piece)
    return tuple(found)


def _divided(pieces: tuple[Piece, ...], parts: int) -> list[tuple[Piece, ...]]:
    """The tokens of one share in their order, divided among ranks at cuts of their sequences."""
    tiles = [
        Piece(p.sequence, first, min((first // CUT + 1) * CUT, p.end))
        for p in pieces
        for first in (p.first, *range((p.first // CUT + 1) * CUT, p.end, CUT))
    ]
    edges = [len(tiles) * at // parts for at in range(parts + 1)]
    return [_joined(tiles[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
