"""A kernel of lists, of the indexer or of its loss, as one launch of it is compiled ahead of time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from support.triton_ahead import TYPES

from fusion_attention.backends.triton.common.launching import Constants
from fusion_attention.backends.triton.common.shapes import Tile


@dataclass(frozen=True)
class Compiled:
    """What a launch compiles.

    Args:
        kernel: the function.
        constants: what it knows while compiling, as its launch module makes them.
        types: of arguments without an annotation ("*bf16"); one that is not listed is absent.
        tile: its warps and stages.
        counted: the instructions of its main loop are recorded.
        ahead: groups of loads that its loop must keep in flight.
        rows: of its products' first factor, where those are not the tile's BM.
    """

    kernel: Any
    constants: Constants
    types: Mapping[str, str]
    tile: Tile
    counted: bool = True
    ahead: int = 0
    rows: int = 0


# Chip (80, 86, 90) -> what is compiled for it; None: its tables hold no tile.
Config = Callable[[int], Compiled | None]


def pointers(dtype: str, *names: str) -> dict[str, str]:
    """Types of arguments that are memory of a dtype, by its name in torch, or in Triton's short form."""
    return dict.fromkeys(names, "*" + TYPES.get(dtype, dtype))
