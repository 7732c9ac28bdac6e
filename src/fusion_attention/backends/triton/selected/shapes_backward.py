"""Tile shapes of the backward over selected keys, by the number of query heads that share a key head.

Columns are processed in steps or in panels, so a tile supports rows of any length. The entries were found by
compilation, not by timing. `chip` is a compute capability, 90, 80 or 86; `align` the alignment of rows, in elements.
"""

from typing import NamedTuple

from fusion_attention.backends.triton.common import shapes
from fusion_attention.ir.problem import Problem


class SlotTile(NamedTuple):
    """The tile of a program: BH query heads and BN keys of a token, with BC columns at a time; and Triton's launch
    options."""

    BH: int
    BN: int
    BC: int
    num_warps: int
    num_stages: int
    TMA: bool = False  # keys are gathered, which tensor descriptors do not support


LISTS, ENTRIES = shapes.Tile(0, 0, 4, 1), 1024  # tile and slots per iteration of selection.read_lists()

SERVED = (16, 32, 64, 128)  # most heads of each entry of a table
# Kernel -> (chip, bytes of an element) -> tiles, fewest heads first; the last one is also for more heads.
KERNELS = ("weigh_slots", "backward_rows", "backward_slots")
TABLES: dict[str, dict[tuple[int, int], tuple[SlotTile, ...]]] = {
    "weigh_slots": {
        (90, 2): tuple(SlotTile(heads, 128, 64, 8 if heads > 64 else 4, 3) for heads in SERVED),
        (80, 2): (SlotTile(16, 64, 64, 4, 3), SlotTile(32, 128, 64, 4, 3), SlotTile(64, 128, 32, 4, 3)),
    },
    "backward_rows": {
        (90, 2): tuple(SlotTile(heads, 64, 256, 8 if heads > 32 else 4, 3) for heads in SERVED),
        (80, 2): tuple(SlotTile(heads, 64, 128, 8 if heads > 64 else 4, 3) for heads in SERVED),
    },
    # Heads are summed a few at a time, so that others are loaded meanwhile.
    "backward_slots": dict.fromkeys(
        ((90, 2), (80, 2)), (SlotTile(16, 128, 128, 8, 3), SlotTile(16, 128, 128, 8, 3), SlotTile(32, 128, 256, 8, 3))
    ),
}
# float32 products are multiply-adds, whose operands stay in registers.
FLOAT32 = {
    "weigh_slots": SlotTile(16, 32, 32, 4, 1),
    "backward_rows": SlotTile(16, 32, 64, 4, 1),
    "backward_slots": SlotTile(16, 32, 64, 4, 1),
}
# Rows that are not aligned to 16 bytes are loaded in smaller units, which needs registers.
ODD = {
    "weigh_slots": SlotTile(64, 64, 32, 8, 1),
    "backward_rows": SlotTile(64, 32, 64, 8, 1),
    "backward_slots": SlotTile(32, 64, 64, 8, 1),
}
for _table in TABLES.values():
    _table[86, 2] = _table[80, 2]
TABLES["weigh_slots"][86, 2] = (*TABLES["weigh_slots"][80, 2][:2], SlotTile(64, 64, 64, 4, 3))  # 64 x 128 spills here


def tile_of(kernel: str, problem: Problem, chip: int, align: int) -> SlotTile:
    """Returns the tile shape of a kernel in KERNELS; chip: compute capability; align: alignment of rows in elements."""
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
    """Divides `dim` columns into panels of at most `most` columns; returns [(first column, columns of a panel, number
    of such panels), ...]. Example: 576 with at most 256 are 2 panels of 256, then 1 of 64."""
    full, rest = dim // most, dim % most
    result = [(0, most, full)] if full else []
    first = full * most
    while rest > 0:
        low = max(shapes.NARROWEST, 1 << (rest.bit_length() - 1))
        # One panel if two would not have fewer columns.
        width = low if rest > low and low + shapes.power(rest - low) < shapes.power(rest) else shapes.power(rest)
        result.append((first, width, 1))
        first, rest = first + width, rest - width
    return result
