"""`python -m benchmarks`: every pair in turns, one table; on request the figures as JSON and as a chart."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import backward, chart, dense, memory
from benchmarks.pair import Pair, Timing, measure
from fusion_attention import _native

GROUPS = {**dense.GROUPS, **backward.GROUPS}
MEMORY = "memory"


def pairs(quick: bool, peaks: dense.Peaks, only: str) -> Iterator[Pair]:
    """The rows of one group, or of all ("all"); quick: small sizes, for a look."""
    size, count = (512, 32) if quick else (2048, 100)
    for name, group in GROUPS.items():
        if only in ("all", name):
            yield from group(count if name in ("packed", "steps") else size, peaks)


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        names = re.findall(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        names = []
    return f"{names[0] if names else platform.machine()}, {_native.cpu_features()['chosen']}"


def show(timings: list[Timing], console: Console) -> None:
    """The table of all figures."""
    table = Table(title="Medians of alternating runs; ratio = peer's time / ours, by rate: our rate / the peer's")
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


def show_memory(found: list[memory.Memory], console: Console) -> None:
    """The table of what long sequences take."""
    table = Table(title="One head, D 64, causal, forward and backward; MB of resident memory")
    for name in ("dtype", "length", "inputs, outputs, gradients", "beyond them", "workspace forward", "backward"):
        table.add_column(name, justify="right")
    for m in found:
        figures = (m.operands_mb, m.extra_mb, m.forward_mb, m.backward_mb)
        table.add_row(m.dtype, str(m.length), *(f"{n:.1f}" for n in figures))
    console.print(table)


def main(
    quick: Annotated[bool, typer.Option(help="Small sizes and few turns.")] = False,
    turns: Annotated[int, typer.Option(min=1, help="Alternations of every pair.")] = 9,
    only: Annotated[str, typer.Option(help=f"One of {', '.join((*GROUPS, MEMORY))}, or all.")] = "all",
    output: Annotated[Path | None, typer.Option(help="Write NAME.json and NAME.png besides.")] = None,
) -> None:
    """Times this library beside what a user would pick instead, alternating in one process."""
    console = Console(width=None if sys.stdout.isatty() else 120)  # a file has room for every column
    if only not in ("all", *GROUPS, MEMORY):
        names = ", ".join((*GROUPS, MEMORY))
        raise typer.BadParameter(f"expected all or one of {names}, got {only!r}", param_hint="--only")
    peak = _native.machine_peak(torch.get_num_threads())
    peaks = {dtype: peak[str(dtype).removeprefix("torch.")] for dtype in dense.DTYPES.values()}
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {processor()}")
    measured = ", ".join(f"{name} {rate:.0f}" for name, rate in peak.items())
    console.print(f"measured peaks: {measured} (GFLOP/s, read: GB/s)")
    turns = min(turns, 3) if quick else turns
    rows = track(pairs(quick, peaks, only), "Measuring", total=None, console=console, transient=True)
    timings = [measure(pair, turns) for pair in rows]
    groups = list(dict.fromkeys(t.group for t in timings))
    timings.sort(key=lambda t: groups.index(t.group))
    if timings:
        show(timings, console)
    found = list(memory.measured(4096 if quick else 65536)) if only in ("all", MEMORY) else []
    if found:
        show_memory(found, console)
    if output:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": processor(), "peak": peak}
        tables = {"rows": [asdict(t) for t in timings], "memory": [asdict(m) for m in found]}
        text = json.dumps({**facts, **tables}, indent=1)
        output.with_suffix(".json").write_text(text + "\n")
        chart.draw(timings, output.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
