"""The type of mistakes, and helpers to edit bands."""

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
    """A call to be diagnosed.

    Attributes:
        setting: the correct setting. outputs: the captured outputs. names: values of the bound call. layout: of rows.
    """

    setting: Setting
    outputs: tuple[Output, ...]
    names: dict[str, Any]
    layout: str


@dataclass(frozen=True, eq=False)
class Try:
    """One way to make a mistake in a call: the setting that reproduces it, or other views of the outputs."""

    detail: str
    setting: Setting
    outputs: tuple[Output, ...] | None = None


@dataclass(frozen=True)
class Mistake:
    """A well-known mistake. `@partial(Mistake, name, means, fix)` makes one of the function that yields its ways.

    Args:
        name: its name in reports. means: what the kernel does, in a sentence. fix: advice.
        tries: yields the ways to make the mistake in a case; none if that is impossible.
    """

    name: str
    means: str
    fix: str
    tries: Callable[[Case], Iterable[Try]]


def finite(edge: np.ndarray) -> np.ndarray:
    """Returns bool, true where an edge of a band is finite."""
    return np.abs(edge) < INFINITE // 2


def moved(edge: np.ndarray, by: np.ndarray | int) -> np.ndarray:
    """Shifts an edge; an infinite edge stays infinite."""
    return np.where(finite(edge), edge + by, edge)


def same_band(one: Setting, other: Setting) -> bool:
    """True if the bands of two settings give every row the same keys."""
    for b in range(len(one.extents)):
        rows = np.arange(one.extents.q_len[b])
        (lo, hi), (low, high) = (s.extents.row_interval(b, rows) for s in (one, other))
        some, too = hi > lo, high > low
        if (some != too).any() or (some & ((lo != low) | (hi != high))).any():
            return False
    return True
