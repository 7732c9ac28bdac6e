"""The factor on the dot products where a caller chose none."""

from __future__ import annotations


def scale_of(given: float | None, dim: int, rope: int = 0) -> float:
    """A scale as a number; None: 1 / sqrt(dim + rope)."""
    return (dim + rope) ** -0.5 if given is None else float(given)
