"""Cumulative ends of packed sequences: conversion to lengths, and validity checks."""

import numpy as np


def lengths_of(ends: np.ndarray) -> np.ndarray:
    """Returns lengths from inclusive cumulative ends; sequences in zeros after a positive end have length 0."""
    return np.maximum(np.diff(ends, prepend=0), 0)


def broken_end(ends: np.ndarray) -> int:
    """Returns the index of the first cumulative end below its predecessor and not in a tail of zeros; else -1."""
    used = len(np.trim_zeros(ends, "b"))
    falls = np.flatnonzero(ends[:used] < np.append(0, ends[:used])[:used])  # a difference might overflow int64
    return int(falls[0]) if len(falls) else -1


def rising(ends: np.ndarray) -> bool | str:
    """True (else the fault as text) if cumulative ends never fall, except to a tail of zeros."""
    if len(ends) and ends[0] >= 0 and (ends[1:] >= ends[:-1]).all():
        return True
    item = broken_end(ends)
    return item < 0 or f"item {item}: {ends[item]} after {ends[item - 1] if item else 0}"


def last_end(ends: np.ndarray) -> int:
    """Returns the number of tokens in all sequences of cumulative ends."""
    return int(ends.max(initial=0))
