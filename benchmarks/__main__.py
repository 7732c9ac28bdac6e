"""`python -m benchmarks`: every pair in turns, one table; on request the figures as JSON and as a chart."""

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

from benchmarks import chart, dense
from benchmarks.pair import Timing, measure


def show(timings: list[Timing], console: Console) -> None:
    """The table of all figures."""
    table = Table(title="Medians of alternating runs; ratio = peer's time / ours")
    for name in ("case", "peer", "ours ms", "peer ms", "ratio", "GFLOP/s", "of peak"):
        table.add_column(name, justify="left" if name in ("case", "peer") else "right", no_wrap=True)
    group = ""
    for t in timings:
        if t.group != group:
            group = t.group
            table.add_section()
            table.add_row(f"[bold]{group}")
        share = f"{t.share_of_peak:.2f}" if t.share_of_peak else ""
        figures = (f"{t.ours_ms:.2f}", f"{t.peer_ms:.2f}", f"{t.ratio:.2f}", f"{t.gflops:.0f}", share)
        table.add_row(t.name, t.peer_name, *figures)
    console.print(table)


def main(
    quick: Annotated[bool, typer.Option(help="Small sizes and few turns.")] = False,
    turns: Annotated[int, typer.Option(min=1, help="Alternations of every pair.")] = 9,
    only: Annotated[str, typer.Option(help="Only rows whose group or name contains this.")] = "",
    output: Annotated[Path | None, typer.Option(help="Write NAME.json and NAME.png besides.")] = None,
) -> None:
    """Times this library beside what a user would pick instead, alternating in one process."""
    console = Console()
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    chosen = [p for p in dense.pairs(quick, {}) if only in p.group or only in p.name]
    turns = min(turns, 3) if quick else turns
    timings = [measure(pair, turns) for pair in track(chosen, "Measuring", console=console, transient=True)]
    show(timings, console)
    if output:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        text = json.dumps({**facts, "rows": [asdict(t) for t in timings]}, indent=1)
        output.with_suffix(".json").write_text(text + "\n")
        chart.draw(timings, output.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
