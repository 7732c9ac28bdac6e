"""`python -m benchmarks`: every pair in turns, one table; on request the figures as JSON and as a chart."""

from __future__ import annotations

import itertools
import json
import platform
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import chart, dense, sparse
from benchmarks.pair import Timing, measure
from fusion_attention import _native

GROUPS = (*dense.GROUPS, *sparse.GROUPS)


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        names = re.findall(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        names = []
    return f"{names[0] if names else platform.machine()}, {_native.cpu_features()['chosen']}"


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
    only: Annotated[str, typer.Option(help=f"One of {', '.join(GROUPS)}, or all.")] = "all",
    output: Annotated[Path | None, typer.Option(help="Write NAME.json and NAME.png besides.")] = None,
) -> None:
    """Times this library beside what a user would pick instead, alternating in one process."""
    console = Console(width=None if sys.stdout.isatty() else 120)  # a file has room for every column
    if only not in ("all", *GROUPS):
        raise typer.BadParameter(f"expected all or one of {', '.join(GROUPS)}, got {only!r}", param_hint="--only")
    peak = _native.machine_peak(torch.get_num_threads())
    peaks = {dtype: peak[str(dtype).removeprefix("torch.")] for dtype in dense.DTYPES.values()}
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {processor()}")
    measured = ", ".join(f"{name} {rate:.0f}" for name, rate in peak.items())
    console.print(f"measured peaks: {measured} (GFLOP/s, read: GB/s)")
    turns = min(turns, 3) if quick else turns
    both = itertools.chain(dense.pairs(quick, peaks, only), sparse.pairs(quick, peaks, only))
    pairs = track(both, "Measuring", total=None, console=console, transient=True)
    timings = [measure(pair, turns) for pair in pairs]
    groups = list(dict.fromkeys(t.group for t in timings))
    timings.sort(key=lambda t: groups.index(t.group))
    show(timings, console)
    if output:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": processor(), "peak": peak}
        text = json.dumps({**facts, "rows": [asdict(t) for t in timings]}, indent=1)
        output.with_suffix(".json").write_text(text + "\n")
        chart.draw(timings, output.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
