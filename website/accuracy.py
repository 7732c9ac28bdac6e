"""Generates the table and chart of docs/accuracy.md from the results of `python -m benchmarks.accuracy`."""

import json
import math
from pathlib import Path
from typing import Any

from fusion_attention.judging.chi_square_limits import LEAST
from website.svg import Picture

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures" / "accuracy.json"
PROGRAMS = {"core": "native core", "Triton": "Triton", "golden": "golden", "SDPA": "SDPA", "tiles": "tiles",
            "eager": "eager"}  # fmt: skip
RIGHT = {"core": ("a", "this library"), "SDPA": ("b", "torch SDPA"), "tiles": ("c", "tiles, as flash-attn")}
FIRST, LAST = 0.25, 150.0  # z at the edges of the picture
LIMIT = LEAST  # of a tile of so many rows


def figures() -> dict[str, Any]:
    """Returns the measured values."""
    result: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return result


def table() -> str:
    """Formats the z of the worst tile by family and program in bfloat16, float16 and float32."""
    families = figures()["worst"]
    lines = ["| worst tile of | " + " | ".join(PROGRAMS.values()) + " |", "|---" * (len(PROGRAMS) + 1) + "|"]
    for family, programs in families.items():
        cells = [", ".join("-" if z is None else f"{z:.1f}" for z in programs.get(who, ())) for who in PROGRAMS]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


class _Panel:
    """A bar chart over a logarithmic axis of z with logarithmic counts of tiles."""

    def __init__(self, picture: Picture, data: dict[str, Any], left: float, bottom: float, width: float) -> None:
        self.picture, self.data, self.left, self.bottom = picture, data, left, bottom
        self.decade = width / math.log10(LAST / FIRST)

    def x(self, z: float) -> float:
        return self.left + math.log10(z / FIRST) * self.decade

    def y(self, count: float) -> float:
        return self.bottom - 10 - math.log10(count) * 27

    def axes(self, limit: float, top: float) -> None:
        """Draws lines of counts, and the limit up to `top`."""
        p, right = self.picture, self.x(LAST)
        for count in (1, 10, 100):
            p.line(self.left, self.y(count), right if count == 1 else self.x(limit), self.y(count))
            p.note(self.left - 8, self.y(count) + 4, str(count), 12, anchor="end")
        p.line(self.left, self.bottom, right, self.bottom, "ink", width=1.5)
        p.line(self.x(limit), top, self.x(limit), self.bottom, "ink", width=1.5, dash="5 4")

    def bars(self, counts: list[int], fill: str, beyond: str = "", offset: tuple[int, int] = (0, 1)) -> None:
        """Draws bars of one colour; beyond: only bins beyond the limit; share: (index, count) of adjacent bars."""
        width = self.decade / self.data["bins"] / offset[1]
        for i, count in enumerate(counts):
            if count:
                z = self.data["low"] * 10 ** (i / self.data["bins"])
                x = self.x(z) + offset[0] * width
                colour = beyond if beyond and z >= LIMIT else fill
                self.picture.rect(x + 0.7, self.y(count), width - 1.4, self.bottom - self.y(count), colour, r=1.5)


def tiles(tall: bool = False) -> Picture:
    """Draws the counts of tiles of correct and incorrect results by z; tall: for a small screen."""
    data = figures()["picture"]
    counts, edge, left, width = data["counts"], *((4, 36, 396) if tall else (32, 72, 796))
    picture = Picture(
        440 if tall else 900, 566 if tall else 546, "Tiles of right results are below the limit, of faults beyond"
    )  # fmt: skip
    picture.text(edge, 36, "Tiles of right and of wrong results", size=18, bold=True)
    caption = f"how many tiles of 32 rows have which z; bfloat16, causal, S {data['length']}"
    for place, words in enumerate(caption.split("; ") if tall else [caption]):
        picture.note(edge, 57 + 18 * place, words)
    first = 226 if tall else 208
    upper = _Panel(picture, data, left, first, width)
    x, top = upper.x(LIMIT), first - 112
    upper.axes(LIMIT, top)
    picture.text(x, top - 8, f"limit {LIMIT:g}", size=12.5, anchor="middle", bold=True)
    picture.text(x + 16, top + 12, "right results", size=14, bold=True)
    picture.note(x + 16, top + 30, f"worst tile {data['largest']:.2f}")
    for place, (who, (colour, name)) in enumerate(RIGHT.items()):
        upper.bars(counts[who], colour, offset=(place, len(RIGHT)))
        picture.rect(x + 16, top + 41 + 19 * place, 12, 12, colour, r=2)
        picture.text(x + 34, top + 51 + 19 * place, name, size=13)
    for place, (what, fault) in enumerate(data["wrong"].items()):
        lower = _Panel(picture, data, left, first + 100 * (place + 1), width)
        lower.axes(LIMIT, lower.bottom - 84)
        lower.bars(counts[what], "a2", "d")
        picture.text(x + 16, lower.bottom - 70, what, size=14, bold=True, fill="d")
        full = f"worst tile {fault['tile']:.0f}" + ("" if tall else f"; over the whole {fault['z']:.1f}")
        picture.note(x + 16, lower.bottom - 52, full)
    bottom = first + 100 * len(data["wrong"])
    for z in (0.3, 1, 3, 10, 30, 100):
        picture.line(upper.x(z), bottom, upper.x(z), bottom + 4, "ink")
        picture.note(upper.x(z), bottom + 19, f"{z:g}", 12, anchor="middle")
    return picture
