"""Tile shapes of the indexer's loss over selected keys (SELECTED) and over all keys (WARM).

The entries were found by compilation, not by timing. chip: compute capability; align: alignment of rows in elements.
"""

from typing import NamedTuple

from fusion_attention.backends.triton.common.shapes import Tile, power, widest
from fusion_attention.ir.problem import IndexerLossProblem, IndexerProblem


class Warm(NamedTuple):
    """Tile shapes of the kernels of the indexer's loss over all visible keys, by kernel; `columns` is a width of column
    blocks. Blocks of y - p have `target`'s BM x BN."""

    lse: Tile
    target: Tile
    difference: Tile  # the size of target, with other warps and stages
    query: Tile  # the rows of target; keys per iteration, a divisor of its keys
    key: Tile  # rows per iteration, a divisor of the rows of target; its keys
    columns: int  # elements of a row per iteration of target


def warm(num_stages: int, *sizes: tuple[int, int], columns: int = 64) -> Warm:
    """Returns tile shapes of 8 warps in the order of Warm's fields; sizes: (BM, BN) of each; columns: of a block."""
    lse, target, difference, query, key = (Tile(*size, 8, num_stages) for size in sizes)
    return Warm(lse, target, difference, query, key, columns)


# Chip (CHIPS) and bytes of an element -> (most elements of an indexer's row, tiles).
WARM: dict[tuple[int, int], tuple[tuple[int, Warm], ...]] = {
    (90, 2): (
        (128, warm(3, (64, 128), (128, 128), (128, 128), (128, 64), (64, 128))),
        (256, warm(2, (64, 64), (64, 64), (64, 64), (64, 32), (32, 64))),
    ),
    (80, 2): (
        # 64 keys of the kernel `query` leave no room to load ahead in 99 KB.
        (128, warm(3, (64, 64), (128, 64), (128, 64), (128, 32), (64, 64))),
        (256, warm(2, (32, 64), (64, 32), (64, 32), (64, 32), (32, 32))),
    ),
    **dict.fromkeys(((90, 4), (80, 4)), ((256, warm(1, *((16, 16),) * 5, columns=16)),)),
}
for _width in (2, 4):
    WARM[86, _width] = WARM[80, _width]


def warm_tiles(problem: IndexerProblem | IndexerLossProblem, chip: int, align: int = 8) -> Warm | None:
    """Returns the tile shapes of the kernels of the indexer's loss over all visible keys; None if the problem's dims
    have none. Rows not aligned (align: elements) to 16 bytes use the smallest tiles. chip: compute capability."""
    dim = problem.dim if isinstance(problem, IndexerProblem) else problem.dim_index
    rows = WARM[chip, 4 if problem.dtype == "float32" else 2]
    fits = [tiles for most, tiles in rows if power(dim) <= most]
    if not fits:
        return None
    return fits[0] if align >= widest(problem) else fits[-1]


class Selected(NamedTuple):
    """Tile shapes of kernels of the indexer's loss over selected keys: BM list entries, BN heads; a block's columns."""

    target: Tile
    score: Tile
    columns: int


# Chip and bytes of an element -> (most elements of an indexer's row, most of its heads, tiles).
SELECTED: dict[tuple[int, int], tuple[tuple[int, int, Selected], ...]] = {
    (90, 2): (
        (128, 64, Selected(Tile(128, 128, 8, 3), Tile(128, 64, 4, 3), 64)),
        (128, 128, Selected(Tile(128, 128, 8, 3), Tile(128, 128, 8, 3), 64)),
        (256, 128, Selected(Tile(128, 128, 8, 3), Tile(64, 128, 8, 2), 64)),
    ),
    (80, 2): (
        (128, 64, Selected(Tile(128, 128, 8, 3), Tile(64, 64, 4, 3), 64)),
        (128, 128, Selected(Tile(128, 128, 8, 3), Tile(64, 128, 8, 3), 64)),
        (256, 128, Selected(Tile(128, 128, 8, 3), Tile(32, 128, 8, 2), 64)),
    ),
    **dict.fromkeys(((90, 4), (80, 4)), ((256, 128, Selected(*(Tile(16, 16, 8, 1),) * 2, 16)),)),
}
for _width in (2, 4):
    SELECTED[86, _width] = SELECTED[80, _width]


def selected_tiles(problem: IndexerLossProblem, chip: int) -> Selected | None:
    """Returns the tiles of the indexer's loss over selected keys on compute capability `chip`; None if no tile fits."""
    p = problem
    rows = SELECTED[chip, 4 if p.dtype == "float32" else 2]
    candidates = ((tiles, power(p.dim_index) <= widest and p.heads_index <= heads) for widest, heads, tiles in rows)
    return next((tiles for tiles, fits in candidates if fits), None)
