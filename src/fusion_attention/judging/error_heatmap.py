"""Draws where a result is wrong: heads by rows (by keys for gradients of keys and values), or rows by keys.

grid() reduces the errors to cells; text() and figure() draw them for a terminal and for an HTML page.
"""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fusion_attention.judging.chi_square_limits import COLUMNS, LEAST
from fusion_attention.judging.standards import Tally

if TYPE_CHECKING:
    from rich.text import Text

Tensor = torch.Tensor
TERMINAL = (16, 64)  # largest numbers of cells down and across
OF_MASK = (8, 64)
PAGE = (96, 96)
_FINITE = 1e14  # larger numbers in Errors represent errors that are not finite
_MARKS = "░▒▓█"
_STYLES = ("yellow", "yellow", "red", "bold red")
_WITHIN, _STRANGE = "·", "!"


@dataclass(frozen=True, eq=False)
class Mask:
    """The keys that each query of a sequence's first head sees, in cells of several queries by several keys."""

    visible: Tensor  # [cells down, cells across], the fraction of a cell's keys that are visible to its first row
    steps: tuple[int, int]  # numbers of rows and keys in a cell
    of: str = ""  # words for the title: " of sequence 2", or "" if the call has one sequence

    def lines(self) -> list[str]:
        """Returns a drawing of the mask as lines of text: a title, the numbers of keys, and lines of block characters,
        one for each row of cells."""
        marks = [["█" if f == 1 else "▒" if f else _WITHIN for f in row] for row in self.visible.tolist()]
        margin = len(f"rows {(len(marks) - 1) * self.steps[0]}")
        title = f"the mask{self.of}: keys that a row sees; █ all, ▒ some, · none of {self.steps[1]}"
        ticks = "".join(f"{cell * self.steps[1]:<16}" for cell in range(0, self.visible.shape[1], 16)).rstrip()
        rows = [f"{i * self.steps[0]:>{margin}} {''.join(row)}" for i, row in enumerate(marks)]
        return [title, f"{'rows':{margin}} {ticks} keys", *rows]


@dataclass(frozen=True, eq=False)
class Surface:
    """A matrix of an output's errors for each sequence, such as heads by rows, to be drawn."""

    z: Sequence[Tensor]  # [down, across] float32 per sequence: errors divided by their expected sizes
    wrong: Sequence[Tensor]  # [down, across] bool per sequence
    # down, across: words of the axes ("heads", "rows").
    down: str
    across: str
    step: int = 1  # number of positions of the axis across in one column of z

    def order(self) -> list[int]:
        """Returns the indices of the sequences that are not empty, those with an error first."""
        return sorted((b for b, z in enumerate(self.z) if z.numel()), key=lambda b: (not bool(self.wrong[b].any()), b))


@dataclass(frozen=True, eq=False)
class Grid:
    """A matrix of errors reduced to cells for a picture: the largest error of each cell."""

    z: Tensor  # [down, across] float32: largest error of a cell, divided by its expected size
    wrong: Tensor  # [down, across] bool
    # down, across: words of the axes.
    down: str
    across: str
    steps: tuple[int, int]  # numbers of positions in a cell, down and across
    sizes: tuple[int, int]  # numbers of positions of the two axes

    @property
    def cell(self) -> str:
        """The size of a cell in words, such as "2 heads by 64 rows"."""
        words = (f"{step} {word}" for step, word in zip(self.steps, (self.down, self.across), strict=True) if step > 1)
        return " by ".join(words) or "one position"

    def limits(self) -> tuple[float, float]:
        """Returns the smallest and the largest finite z of wrong cells, the ends of the colour scale. z: error divided
        by its expected size. Both are 2, the bound of correct results, if no wrong cell has a finite z."""
        finite = self.z[self.wrong & self.z.isfinite()]
        return (float(finite.min()), float(finite.max())) if len(finite) else (LEAST, LEAST)

    def levels(self) -> Tensor:
        """Returns the position of each cell's z (error / expected size) on the colour scale, [down, across]: 0 to 1, by
        the logarithm of z. It is 1 if z is not finite. Only the levels of wrong cells are drawn."""
        least, most = (math.log(max(z, LEAST)) for z in self.limits())
        level = (self.z.clamp(min=LEAST).log() - least) / max(most - least, 1e-6)
        return level.nan_to_num(nan=1.0, posinf=1.0).clamp(0, 1) if most > least else torch.ones_like(level)


def rows_by_columns(tally: Tally, shape: Sequence[int]) -> Surface | None:
    """Returns the errors, by row and key, of an output that is a sum over sequences (a bias's gradient), as a matrix to
    be drawn; None if it has fewer than two axes. tally: its errors; shape: its shape [.., rows, keys]."""
    if len(shape) < 2 or not tally.errors.count:
        return None
    z = tally.errors.cells[0][0].sqrt()
    wrong = tally.errors.wrong()[0][0]
    z, wrong = (t.unflatten(0, (-1, shape[-2])).amax(0) for t in (z, wrong[:, None] & (z > LEAST)))
    return Surface([z], [wrong], "rows", "keys", COLUMNS)


def grid(surface: Surface, b: int, most: tuple[int, int]) -> Grid:
    """Returns the errors of sequence b (a matrix of `surface`), reduced to cells with the largest error of their
    positions. most: the largest numbers of cells (down, across). The numbers of positions in a cell, down and across,
    are powers of two."""
    z, wrong = surface.z[b], surface.wrong[b]
    z = z.masked_fill(z.isnan() | (z > _FINITE), math.inf)
    steps = cells_of(z.shape, most)
    reduced = (_reduced(t, steps) for t in (z, wrong.float()))
    sizes = z.shape[0], z.shape[1] * surface.step
    worst, any_wrong = reduced
    return Grid(worst, any_wrong > 0, surface.down, surface.across, (steps[0], steps[1] * surface.step), sizes)


def cells_of(sizes: Sequence[int], most: tuple[int, int]) -> tuple[int, int]:
    """Returns the numbers of positions (down, across) in a cell: the smallest powers of two that give at most `most`
    cells per axis. sizes: the numbers of positions of the two axes."""
    down, across = (1 << (-(-max(n, 1) // cells) - 1).bit_length() for n, cells in zip(sizes, most, strict=True))
    return down, across


def _reduced(t: Tensor, steps: Sequence[int]) -> Tensor:
    (down, across), (by_down, by_across) = t.shape, steps
    t = torch.nn.functional.pad(t, (0, -across % by_across, 0, -down % by_down))
    return t.unflatten(1, (-1, by_across)).amax(-1).unflatten(0, (-1, by_down)).amax(1)


def text(name: str, surface: Surface) -> Text:
    """Returns a drawing of an output's errors in block characters, for a terminal of 80 columns. name: the output's
    name, for the title; surface: its errors, of which the first sequence with an error is drawn."""
    from rich.text import Text  # imported here because rich may be absent where GPU tests run

    b = surface.order()[0]
    g = grid(surface, b, TERMINAL)
    margin = len(f"{g.down} {g.sizes[0]}")
    least, most = g.limits()
    title = f"{name}{_of(surface, b)}: worst z of {g.cell}; {_WITHIN} within the bound, "
    title += f"{_MARKS[0]} {least:.2g} to {_MARKS[-1]} {most:.2g}" if most > least else f"{_MARKS[-1]} {most:.2g}"
    title += f", {_STRANGE} not finite" if bool((g.wrong & g.z.isinf()).any()) else ""
    result = Text(f"{title}\n{' ' * margin} {_ticks(g)}\n")
    levels = (g.levels() * len(_MARKS)).long().clamp(max=len(_MARKS) - 1).tolist()
    for i, row in enumerate(levels):
        first = i * g.steps[0]
        result.append(f"{g.down if not i else '':{len(g.down)}} {first:>{margin - len(g.down) - 1}} ")
        for j, level in enumerate(row):
            if not g.wrong[i, j]:
                result.append(_WITHIN, "green")
            else:
                strange = bool(g.z[i, j].isinf())
                result.append(_STRANGE if strange else _MARKS[level], "bold red" if strange else _STYLES[level])
        result.append("\n")
    return result


def _of(surface: Surface, b: int) -> str:
    return f", sequence {b} of {len(surface.z)}" if len(surface.z) > 1 else ""


def _ticks(g: Grid) -> str:
    """Returns the labels below the picture g: the position of every 16th cell, and the horizontal axis's name."""
    line = ""
    for cell in range(0, g.z.shape[1], 16):
        line = f"{line:{cell}}{cell * g.steps[1]}"
    return f"{line:{min(g.z.shape[1], 56)}} {g.across}"


def figure(name: str, surface: Surface, b: int) -> str:
    """Returns an HTML figure of the errors (`surface`) of output `name` in sequence b, with labelled axes. Cells within
    the bound are green, those beyond it yellow to red by size."""
    g = grid(surface, b, PAGE)
    data = base64.b64encode(_png(g)).decode()
    least, most = g.limits()
    words = f"; yellow {least:.2g}, red {most:.2g} times the expected error" if bool(g.wrong.any()) else ""
    caption = f"{name}{_of(surface, b)}: worst error of {g.cell}{words}"
    down, across = (f"<span>0</span><span>{word}</span><span>{max(n - 1, 0)}</span>"
                    for word, n in zip((g.down, g.across), g.sizes, strict=True))  # fmt: skip
    return (
        f"<figure><div class='axes'><div class='down'>{down}</div>"
        f"<img alt='{html.escape(caption, quote=True)}' src='data:image/png;base64,{data}'>"
        f"<div class='across'>{across}</div></div><figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _png(g: Grid) -> bytes:
    level = g.levels()
    red = torch.where(g.wrong, torch.full_like(level, 220), torch.full_like(level, 60))
    green = torch.where(g.wrong, 200 * (1 - level), torch.full_like(level, 150))
    blue = torch.where(g.wrong, torch.full_like(level, 40), torch.full_like(level, 80))
    pixels = torch.stack((red, green, blue), -1).clamp(0, 255).byte()
    height, width = g.z.shape
    raw = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
