"""`python -m benchmarks`: times every call beside its alternatives; optionally writes JSON and a chart."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks import (
    backward,
    capi,
    compressed,
    decode_on_busy_cores,
    decode_rows,
    dense,
    distributed,
    indexer_loss,
    inference,
    integrations,
    launches,
    memory,
    npu,
    pooling,
    scale,
    schedule,
    sparse,
    threads,
)
from benchmarks.figures_with_goals import Figure, table
from fusion_attention import _native
from fusion_attention.bench import chart
from fusion_attention.bench.pair import REACHED, Pair, Timing, measure
from fusion_attention.bench.report import Report
from fusion_attention.cli.machine import processor

GROUPS: dict[str, tuple[Callable[[bool], Iterator[Pair]], ...]] = {
    "training": (dense.training,),
    "masks": (dense.masks,),
    "shapes": (dense.shapes,),
    "packed": (dense.packed,),
    "threads": (threads.threads, backward.threads),
    "gradients": (backward.training,),
    "steps": (backward.packed,),
    "sparse": (sparse.attention, sparse.gradients, sparse.indexing, sparse.threads),
    "compressed": (compressed.layers, compressed.decode, compressed.indexing),
    "pooling": (pooling.keys,),
    "loss": (indexer_loss.lists, indexer_loss.bands),
    "inference": (inference.rows_of_all,),
    "decode": (decode_rows.rows,),
    "integrations": (
        *(integrations.encoders, integrations.training, integrations.windows, integrations.flash, integrations.flex),
    ),
    "npu": (npu.steps,),
}
# Groups without pairs: functions that measure and print, and return rows for the JSON file.
TABLES: dict[str, Callable[[bool, int, Console], Any]] = {
    "memory": lambda quick, turns, console: memory.show(memory.measured(4096 if quick else 65536), console),
    "busy": lambda quick, turns, console: table(
        decode_on_busy_cores.TITLE, decode_on_busy_cores.figures(quick), console
    ),
    "schedule": lambda quick, turns, console: schedule.show(console),
    "distributed": distributed.show,
    "scale": scale.show,
    "capi": lambda quick, turns, console: table(capi.TITLE, capi.figures(quick, turns), console),
    "launches": lambda quick, turns, console: table(launches.TITLE, launches.figures(quick, turns), console),
    "latencies": lambda quick, turns, console: table("Short calls", short_calls(), console),
}
NAMES = (*GROUPS, *TABLES)
TITLE = (
    "Medians of alternating runs; ratio = peer's time / ours (rates: our GFLOP/s / the peer's);"
    f" reached from {REACHED} of the goal on"
)


def short_calls() -> Iterator[Figure]:
    """Measures calls in which kernels take almost no time."""
    yield Figure("plan.run", "us", threads.overhead_us(), 15)
    yield Figure("registered function beside fa.attention", "us", integrations.registered_us(), 15)
    yield from decode_rows.latencies()


def pairs(quick: bool, only: str) -> Iterator[Pair]:
    """Yields the pairs of one group, or of every group if `only` is "all"; quick: small sizes, which have no goals."""
    for name, rows in GROUPS.items():
        if only in ("all", name):
            for group in rows:
                for pair in group(quick):
                    yield dataclasses.replace(pair, goal=0.0, share_goal=0.0) if quick else pair


COLUMNS = {"case": -42, "peer": -32, "ours ms": 9, "peer ms": 9, "ratio": 6, "GFLOP/s": 7, "of peak": 7, "goal": -18}


def timed(given: Iterator[Pair], turns: int, console: Console) -> Iterator[Timing]:
    """Measures each row and prints it at once."""
    report = None
    for pair in given:
        t = measure(pair, turns)
        report = report or Report(console, TITLE, {**COLUMNS, "reached": -7})
        peak_share = f"{t.share_of_peak:.2f}" if t.share_of_peak else ""
        goals = [f"{t.goal:.2f}" if t.goal else "", f"{t.share_goal:.2f} of peak" if t.share_goal else ""]
        reached = "" if t.reached is None else "yes" if t.reached else "no"
        figures = (f"{t.ours_ms:.2f}", f"{t.peer_ms:.2f}", f"{t.ratio:.2f}", f"{t.gflops:.0f}", peak_share)
        report.add(t.name, t.peer_name, *figures, ", ".join(g for g in goals if g), reached, section=t.group)
        yield t


def main(
    quick: Annotated[bool, typer.Option(help="Use small sizes and few turns.")] = False,
    turns: Annotated[int, typer.Option(min=1, help="Number of alternating runs of every pair.")] = 9,
    only: Annotated[str, typer.Option(help=f"One of {', '.join(NAMES)}, or all.")] = "all",
    output: Annotated[
        Path | None, typer.Option(help="Also write NAME.json, NAME.png, NAME-schedule.png and NAME-scale.png.")
    ] = None,
) -> None:
    """Times this library and its alternatives in alternating runs of one process."""
    console = Console(width=None if sys.stdout.isatty() else 150)  # a file has room for every column
    if only not in ("all", *NAMES):
        raise typer.BadParameter(f"expected all or one of {', '.join(NAMES)}, got {only!r}", param_hint="--only")
    peak = _native.machine_peak(torch.get_num_threads())
    chip = f"{processor()}, {_native.cpu_features()['chosen']}"
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {chip}")
    measured = ", ".join(f"{name} {rate:.0f}" for name, rate in peak.items())
    console.print(f"measured peaks: {measured} (GFLOP/s, read: GB/s)")
    turns = min(turns, 3) if quick else turns
    timings = list(timed(pairs(quick, only), turns, console))
    groups = list(dict.fromkeys(t.group for t in timings))
    timings.sort(key=lambda t: groups.index(t.group))
    tables = {name: show(quick, turns, console) for name, show in TABLES.items() if only in ("all", name)}
    if output:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": chip, "peak": peak}
        text = json.dumps({**facts, "rows": timings, **{name: [] for name in TABLES}, **tables}, default=vars)
        output.with_suffix(".json").write_text(text.replace("}, {", "},\n{") + "\n")  # a row per line
        if timings:
            chart.draw(timings, output.with_suffix(".png"))
        if "schedule" in tables:
            schedule.draw(tables["schedule"], output.with_name(f"{output.stem}-schedule.png"))
        if "scale" in tables:
            scale.draw(tables["scale"], output.with_name(f"{output.stem}-scale.png"))


if __name__ == "__main__":
    typer.run(main)
