"""Describes a launch that is compiled ahead of time: a kernel of sparse attention, of the indexer or of its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from support.triton_ahead import TYPES

from fusion_attention.backends.triton.common.launching import Constants
from fusion_attention.backends.triton.common.shapes import Tile


@dataclass(frozen=True)
class Compiled:
    """The inputs of a compilation.

    Args:
        kernel: the Triton function.
        constants: its constexpr arguments, as its launch module makes them.
        types: types of arguments without an annotation, such as "*bf16"; an argument that is not listed is absent.
        tile: tile with the numbers of warps and stages.
        counted: record the number of instructions of its main loop.
        ahead: number of groups of loads that its loop must keep in flight.
        rows: rows of the first factor of its products; 0: the tile's BM.
    """

    kernel: Any
    constants: Constants
    types: Mapping[str, str]
    tile: Tile
    counted: bool = True
    ahead: int = 0
    rows: int = 0


# Chip (80, 86, 90) -> its compilation; None: the tile tables have no tile for the chip.
Config = Callable[[int], Compiled | None]


def pointers(dtype: str, *names: str) -> dict[str, str]:
    """Returns pointer types for arguments; dtype: name of torch, or Triton's short form."""
    return dict.fromkeys(names, "*" + TYPES.get(dtype, dtype))
