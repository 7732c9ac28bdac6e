"""The families by name: each draws a call from a number alone."""

from __future__ import annotations

import importlib

import numpy as np

from .core import Drawn

FAMILIES = ("attention", "training", "decode", "infer", "sparse", "indexer", "loss", "two_phase")


def drawn(family: str, number: int) -> Drawn:
    """Call `number` of a family, the same every time."""
    rng = np.random.default_rng([*family.encode(), number])
    return importlib.import_module(f".{family}", __package__).draw(rng)  # type: ignore[no-any-return]
