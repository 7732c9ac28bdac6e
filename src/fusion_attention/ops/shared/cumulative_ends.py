"""Cumulative ends of packed sequences: conversion to lengths, and validity checks."""

import numpy as np


def lengths_of(ends: np.ndarray) -> np.ndarray:
    """Returns lengths from cumulative ends, which may be followed by zeros: these are sequences of length 0."""
    return np.maximum(np.diff(ends, prepend=0), 0)


def rising(ends: np.ndarray) -> bool | str:
    """True (else the fault as text) if cumulative ends never fall, except to a tail of zeros."""
    if len(ends) and ends[0] >= 0 and (ends[1:] >= ends[:-1]).all():
        return True
    used = len(np.trim_zeros(ends, "b"))
    falls = np.flatnonzero(ends[:used] < np.append(0, ends[:used])[:used]).tolist()  # a difference might overflow int64
    return not falls or f"item {falls[0]}: {ends[falls[0]]} after {ends[falls[0] - 1] if falls[0] else 0}"


def last_end(ends: np.ndarray) -> int:
    """Returns the total number of tokens of sequences with these cumulative ends."""
    return int(ends.max(initial=0))
