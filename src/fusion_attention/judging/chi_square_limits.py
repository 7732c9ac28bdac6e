"""The error bound: tests that the errors of a result are no larger than rounding explains, in every group of elements.

    z of a group = root mean square of error / expected size, over its elements

The groups are: each element, each row, each tile of 32 rows, each tile of 32 rows and 16 columns, each head, and all
elements. A group fails if its z exceeds its limit. Limits come from the chi-square distribution, corrected for the
number of groups, so that a result with only rounding errors fails in one of a million verdicts, for any number of
elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

Tensor = torch.Tensor
FALSE_ALARMS = 1e-6  # probability per verdict
TILE = 32  # rows of a tile
COLUMNS = 16  # columns of a tile
# Roundings may be dependent: equal rows have equal errors, and one rounding is up to sqrt(3) times its expected size.
# So no group of any size fails below twice the expected size.
LEAST = 2.0


@dataclass(frozen=True, eq=False)
class Expected:
    """The exact result (float64) with the expected size of its error in a correct program."""

    value: Tensor  # the result; for integers, before rounding
    size: Tensor  # expected root mean square error of each number: 0 if every correct program is exact
    # Number of randomly rounding programs from which the size was estimated; 0: it was computed by formulas.
    draws: int = 0

    def __getitem__(self, place: object) -> Expected:
        return Expected(self.value[place], self.size[place], self.draws)  # type: ignore[index]

    def map(self, change: object) -> Expected:
        """Applies the function `change`, a view or a permutation, to value and size."""
        return Expected(change(self.value), change(self.size), self.draws)  # type: ignore[operator]


@cache
def limit(freedom: int, looks: int, draws: int = 0) -> float:
    """Returns the limit of z, root mean square (error / expected size), for a group of `freedom` independent errors, if
    the verdict tests `looks` groups in all. Its square is the value that chi-square / freedom, with `freedom` degrees
    of freedom, exceeds with probability 1e-6 / looks. An expected size that was estimated from `draws` programs
    has an error itself, so the limit is increased as that of Student's t distribution."""
    chance = FALSE_ALARMS / max(looks, 1)
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        tail = torch.special.gammaincc(
            *(torch.tensor(x, dtype=torch.float64) for x in (freedom / 2, freedom * middle / 2))
        )
        low, high = (middle, high) if float(tail) > chance else (low, middle)
    result = math.sqrt(high)
    if draws:
        one = limit(1, looks)
        result *= math.sqrt((draws - 1) * math.expm1(one * one / (draws - 1))) / one
    return max(LEAST, result)


@dataclass(frozen=True)
class Look:
    """The group of an output's elements with the largest error, among groups of one kind (rows, tiles, heads, ...)."""

    kind: str  # "element", "row", "tile", "columns" (a tile of rows and columns), "head" or "whole" (all elements)
    z: float  # root mean square of (error / expected size) over the group
    limit: float  # the largest z that rounding explains
    place: tuple[int, int] = (0, 0)  # (head, row) of the group's first element

    @property
    def fails(self) -> bool:
        return not self.z <= self.limit


def ratios(ours: Tensor, value: Tensor, size: Tensor) -> Tensor:
    """Returns (error / expected size) ** 2 of each number, float64: 0 for equal values, inf if only one is finite.

    Of an integer, only the error beyond the half unit of rounding counts. If the exact value exceeds the dtype's
    largest number, infinity and the largest number are both correct. If it is above half the largest number, or the
    expected error exceeds the largest number, an infinity counts as the largest number.

    Args:
        ours: the result to judge.
        value: the exact value, float64.
        size: the expected size of the error.
    """
    value, mine = value.double(), ours.double()
    if ours.is_floating_point() and bool(mine.isinf().any()):
        last = torch.finfo(ours.dtype).max
        near = (value.abs() >= last / 2) & (value.sign() == mine.sign())
        near = (near | (size.double() >= last)) & value.isfinite()
        mine = mine.clamp(-last, last).where(near, mine)
    error = (mine - value).abs()
    if not ours.is_floating_point():
        error = (error - 0.5).clamp(min=0)
    else:
        largest = torch.finfo(ours.dtype).max
        if bool((value.abs() >= largest).any()):
            beyond = (value.abs() >= largest) & ((mine == value.sign() * math.inf) | (mine == value.sign() * largest))
            error = error.masked_fill(beyond, 0)
    result = (error / size.double()).square()
    if bool(result.isfinite().all()):
        return result
    same = (mine == value) | (mine.isnan() & value.isnan()) | (error == 0)
    return result.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0)


class Errors:
    """The squared ratios (error / expected size) ** 2 of one output by row, from which the errors of tiles and heads
    are computed.

    Args:
        lengths: number of rows of each sequence.
        heads: number of heads.
        columns: number of elements of a row.
    """

    def __init__(self, lengths: list[int], heads: int, columns: int) -> None:
        groups = max(1, -(-columns // COLUMNS))
        self.columns = max(columns, 1)
        self.widths = torch.tensor(
            [min(COLUMNS, self.columns - COLUMNS * i) for i in range(groups)], dtype=torch.float64
        )
        self.cells = [torch.zeros(heads, n, groups, dtype=torch.float32) for n in lengths]  # means over 16 columns
        self.peaks = [torch.zeros(heads, n, dtype=torch.float32) for n in lengths]  # row maxima

    def add(self, b: int, heads: slice, rows: slice, errors: Tensor) -> None:
        """Stores `errors`, (error / expected size)^2 [heads, rows, columns] of a range of rows of sequence b."""
        if not errors.numel():
            return
        errors = errors.clamp(max=1e30)
        full = self.columns // COLUMNS * COLUMNS
        parts = [errors[..., :full].unflatten(-1, (-1, COLUMNS)).mean(-1)] if full else []
        parts += [errors[..., full:].mean(-1, keepdim=True)] if full < self.columns else []
        self.cells[b][heads, rows] = torch.cat(parts, -1).float()
        self.peaks[b][heads, rows] = errors.amax(-1).float()

    def append(self, errors: Tensor) -> None:
        """Stores `errors`, (error / expected size)^2 [heads, rows, columns] of further rows, as a new sequence."""
        shape = errors.shape[:2]
        self.cells.append(torch.zeros(*shape, len(self.widths), dtype=torch.float32))
        self.peaks.append(torch.zeros(shape, dtype=torch.float32))
        self.add(len(self.cells) - 1, slice(None), slice(None), errors)

    @property
    def count(self) -> int:
        """The number of rows of the output, over all sequences and heads."""
        return sum(p.numel() for p in self.peaks)

    @property
    def of_rows(self) -> list[Tensor]:
        """Mean of (error / expected size)^2 over each row: [heads, rows] float64 per sequence."""
        weights = self.widths / self.columns
        return [c.double() @ weights for c in self.cells]

    @property
    def z(self) -> float:
        """Root mean square of error / expected size over all elements of the output."""
        rows = self.of_rows
        return math.sqrt(sum(float(r.sum()) for r in rows) / self.count) if self.count else 0.0

    @property
    def z_tile(self) -> float:
        """Root mean square of error / expected size in the worst tile of rows."""
        return max((float(_tiles(r).amax()) for r in self.of_rows if r.numel()), default=0.0) ** 0.5

    @property
    def looks(self) -> int:
        """The number of groups of elements that are tested: elements, rows, tiles of rows, tiles of rows and columns,
        heads, and all elements together."""
        heads = sum(len(p) for p in self.peaks)
        tiles = sum(p.shape[0] * -(-p.shape[1] // TILE) for p in self.peaks)
        return self.count * (self.columns + 1) + tiles * (1 + len(self.widths)) + heads + 1

    def worst(self, draws: int = 0) -> Iterator[tuple[int, Look]]:
        """Yields (sequence, its group with the largest error) for every kind of group (elements, rows, tiles, ...);
        sequence -1: all elements.
        draws: the number of programs from which expected sizes were estimated; 0: they were computed by formulas."""
        looks = self.looks
        for b, (cells, peaks, rows) in enumerate(zip(self.cells, self.peaks, self.of_rows, strict=True)):
            if not rows.numel():
                continue
            n = min(TILE, rows.shape[1])
            tiles, blocks = _tiles(rows), _tiles(cells.double().movedim(-1, 1).flatten(0, 1))
            yield b, _look("element", peaks, limit(1, looks, draws), 1)
            yield b, _look("row", rows, limit(1, looks, draws), 1)
            yield b, _look("tile", tiles, limit(n, looks, draws), TILE)
            if len(self.widths) > 1:
                by_head = blocks.unflatten(0, (len(rows), -1)).amax(1)
                yield b, _look("columns", by_head, limit(n, looks, draws), TILE)
            yield b, _look("head", rows.mean(-1, keepdim=True), limit(rows.shape[1], looks, draws), 1)
        if self.count:
            yield -1, Look("whole", self.z, limit(self.count, looks, draws))

    def fails(self, draws: int = 0) -> list[tuple[int, Look]]:
        """Returns (sequence, group of elements) for each kind of group and sequence whose worst group exceeds its error
        limit, the worst first; draws: number of programs from which expected errors were estimated, or 0."""
        results = [(b, look) for b, look in self.worst(draws) if look.fails]
        return sorted(results, key=lambda f: -f[1].z / f[1].limit)

    def wrong(self, draws: int = 0) -> list[Tensor]:
        """Returns bool [heads, rows] per sequence, true if an element, row or tile exceeds its error limit; draws:
        number of programs from which expected errors were estimated, or 0."""
        looks, result = self.looks, []
        for peaks, cells, rows in zip(self.peaks, self.cells, self.of_rows, strict=True):
            one = limit(1, looks, draws) ** 2
            bad = (peaks > one) | (rows > one)
            if rows.numel():
                most = limit(min(TILE, rows.shape[1]), looks, draws) ** 2
                blocks = _tiles(cells.double().movedim(-1, 1).flatten(0, 1)).unflatten(0, (len(rows), -1)).amax(1)
                tiles = torch.maximum(_tiles(rows), blocks) > most
                # In a tile that fails, the rows above the tile's limit are wrong.
                above = tiles.repeat_interleave(TILE, 1)[:, : rows.shape[1]] & (cells.double().amax(-1) > most)
                bad = bad | above
            result.append(bad)
        return result


def _tiles(rows: Tensor) -> Tensor:
    """Returns the means [.., tiles] of each 32 consecutive rows [.., rows]; the last tile ends at the last row."""
    length = rows.shape[-1]
    if length <= TILE:
        return rows.mean(-1, keepdim=True)
    full = length // TILE * TILE
    result = rows[..., :full].unflatten(-1, (-1, TILE)).mean(-1)
    return result if full == length else torch.cat((result, rows[..., -TILE:].mean(-1, keepdim=True)), -1)


def _look(kind: str, values: Tensor, limit: float, step: int) -> Look:
    at = int(values.argmax())
    head, row = divmod(at, values.shape[-1])
    return Look(kind, math.sqrt(float(values.reshape(-1)[at])), limit, (head, row * step))
