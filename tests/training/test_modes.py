"""The bands of the nine sparse modes, against loops over sequences, rows and keys that restate CANN's page."""

from itertools import product

import numpy as np
import pytest

from fusion_attention.ops.shared.sparse_modes import mode_band

UNLIMITED = 2**31 - 1
Lengths = list[tuple[int, int]]


def window(j: int, diagonal: int, pre: int, nxt: int) -> bool:
    """Returns whether key j is in a window around a diagonal; 2**31 - 1 tokens mean no limit."""
    if pre < UNLIMITED and j < diagonal - pre:
        return False
    return nxt >= UNLIMITED or j <= diagonal + nxt


def literal(mode: int, pre: int, nxt: int, prefix: list[int] | None, items: Lengths) -> list[np.ndarray]:
    """Returns by sequence the pairs that a mode shows without its mask: CANN's page in loops."""
    with_rows = [b for b in range(len(items)) if items[b][0] > 0]
    result = []
    for b, (rows, keys) in enumerate(items):
        visible = np.zeros((rows, keys), bool)
        for i, j in np.ndindex(rows, keys):
            right_down = i + keys - rows
            if mode == 0:
                visible[i, j] = window(j, i, pre, nxt)
            elif mode == 1:
                visible[i, j] = True
            elif mode == 2:
                visible[i, j] = j <= i
            elif mode == 3:
                visible[i, j] = j <= right_down
            elif mode == 4:
                visible[i, j] = window(j, right_down, pre, nxt)
            elif mode in (5, 6):
                visible[i, j] = j <= right_down or j < prefix[b]
            elif mode == 7:
                visible[i, j] = j <= right_down + (nxt if b == with_rows[-1] else 0)
            else:
                visible[i, j] = j <= right_down + nxt if b == with_rows[0] else j <= i
        result.append(visible)
    return result


ITEMS: list[Lengths] = [
    [(5, 5)],
    [(3, 7), (7, 3)],
    [(4, 6), (1, 1), (6, 6)],
    [(0, 4), (3, 5), (2, 2), (0, 3)],
    [(2, 0), (5, 9), (4, 4), (3, 0)],
]
WINDOWS = [(UNLIMITED, UNLIMITED), (UNLIMITED, 0), (2, UNLIMITED), (1, 2), (0, 0), (-1, 3), (4, -2), (9, -1), (-2, -3)]


def prefixes(items: Lengths) -> list[list[int] | None]:
    least = [max(0, keys - rows) for rows, keys in items]
    most = [keys for _, keys in items]
    return [least, most, [(a + b + 1) // 2 for a, b in zip(least, most, strict=True)]]


def visible_pairs(
    mode: int, items: Lengths, pre: int = UNLIMITED, nxt: int = UNLIMITED, prefix: list[int] | None = None
) -> list[np.ndarray]:
    """Returns by sequence the pairs in the band of the lowering, [rows, keys] bool."""
    q_len, kv_len = np.array(items, np.int64).T
    band = mode_band(mode, True, pre, nxt, None if prefix is None else np.array(prefix), q_len, kv_len)
    grids = (np.indices(item) for item in items)
    return [(j >= i + lo) & (j < np.maximum(i + hi, n)) for (i, j), lo, hi, n in zip(grids, *band, strict=True)]


@pytest.mark.parametrize("mode", range(9))
def test_band_of_each_sparse_mode_matches_literal_loops(mode: int) -> None:
    for items, (pre, nxt) in product(ITEMS, WINDOWS):
        for prefix in prefixes(items) if mode in (5, 6) else [None]:
            wanted = literal(mode, pre, nxt, prefix, items)
            for b, got in enumerate(visible_pairs(mode, items, pre, nxt, prefix)):
                assert np.array_equal(got, wanted[b]), (items, pre, nxt, prefix, b)


# ---------------------------------------------------------------------------------------------------- CANN's examples


def test_cut_batches_of_modes_7_and_8_see_same_keys_as_whole_batch() -> None:
    """CANN's examples: a packed batch that is divided between two devices."""
    # Mode 3 divided by queries: the first device runs mode 7, the second device mode 3.
    whole_3 = literal(3, UNLIMITED, UNLIMITED, None, [(3, 3), (4, 6), (5, 5), (4, 4)])
    front_7 = visible_pairs(7, [(3, 3), (2, 6)], 6, -2)
    rear_3 = visible_pairs(3, [(2, 6), (5, 5), (4, 4)])
    # Mode 2 divided by queries: the first device runs mode 2, the second device mode 8.
    whole_2 = literal(2, UNLIMITED, UNLIMITED, None, [(3, 3), (5, 4), (5, 5), (4, 4)])
    front_2 = visible_pairs(2, [(3, 3), (2, 4)])
    rear_8 = visible_pairs(8, [(3, 4), (5, 5), (4, 4)], 4, 1)
    for full, front, rear in ((whole_3, front_7, rear_3), (whole_2, front_2, rear_8)):
        joined = [front[0], np.concatenate((front[1], rear[0])), *rear[1:]]
        assert all(np.array_equal(got, want) for got, want in zip(joined, full, strict=True))
