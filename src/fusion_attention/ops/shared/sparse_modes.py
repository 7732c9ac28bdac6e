"""Conversion of CANN's sparse_mode, a number, to the interval of visible keys of each row (docs/sparse_modes.md)."""

import numpy as np

from fusion_attention.ir.mask import INFINITE, Band, tokens
from fusion_attention.ir.problem import Extents


def sparse_band(mode: int, pre: int, next_: int, prefix: np.ndarray | None) -> Band:
    """Returns the band (interval of visible keys per row) of CANN's sparse_mode, for a call with a mask.

    0: window of pre and next_ tokens around the diagonal from the upper left corner (the mask also applies); 1: the
    mask only; 2: causal, upper left; 3: causal, lower right; 4: window, lower right; 5 and 6: causal, and `prefix`
    leading keys; 7: as 3, and 8: as 2, with another diagonal in the sequence that is split between devices (mode_band).
    """
    match mode:
        case 0:
            return Band.window(pre, next_, "start")
        case 2 | 8:
            return Band.causal("start")
        case 3 | 7:
            return Band.causal("end")
        case 4:
            return Band.window(pre, next_, "end")
        case 5 | 6 if prefix is not None:
            return Band.prefix_causal(prefix.tolist())
        case _:
            return Band.full()


def mode_band(
    mode: int, has_mask: bool, pre: int, next_: int, prefix: np.ndarray | None, q_len: np.ndarray, kv_len: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (lo, hi, prefix), int64 [sequences], of sparse_mode: row i sees keys i + lo <= j < max(prefix, i + hi).

    Without a mask training operators ignore the mode: all keys are visible. Modes 7 and 8 shift the diagonal of the
    sequence that is split between two devices: the last (7) or the first (8) sequence with query rows. q_len, kv_len:
    lengths per sequence; pre, next_: tokens of the window.
    """
    if not has_mask:
        return Band.full().resolve(q_len, kv_len)
    lo, hi, prefixes = sparse_band(mode, pre, next_, prefix).resolve(q_len, kv_len)
    rows = np.flatnonzero(q_len)
    if mode in (7, 8) and len(rows):
        aligned_item = rows[-1] if mode == 7 else rows[0]
        hi[aligned_item] = np.clip(kv_len[aligned_item] - q_len[aligned_item] + tokens(next_) + 1, -INFINITE, INFINITE)
    return lo, hi, prefixes


def band_empties_rows(extents: Extents) -> bool:
    """True if the band of visible keys in `extents` leaves no key for some row in a sequence with keys."""
    e = extents
    past_the_end = e.q_len - 1 + e.lo >= e.kv_len
    before_the_start = (e.hi <= 0) & (e.prefix <= 0)
    inside_out = (e.lo >= e.hi) & (e.prefix <= 0)
    return bool(((e.q_len > 0) & (e.kv_len > 0) & (past_the_end | before_the_start | inside_out)).any())
