"""Packed lengths: from cumulative ends to the tokens of each sequence, and what may be wrong with ends."""

from __future__ import annotations

import numpy as np


def lengths_of(ends: np.ndarray) -> np.ndarray:
    """Lengths from inclusive cumulative ends; a tail of zeros after a positive end disables its items."""
    return np.maximum(np.diff(ends, prepend=0), 0)


def broken_end(ends: np.ndarray) -> int:
    """The first item whose end falls below its predecessor's and that is not in a tail of zeros; -1 if none."""
    used = len(np.trim_zeros(ends, "b"))
    falls = np.flatnonzero(ends[:used] < np.append(0, ends[:used])[:used])  # a difference might leave int64
    return int(falls[0]) if len(falls) else -1


def rising(ends: np.ndarray) -> bool | str:
    """Whether cumulative ends never fall, but for a tail of zeros."""
    if len(ends) and ends[0] >= 0 and (ends[1:] >= ends[:-1]).all():
        return True
    item = broken_end(ends)
    return item < 0 or f"item {item}: {ends[item]} after {ends[item - 1] if item else 0}"


def last_end(ends: np.ndarray) -> int:
    """The number of tokens that cumulative ends cover; a tail of zeros adds none."""
    return int(ends.max(initial=0))
