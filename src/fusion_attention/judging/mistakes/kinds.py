"""What a mistake is: a name, a sentence, and settings that have it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusion_attention.ir.mask import INFINITE
from fusion_attention.judging.outputs import Output
from fusion_attention.judging.setting import Setting


@dataclass(frozen=True, eq=False)
class Case:
    """A call in which mistakes are looked for.

    Attributes:
        setting: as it should be. outputs: as they were captured. names: the bound call's, by name.
    """

    setting: Setting
    outputs: tuple[Output, ...]
    names: dict[str, Any]
    layout: str


@dataclass(frozen=True, eq=False)
class Try:
    """One way to make a mistake in a call: the setting that has it, or how its outputs would be read."""

    detail: str
    setting: Setting
    outputs: tuple[Output, ...] | None = None


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Args:
        name: as reports name it. means: one sentence: what the kernel does. fix: where to look.
        tries: the ways in which it could have been made in a case; none where it could not.
    """

    name: str
    means: str
    fix: str
    tries: Callable[[Case], Iterable[Try]]


def finite(edge: np.ndarray) -> np.ndarray:
    """Where an edge of a band is one."""
    return np.abs(edge) < INFINITE // 2


def moved(edge: np.ndarray, by: np.ndarray | int) -> np.ndarray:
    """An edge elsewhere; one at infinity stays there."""
    return np.where(finite(edge), edge + by, edge)


def same_band(one: Setting, other: Setting) -> bool:
    """Whether two settings show every row the same keys, as far as bands say."""
    for b in range(len(one.extents)):
        rows = np.arange(one.extents.q_len[b])
        (lo, hi), (low, high) = (s.extents.row_interval(b, rows) for s in (one, other))
        some, too = hi > lo, high > low
        if (some != too).any() or (some & ((lo != low) | (hi != high))).any():
            return False
    return True
