"""Tile shapes of the backward over selected keys, by the number of query heads that share a key head.

Columns stream past or are cut into panels, so a tile serves rows of any length. Every row was found by compiling, not
by timing, as those of shapes.py were.
"""

from __future__ import annotations

from typing import NamedTuple

from fusion_attention.backends.triton.common import shapes
from fusion_attention.ir.problem import Problem


class SlotTile(NamedTuple):
    """BH heads meet BN slots; BC columns at a time."""

    BH: int
    BN: int
    BC: int
    num_warps: int
    num_stages: int
    TMA: bool = False  # keys are gathered: no descriptor says where they lie


LISTS, ENTRIES = shapes.Tile(0, 0, 4, 1), 1024  # of selection.read_lists(), and slots that a turn of it fills

# Kernel -> (chip, bytes of an element) -> tiles, the fewest heads first; the last serves more heads too.
KERNELS = ("weigh_slots", "backward_rows", "backward_slots")
TABLES: dict[str, dict[tuple[int, int], tuple[SlotTile, ...]]] = {
    "weigh_slots": {
        (90, 2): (
            SlotTile(16, 128, 64, 4, 3),
            SlotTile(32, 128, 64, 4, 3),
            SlotTile(64, 128, 64, 4, 3),
            SlotTile(128, 128, 64, 8, 3),
        ),
        (80, 2): (
            SlotTile(16, 64, 64, 4, 3),
            SlotTile(32, 128, 64, 4, 3),
            SlotTile(64, 128, 32, 4, 3),
        ),  # 128 x 128 spills
    },
    "backward_rows": {
        (90, 2): (
            SlotTile(16, 64, 256, 4, 3),
            SlotTile(32, 64, 256, 4, 3),
            SlotTile(64, 64, 256, 8, 3),
            SlotTile(128, 64, 256, 8, 3),
        ),
        (80, 2): (
            SlotTile(16, 64, 128, 4, 3),
            SlotTile(32, 64, 128, 4, 3),
            SlotTile(64, 64, 128, 4, 3),
            SlotTile(128, 64, 128, 8, 3),
        ),
    },
    # Heads are summed, a few at a time: so that others are loaded meanwhile.
    "backward_slots": dict.fromkeys(
        ((90, 2), (80, 2)), (SlotTile(16, 128, 128, 8, 3), SlotTile(16, 128, 128, 8, 3), SlotTile(32, 128, 256, 8, 3))
    ),
}
SERVED = (16, 32, 64, 128)  # heads of the entries
# float32 is multiplied by plain multiply-adds, whose operands stay in registers.
FLOAT32 = {
    "weigh_slots": SlotTile(16, 32, 32, 4, 1),
    "backward_rows": SlotTile(16, 32, 64, 4, 1),
    "backward_slots": SlotTile(16, 32, 64, 4, 1),
}
# Rows that do not start on 16 bytes are read in smaller pieces, which takes registers.
ODD = {
    "weigh_slots": SlotTile(64, 64, 32, 8, 1),
    "backward_rows": SlotTile(64, 32, 64, 8, 1),
    "backward_slots": SlotTile(32, 64, 64, 8, 1),
}
for _table in TABLES.values():
    _table[86, 2] = _table[80, 2]
TABLES["weigh_slots"][86, 2] = (*TABLES["weigh_slots"][80, 2][:2], SlotTile(64, 64, 64, 4, 3))  # 64 x 128 spills here


def cut_of(kernel: str, problem: Problem, chip: int, align: int) -> SlotTile:
    """The tile of a kernel; align: elements of which every row's start is a multiple."""
    if problem.dtype == "float32":
        return FLOAT32[kernel]
    rows = TABLES[kernel][chip, 2]
    heads = shapes.power(problem.group)
    result = next((tile for most, tile in zip(SERVED, rows, strict=False) if heads <= most), rows[-1])
    if align == shapes.widest(problem):
        return result
    odd = ODD[kernel]
    return odd._replace(BH=min(odd.BH, result.BH))


def panels(dim: int, most: int) -> list[tuple[int, int, int]]:
    """(first column, columns, how many) of panels that hold `dim` columns: 576 in 256 is 2 of 256 and one of 64."""
    full, rest = dim // most, dim % most
    result = [(0, most, full)] if full else []
    first = full * most
    while rest > 0:
        low = max(shapes.NARROWEST, 1 << (rest.bit_length() - 1))
        # One panel where what is left over would be as much again.
        width = low if rest > low and low + shapes.power(rest - low) < shapes.power(rest) else shapes.power(rest)
        result.append((first, width, 1))
        first, rest = first + width, rest - width
    return result
