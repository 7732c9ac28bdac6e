"""The work list of a kernel: the interval of keys for each tile of rows, or of rows for each tile of keys.

numpy computes a few integers per tile from the bands only. Between full_begin and full_end no mask is needed. The tiles
of a sequence do not depend on the other sequences of the batch.
"""

from dataclasses import dataclass

import numpy as np

from fusion_attention.ir.problem import Extents


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of an attention kernel with their visible ranges, as arrays (int64, one entry per tile).
    From by_query(): rows [row0, row1) of sequence seq read keys [begin, end); keys in [full_begin, full_end) are
    visible to all rows of the tile. From by_key(): keys [row0, row1) are read by query rows [begin, end); all keys of
    the tile are visible to rows in [full_begin, full_end). If there are none, full_begin = full_end."""

    seq: np.ndarray
    row0: np.ndarray
    row1: np.ndarray
    begin: np.ndarray
    full_begin: np.ndarray
    full_end: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.seq)


def divided(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns arrays (sequence, first, end) of the tiles of `size` tokens that divide sequences of these lengths."""
    count = -(-lengths // size)
    seq = np.repeat(np.arange(len(lengths)), count)
    first = (np.arange(len(seq)) - np.repeat(np.cumsum(count) - count, count)) * size
    return seq, first, np.minimum(first + size, lengths[seq])


def _tiles(seq: np.ndarray, row0: np.ndarray, row1: np.ndarray, edges: tuple[np.ndarray, ...]) -> Tiles:
    begin, full_begin, full_end, end = edges
    end = np.maximum(end, begin)
    full_begin = np.clip(full_begin, begin, end)
    full_end = np.clip(full_end, full_begin, end)
    return Tiles(seq, row0, row1, begin, full_begin, full_end, end)


def _sees(lo: np.ndarray, hi: np.ndarray, prefix: np.ndarray) -> np.ndarray:
    """Returns bool [n], for each of n sequences or tiles true if its band (edges lo and hi, or a prefix) is not empty.
    A tile may have begin < end although the band of each of its rows is empty."""
    return (hi > lo) | (prefix > 0)


def by_query(extents: Extents, size: int, ratio: int = 1) -> Tiles:
    """Returns tiles of `size` query rows that cover all rows, with the range of keys that they see (empty: begin =
    end). ratio: tokens that a key represents. Tiles of a chunk have the boundaries and first keys of the complete
    sequence's tiles."""
    if extents.chunk_origin is None:
        seq, row0, row1 = divided(extents.q_len, size)
    else:
        # Boundaries are multiples of `size` in the complete sequence; a chunk's first tile may begin before its row 0.
        ahead = extents.chunk_origin.first_row % size
        seq, row0, row1 = divided(np.where(extents.q_len > 0, extents.q_len + ahead, 0), size)
        row0, row1 = row0 - ahead[seq], row1 - ahead[seq]
    lo, hi, prefix, kv_len = (a[seq] for a in (extents.lo, extents.hi, extents.prefix, extents.kv_len))
    last = row1 - 1
    begin = np.clip(row0 + lo, 0, kv_len)
    row0 = np.maximum(row0, 0)
    full_begin = np.clip(last + lo, 0, kv_len)
    full_end = np.clip(np.maximum((row0 + hi) // ratio, prefix), 0, kv_len)
    end = np.where(_sees(lo, hi, prefix), np.clip(np.maximum((last + hi) // ratio, prefix), 0, kv_len), begin)
    return _tiles(seq, row0, row1, (begin, full_begin, full_end, end))


def by_key(extents: Extents, size: int, ratio: int = 1) -> Tiles:
    """Returns tiles of `size` keys that cover all keys, with the range of queries that see them (empty: begin = end);
    ratio: tokens that a key represents."""
    seq, key0, key1 = divided(extents.kv_len, size)
    lo, hi, prefix, q_len = (a[seq] for a in (extents.lo, extents.hi, extents.prefix, extents.q_len))
    # Key j is visible to row i if i <= j - lo, and j < prefix or i + hi >= (j + 1) * ratio.
    begin = np.where(key0 < prefix, 0, np.clip((key0 + 1) * ratio - hi, 0, q_len))
    full_begin = np.where(key1 <= prefix, 0, np.clip(key1 * ratio - hi, 0, q_len))
    full_end = np.clip(key0 - lo + 1, 0, q_len)
    end = np.where(_sees(lo, hi, prefix), np.clip(key1 - lo, 0, q_len), begin)
    return _tiles(seq, key0, key1, (begin, full_begin, full_end, end))
