"""Report: prints a table row by row while a benchmark runs, without a thread that would disturb the timing."""

from rich.console import Console


class Report:
    """A table whose heading is printed at once, and whose rows are printed as they are added.

    Args:
        console: the output.
        title: the heading.
        columns: widths by name, negative for left-aligned text; longer text shifts the following cells.
    """

    def __init__(self, console: Console, title: str, columns: dict[str, int]) -> None:
        self._console, self._widths, self._section = console, list(columns.values()), ""
        self._print(title, "italic")
        self._line(list(columns), "bold")

    def add(self, *cells: str, section: str = "") -> None:
        """Prints a row of the table; cells: texts of its columns. A new section's name is printed before."""
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
