"""Writes SVG pictures with a palette for light and dark schemes; the output is equal on every machine.

A picture follows the scheme of the reader's system where it stands alone; the site puts it into its page (hooks.py) and
gives it the page's own colours by assets/pictures.css.
"""

from collections.abc import Iterable
from html import escape
from typing import Any

# Name -> in the light scheme, in the dark one. A letter is a colour, with a 2 its faint form.
PALETTE = {
    "bg": ("#ffffff", "#12151e"),
    "panel": ("#f5f6fb", "#1a1f2d"),
    "ink": ("#1c2333", "#e6e9f2"),
    "soft": ("#5a6480", "#9ba6c0"),
    "rule": ("#d7dcea", "#343c54"),
    "off": ("#e8ebf4", "#262c3e"),
    "a": ("#4f5bd5", "#8f9bff"),
    "a2": ("#ccd1fa", "#3a448c"),
    "b": ("#0e9384", "#35c9b4"),
    "b2": ("#bce8e1", "#15574f"),
    "c": ("#dd8500", "#ffb545"),
    "c2": ("#fce0ae", "#6a4a12"),
    "d": ("#cf3f73", "#ff86ad"),
    "d2": ("#f8cfdf", "#6c2545"),
    "on": ("#ffffff", "#12151e"),
}
FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MONO = "'JetBrains Mono', ui-monospace, 'SF Mono', Menlo, Consolas, monospace"


def stylesheet(root: str = ".fa-pic", scheme: int = 0) -> str:
    """Returns the palette as CSS rules for classes below a root: f-NAME fills, s-NAME strokes."""
    rules = [f"{root} text{{font-family:{FONT}}}{root} .mono{{font-family:{MONO}}}"] if not scheme else []
    for name, colours in PALETTE.items():
        rules.append(f"{root} .f-{name}{{fill:{colours[scheme]}}}{root} .s-{name}{{stroke:{colours[scheme]}}}")
    return "\n".join(rules)


def site_stylesheet() -> str:
    """Returns the CSS for pictures embedded in the site's pages, for assets/pictures.css."""
    head = "/* Written by `python -m website` from website/svg.py. */"
    return "\n".join([head, stylesheet(), stylesheet('[data-md-color-scheme="slate"] .fa-pic', 1), ""])


class Picture:
    """An SVG of fixed coordinates that scales with its page; coordinates are pixels from the upper left corner.

    Args:
        title: what it shows, in one sentence, for those who do not see it.
        ground: draw the ground where it stands alone, so that it can be read on any page.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str = "off", *, r: float = 3, stroke: str = "",
        tip: str = "",
    ) -> None:  # fmt: skip
        """Draws a box with round corners; tip: its tooltip."""
        line = f' class="f-{fill} s-{stroke}" stroke-width="1.5"' if stroke else f' class="f-{fill}"'
        text = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}"{line}'
            + (f">{text}</rect>" if tip else "/>")
        )

    def text(
        self, x: float, y: float, words: str, *, size: float = 14, fill: str = "ink", anchor: str = "start",
        bold: bool = False, mono: bool = False,
    ) -> None:  # fmt: skip
        """Draws a line of text on its base line."""
        weight = ' font-weight="650"' if bold else ""
        kind = f"f-{fill} mono" if mono else f"f-{fill}"
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" class="{kind}"{weight}>'
            f"{escape(words)}</text>"
        )

    def note(self, x: float, y: float, words: str, size: float = 13, **more: Any) -> None:
        """Draws a line of text in a soft colour; more: as for text()."""
        self.text(x, y, words, size=size, fill="soft", **more)

    def path(
        self, d: str, *, stroke: str = "", fill: str = "", width: float = 1.5, dash: str = "", arrow: bool = False
    ) -> None:
        """Draws a path; arrow: with an arrowhead at its end."""
        classes = " ".join([*([f"s-{stroke}"] if stroke else []), *([f"f-{fill}"] if fill else [])])
        none = "" if fill else ' fill="none"'
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        stroke_width = f' stroke-width="{width:g}"' if stroke else ""
        head = f' marker-end="url(#head-{stroke})"' if arrow else ""
        self._parts.append(f'<path d="{d}" class="{classes}"{none}{stroke_width}{dashed}{head}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = "rule", **more: object) -> None:
        """Draws a straight line."""
        self.path(f"M{x1:g} {y1:g}L{x2:g} {y2:g}", stroke=stroke, **more)  # type: ignore[arg-type]

    def key(self, y: float, entries: Iterable[tuple[float, str, str]]) -> None:
        """Draws what colours mean: (x, colour, words) of each."""
        for x, fill, words in entries:
            self.rect(x, y - 12, 15, 15, fill)
            self.note(x + 22, y, words)

    def grid(
        self, x: float, y: float, cells: list[list[str]], size: float = 16, gap: float = 2,
        tips: list[list[str]] | None = None,
    ) -> None:  # fmt: skip
        """Draws rows of coloured squares; without tooltips, all squares of a colour are one path."""
        step, soft = size + gap, min(3.0, size / 5)
        if tips:
            for i, row in enumerate(cells):
                for j, fill in enumerate(row):
                    self.rect(x + j * step, y + i * step, size, size, fill, r=soft, tip=tips[i][j])
            return
        inner = size - 2 * soft  # its line, with round corners, makes up for the rest
        for colour in dict.fromkeys(fill for row in cells for fill in row):
            squares = "".join(
                f"M{x + j * step + soft:g} {y + i * step + soft:g}h{inner:g}v{inner:g}h{-inner:g}z"
                for i, row in enumerate(cells)
                for j, fill in enumerate(row)
                if fill == colour
            )
            self._parts.append(
                f'<path d="{squares}" class="f-{colour} s-{colour}" stroke-width="{2 * soft:g}" '
                'stroke-linejoin="round"/>'
            )

    def render(self) -> str:
        """Returns the SVG text."""
        heads = "".join(
            f'<marker id="head-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto">'
            f'<path d="M0 0L8 4L0 8z" class="f-{name}"/></marker>'
            for name in PALETTE
            if any(f"#head-{name})" in element for element in self._parts)
        )
        style = f"{stylesheet()}\n@media(prefers-color-scheme:dark){{{stylesheet(scheme=1)}}}"
        return "\n".join([
            (f'<svg xmlns="http://www.w3.org/2000/svg" class="fa-pic" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'role="img" aria-label="{escape(self.title)}">'),
            f"<style>{style}</style>",
            *([f"<defs>{heads}</defs>"] if heads else []),
            f'<rect class="f-bg ground" width="{self.width:g}" height="{self.height:g}" rx="12"/>',
            *self._parts,
            "</svg>\n",
        ])  # fmt: skip
