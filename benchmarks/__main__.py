"""`python -m benchmarks`: every pair in turns, one table, and the same figures as JSON."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import dense
from benchmarks.pair import measure


def main(
    quick: Annotated[bool, typer.Option(help="Small sizes and few turns.")] = False,
    turns: Annotated[int, typer.Option(min=1, help="Alternations of every pair.")] = 9,
    output: Annotated[Path | None, typer.Option(help="Also write the figures to this JSON file.")] = None,
) -> None:
    """Times this library beside torch's scaled_dot_product_attention, alternating in one process."""
    console = Console()
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    timings = [
        measure(pair, 3 if quick else turns)
        for pair in track(dense.pairs(quick), "Measuring", console=console, transient=True)
    ]
    table = Table("case", "ours ms", "SDPA ms", "SDPA / ours", "ours GFLOP/s", title="Median of alternating runs")
    for t in timings:
        table.add_row(t.name, f"{t.ours * 1e3:.2f}", f"{t.peer * 1e3:.2f}", f"{t.ratio:.2f}", f"{t.gflops:.0f}")
    console.print(table)
    if output:
        output.write_text(json.dumps([asdict(t) for t in timings], indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
