"""`python -m benchmarks`: times every call beside its alternatives; optionally writes JSON and a chart."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks import (
    backward,
    busy,
    capi,
    compressed,
    decode_rows,
    dense,
    distributed,
    features,
    inference,
    integrations,
    launches,
    loss,
    memory,
    npu,
    pooling,
    scale,
    schedule,
    sparse,
)
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
    "costs": (features.costs,),
    "rates": (features.rates,),
    "threads": (features.threads, backward.threads),
    "gradients": (backward.training,),
    "steps": (backward.packed,),
    "sparse": (sparse.attention, sparse.gradients, sparse.indexing, sparse.lists, sparse.threads),
    "compressed": (compressed.layers, compressed.decode, compressed.indexing),
    "pooling": (pooling.keys,),
    "loss": (loss.lists, loss.bands),
    "inference": (inference.rows_of_all,),
    "integrations": (
        *(integrations.encoders, integrations.training, integrations.windows, integrations.flash, integrations.flex),
    ),
    "npu": (npu.steps,),
}
MEMORY, DECODE, BUSY, SCHEDULE, DISTRIBUTED, SCALE = "memory", "decode", "busy", "schedule", "distributed", "scale"
CAPI, LAUNCHES = "capi", "launches"
NAMES = (*GROUPS, MEMORY, DECODE, BUSY, SCHEDULE, DISTRIBUTED, SCALE, CAPI, LAUNCHES)
TITLE = (
    "Medians of alternating runs; ratio = peer's time / ours (rates: our GFLOP/s / the peer's);"
    f" reached from {REACHED} of the goal on"
)
# Group: (name of a measured time, function that measures it, limit in microseconds).
COSTS = {
    "threads": ("plan.run, us", features.overhead_us, 15),
    "integrations": ("registered function beside fa.attention, us", integrations.registered_us, 15),
}


def pairs(quick: bool, only: str) -> Iterator[Pair]:
    """Yields the pairs of one group, or of every group if `only` is "all"; quick: use small sizes."""
    for name, rows in GROUPS.items():
        if only in ("all", name):
            for group in rows:
                yield from group(quick)


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
    result = memory.show(memory.measured(4096 if quick else 65536), console) if only in ("all", MEMORY) else []
    decoded = decode_rows.measured(quick, turns, console) if only in ("all", DECODE) else ([], [])
    waits = busy.show(quick, console) if only in ("all", BUSY) else []
    scheduled = schedule.show(console) if only in ("all", SCHEDULE) else []
    shared = distributed.show(quick, turns, console) if only in ("all", DISTRIBUTED) else []
    scales = scale.show(quick, turns, console) if only in ("all", SCALE) else {}
    calls = capi.show(quick, turns, console) if only in ("all", CAPI) else []
    planned = launches.show(quick, turns, console) if only in ("all", LAUNCHES) else []
    others = {}
    for group, (name, cost, goal) in COSTS.items():
        if only in ("all", group):
            others[name] = cost()
            console.print(f"{name}: {others[name]:.1f} (goal: at most {goal})")
    if output:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": chip, "peak": peak}
        tables = {"rows": [asdict(t) for t in timings], "memory": [asdict(m) for m in result]}
        tables |= {DECODE: [asdict(row) for row in decoded[0]], "waits": [asdict(wait) for wait in decoded[1]]}
        tables |= {BUSY: [asdict(wait) for wait in waits]}
        tables |= {SCHEDULE: [asdict(row) for row in scheduled], DISTRIBUTED: [asdict(row) for row in shared]}
        tables |= {SCALE: scales, CAPI: [asdict(cost) for cost in calls]}
        tables |= {LAUNCHES: [asdict(cost) for cost in planned]}
        text = json.dumps({**facts, **others, **tables}).replace("}, {", "},\n{")  # a row per line
        output.with_suffix(".json").write_text(text + "\n")
        if timings:
            chart.draw(timings, output.with_suffix(".png"))
        if scheduled:
            schedule.draw(scheduled, output.with_name(f"{output.stem}-schedule.png"))
        if scales:
            scale.draw(scales, output.with_name(f"{output.stem}-scale.png"))


if __name__ == "__main__":
    typer.run(main)
