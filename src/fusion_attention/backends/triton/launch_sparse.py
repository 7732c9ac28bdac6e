"""Launches of attention to lists of selected keys: one program for a token and a few heads.

Knows lists. Refuses to know who chose what stands in them.
"""

from __future__ import annotations

import numpy as np

from fusion_attention.backends.triton import launching
from fusion_attention.waist.problem import Extents, Operands, Problem


def tokens(extents: Extents) -> np.ndarray:
    """[tokens, 2] int32: (sequence, row) of every token of all sequences."""
    seq = np.repeat(np.arange(len(extents)), extents.q_len)
    row = np.arange(len(seq)) - np.repeat(np.cumsum(extents.q_len) - extents.q_len, extents.q_len)
    return np.stack((seq, row), 1).astype(np.int32)


def run(problem: Problem, extents: Extents, schedule: launching.Schedule, o: Operands) -> None:
    """Launches the forward kernel."""
    raise NotImplementedError
