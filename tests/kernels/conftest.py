"""Triton's interpreter with patches (support/interpreter.py) and low tiles: TRITON_INTERPRET=1 pytest tests/kernels."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Triton reads the variable when it is imported, and other tests may import it first.
if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/kernels: set TRITON_INTERPRET=1 before Python starts, as `make test` does")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import numpy as np
from support import interpreter

from fusion_attention.backends.triton.common import shapes
from fusion_attention.backends.triton.common.shapes import Tile
from fusion_attention.backends.triton.indexer import launch_loss, shapes_loss
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.backends.triton.selected import shapes_backward

interpreter.repair()

DENSE = Tile(16, 16, 4, 1, shapes.TMA)  # where rows start on 16 bytes
SMALL, FLAT, BLOCK = Tile(16, 16, 4, 1), Tile(16, 32, 4, 1), Tile(0, 16, 4, 1)
TILES: tuple[tuple[ModuleType, str, Any], ...] = (
    (shapes, "row_of", (DENSE, DENSE, 1)),
    *((shapes_sparse, name, SMALL) for name in ("forward_tile", "scores_tile", "gradient_tile")),
    (shapes_backward, "tile_of", shapes_backward.SlotTile(16, 16, 16, 4, 1)),
    # Statistics and differences have equal tiles: numpy's products then round their scores alike, as a GPU's do.
    (shapes_loss, "warm_tiles", shapes_loss.Warm(FLAT, FLAT, FLAT, SMALL, FLAT, 16)),
    (shapes_loss, "selected_tiles", shapes_loss.Selected(SMALL, SMALL, 16)),
)
SIZES = {"CANDIDATES": 16, "CHOICE": BLOCK, "WRITE": BLOCK, "FEWEST": 4, "ONE_LAUNCH": 16}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tiles so low that a few rows, keys, heads and columns have several, complete and partial."""
    for module, name, tile in TILES:
        monkeypatch.setattr(module, name, lambda *_, tile=tile: tile)
    for name, size in SIZES.items():
        monkeypatch.setattr(shapes_sparse, name, size)
    monkeypatch.setattr(launch_loss, "SLOTS", 16)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences numpy's warnings about lanes that a mask removes later."""
    with np.errstate(all="ignore"):
        yield
