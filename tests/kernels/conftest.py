"""Triton's interpreter with patches (support/interpreter.py) and low tiles: TRITON_INTERPRET=1 pytest tests/kernels."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Triton reads the variable when it is imported, and other tests may import it first.
if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/kernels: set TRITON_INTERPRET=1 before Python starts, as `make test` does")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import numpy as np
from support import interpreter

from fusion_attention.backends.triton.common import shapes

interpreter.repair()

SMALL = shapes.Tile(16, 16, 4, 1, shapes.TMA)  # where rows start on 16 bytes


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tiles so low that a case of a few rows has several, complete and partial."""
    monkeypatch.setattr(shapes, "row_of", lambda *_: (SMALL, SMALL, 1))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences numpy's warnings about lanes that a mask removes later."""
    with np.errstate(all="ignore"):
        yield
