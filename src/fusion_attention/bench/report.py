"""A table that appears row by row: a run of minutes shows what it has found; no thread draws while one is timed."""

from __future__ import annotations

from rich.console import Console


class Report:
    """Prints a heading now and a line for every row that comes.

    Args:
        console: where to.
        title: what the table shows.
        columns: names and widths, a negative width for text that begins at the left; longer text shifts what follows.
    """

    def __init__(self, console: Console, title: str, columns: dict[str, int]) -> None:
        self._console, self._widths, self._section = console, list(columns.values()), ""
        self._print(title, "italic")
        self._line(list(columns), "bold")

    def add(self, *cells: str, section: str = "") -> None:
        """A row; a section that differs from the row's before gets a line of its own."""
        if section != self._section:
            self._section = section
            self._print(section, "bold")
        self._line(list(cells), "")

    def _line(self, cells: list[str], style: str) -> None:
        prepared = [
            cell.ljust(-width) if width < 0 else cell.rjust(width)
            for cell, width in zip(cells, self._widths, strict=True)
        ]
        self._print("  ".join(prepared).rstrip(), style)

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
