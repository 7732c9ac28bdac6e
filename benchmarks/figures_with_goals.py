"""A measured value with an upper limit, and the table of such values."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console

from fusion_attention.bench.report import Report

COLUMNS = {"cost": -48, "": -3, "figure": 10, "goal": 8, "reached": -7}


@dataclass(frozen=True)
class Figure:
    """A measured value; goal: its upper limit, or None where it is shown for comparison."""

    name: str
    unit: str
    value: float
    goal: float | None = None

    @property
    def reached(self) -> str:
        """Returns "yes" or "no", or "" without a goal."""
        return "" if self.goal is None else "yes" if self.value <= self.goal else "no"


def table(title: str, figures: Iterable[Figure], console: Console) -> list[Figure]:
    """Prints a table of values as they are measured, and returns the values."""
    report, result = Report(console, title, COLUMNS), []
    for one in figures:
        goal = "" if one.goal is None else f"{one.goal:g}"
        report.add(one.name, one.unit, f"{one.value:.4g}", goal, one.reached)
        result.append(one)
    return result
