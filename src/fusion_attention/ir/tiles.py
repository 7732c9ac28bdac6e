"""The work list: which keys a tile of rows meets, and the transpose of that for a tile of keys.

A few integers per tile, built by numpy from the bands alone; what sees no key is not listed, and between full_begin
and full_end no mask is needed. Depends on each sequence's own lengths and on nothing else in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusion_attention.ir.problem import Extents


@dataclass(frozen=True, eq=False)
class Tiles:
    """Structure of arrays (int64, one entry per tile).

    by_query: rows [row0, row1) of sequence seq meet keys [begin, end), of which [full_begin, full_end) are seen by
    every row of the tile. by_key: keys [row0, row1) meet query rows [begin, end), of which [full_begin, full_end)
    see every key of the tile. Where nothing is full, full_begin = full_end.
    """

    seq: np.ndarray
    row0: np.ndarray
    row1: np.ndarray
    begin: np.ndarray
    full_begin: np.ndarray
    full_end: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.seq)


def _tiles_of(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(seq, first, end) of pieces of at most `size` from each sequence's start."""
    count = -(-lengths // size)
    seq = np.repeat(np.arange(len(lengths)), count)
    within = np.arange(len(seq)) - np.repeat(np.cumsum(count) - count, count)
    first = within * size
    return seq, first, np.minimum(first + size, lengths[seq])


def _tiles(seq: np.ndarray, row0: np.ndarray, row1: np.ndarray, edges: tuple[np.ndarray, ...]) -> Tiles:
    begin, full_begin, full_end, end = edges
    end = np.maximum(end, begin)
    full_begin = np.clip(full_begin, begin, end)
    full_end = np.clip(full_end, full_begin, end)
    return Tiles(seq, row0, row1, begin, full_begin, full_end, end)


def _sees(lo: np.ndarray, hi: np.ndarray, prefix: np.ndarray) -> np.ndarray:
    """Whether a band can leave any row a key; where its edges cross, a whole tile's edges still may not."""
    return (hi > lo) | (prefix > 0)


def _cut_parts(extents: Extents, first_row: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(seq, first, end) of pieces between multiples of `size` of the whole sequence; the first may begin before row 0,
    where the whole one's piece does."""
    ahead = first_row % size
    seq, first, end = _tiles_of(np.where(extents.q_len > 0, extents.q_len + ahead, 0), size)
    return seq, first - ahead[seq], end - ahead[seq]


def by_query(extents: Extents, size: int, ratio: int = 1) -> Tiles:
    """Tiles of `size` query rows, every row listed (a tile that sees no key has begin = end: its rows are empty).

    ratio: as in IndexerProblem.

    Parts are cut where their whole sequence is, and begin with the keys that the whole tile begins with.
    """
    if extents.part is None:
        seq, row0, row1 = _tiles_of(extents.q_len, size)
    else:
        seq, row0, row1 = _cut_parts(extents, extents.part.first_row, size)
    lo, hi, prefix, kv_len = (a[seq] for a in (extents.lo, extents.hi, extents.prefix, extents.kv_len))
    last = row1 - 1
    begin = np.clip(row0 + lo, 0, kv_len)
    row0 = np.maximum(row0, 0)
    full_begin = np.clip(last + lo, 0, kv_len)
    full_end = np.clip(np.maximum((row0 + hi) // ratio, prefix), 0, kv_len)
    end = np.where(_sees(lo, hi, prefix), np.clip(np.maximum((last + hi) // ratio, prefix), 0, kv_len), begin)
    return _tiles(seq, row0, row1, (begin, full_begin, full_end, end))


def by_key(extents: Extents, size: int, ratio: int = 1) -> Tiles:
    """Tiles of `size` keys, every key listed (a tile that no row sees has begin = end: its gradient is zero)."""
    seq, key0, key1 = _tiles_of(extents.kv_len, size)
    lo, hi, prefix, q_len = (a[seq] for a in (extents.lo, extents.hi, extents.prefix, extents.q_len))
    # Row i sees key j when i <= j - lo, and j < prefix or i + hi >= (j + 1) * ratio.
    begin = np.where(key0 < prefix, 0, np.clip((key0 + 1) * ratio - hi, 0, q_len))
    full_begin = np.where(key1 <= prefix, 0, np.clip(key1 * ratio - hi, 0, q_len))
    full_end = np.clip(key0 - lo + 1, 0, q_len)
    end = np.where(_sees(lo, hi, prefix), np.clip(key1 - lo, 0, q_len), begin)
    return _tiles(seq, key0, key1, (begin, full_begin, full_end, end))
