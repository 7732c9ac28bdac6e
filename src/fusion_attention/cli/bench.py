"""`fusion-attention bench`: times this library and other libraries (peers) on this machine, or compares two runs."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fusion_attention.cli.output import device_of, progress, refuse, show_json

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from fusion_attention.bench.pair import Timing

COMMAND, ALL = "bench", "all"
COLUMNS = {"case": -42, "peer": -18, "ours ms": 9, "peer ms": 9, "ratio": 6, "GFLOP/s": 8, "of peak": 7}
TITLE = "Medians of alternating runs; ratio = peer's time / ours: above 1 this library is faster."
CHANGES = {"case": -42, "peer": -18, "before ms": 9, "after ms": 9, "faster": 6, "peer's": 6, "net": 6, "": -6}
CHANGES_TITLE = (
    "faster: time before / time after; peer's: the same for the peer, which did not change; net: faster / peer's."
)
REPOSITORY = Path(__file__).resolve().parents[3]  # valid in a clone only


def bench(
    only: str = typer.Option(
        ALL, metavar="GROUP", help="forward, training, windows, packed, decoding, or all; with --repository its groups."
    ),
    quick: bool = typer.Option(False, "--quick", help="Small sizes and few turns: takes seconds, figures are rough."),
    turns: int = typer.Option(9, min=1, max=1000, help="How often this library and the peer are timed in turn."),
    device: str = typer.Option("cpu", help="The device that computes: cpu, cuda, cuda:1, ..."),
    output: Path | None = typer.Option(
        None, metavar="NAME", help="Write NAME.json, and NAME.png if matplotlib is installed."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON instead of a table."),
    compare: tuple[Path, Path] | None = typer.Option(
        None, metavar="A.json B.json", help="Time nothing: compare the figures of two earlier runs."
    ),
    repository: bool = typer.Option(
        False, "--repository", help="Run every benchmark of the repository (an hour); needs a clone, and `make bench`."
    ),
) -> None:
    """Time this library and the usual alternative (the peer), alternately in one process.

    The peer is torch's scaled_dot_product_attention; on a GPU also FlashAttention, if it is installed. Takes a minute
    or less. The benchmarks of the repository have more cases and peers.

    \b
    fusion-attention bench --output before
    fusion-attention bench --output after
    fusion-attention bench --compare before.json after.json

    Exit code: 0; 2 if a file has no figures, or the group or device does not exist.
    """
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 150)  # a file gets lines that fit every column
    try:
        if compare is not None:
            _compare(*compare, console, as_json)
        elif repository:
            _repository(only, quick, turns, device, output, as_json)
        else:
            _time(only, quick, turns, device, output, as_json, console)
    except (ValueError, OSError, RuntimeError) as error:
        refuse(COMMAND, error)


def _time(
    only: str, quick: bool, turns: int, device: str, output: Path | None, as_json: bool, console: Console
) -> None:
    from fusion_attention.bench.cases import GROUPS, peers

    if only not in (ALL, *GROUPS):
        raise ValueError(f"--only: expected {ALL} or one of {', '.join(GROUPS)}, got {only!r}")
    if output is not None and not output.absolute().parent.is_dir():
        raise ValueError(f"--output: there is no folder {output.absolute().parent}")
    place = device_of(device)
    result = machine(place)
    if not as_json:
        _machine_lines(console, result)
    timings = _timings(GROUPS if only == ALL else {only: GROUPS[only]}, place, quick, turns, console, as_json)
    figures = {**result, "quick": quick, "peers": peers(place), "rows": [asdict(t) for t in timings]}
    if output is not None:
        _write(output, figures, timings)
    if as_json:
        show_json(figures)


def _timings(
    groups: Any, device: torch.device, quick: bool, turns: int, console: Console, silent: bool
) -> list[Timing]:
    from fusion_attention.bench.pair import measure
    from fusion_attention.bench.report import Report

    report = None if silent else Report(console, TITLE, COLUMNS)
    results: list[Timing] = []
    total = sum(count for _, count in groups.values())
    with progress("timing", total, None if silent else console, calm=True) as advance:
        for name, (rows, _) in groups.items():
            advance(len(results), name)
            for pair in rows(device, quick):
                advance(len(results), f"{name}: {pair.name}")
                t = measure(pair, min(turns, 3) if quick else turns)
                results.append(t)
                if report:
                    peak_share = f"{t.share_of_peak:.2f}" if t.share_of_peak else ""
                    cells = (f"{t.ours_ms:.3f}", f"{t.peer_ms:.3f}", f"{t.ratio:.2f}", f"{t.gflops:.0f}", peak_share)
                    report.add(t.name, t.peer_name, *cells, section=t.group)
    return results


def machine(device: torch.device) -> dict[str, Any]:
    """Returns versions, number of threads, processor and its peak rates, by name, for a benchmark's JSON file."""
    import torch

    from fusion_attention import __version__
    from fusion_attention.cli.machine import peaks, processor

    facts = {"library": __version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        return {**facts, "device": str(device), "processor": torch.cuda.get_device_name(device), "peak": {}}
    from fusion_attention import _native

    name = f"{processor()}, {_native.cpu_features()['chosen']}"
    return {**facts, "device": "cpu", "processor": name, "peak": peaks(torch.get_num_threads())}


def _machine_lines(console: Console, environment: dict[str, Any]) -> None:
    import torch

    from fusion_attention.bench.cases import peers

    line = (
        f"fusion-attention {environment['library']}, torch {environment['torch']}, "
        f"{environment['threads']} threads, {environment['processor']}"
    )
    console.print(line, highlight=False, markup=False)
    if environment["peak"]:
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in environment["peak"].items())
        console.print(f"measured peaks: {rates} (GFLOP/s, read: GB/s)", highlight=False)
    for name, release in peers(torch.device(environment["device"])).items():
        console.print(f"peer {name}: {release}", highlight=False, markup=False)


def _write(output: Path, figures: dict[str, Any], timings: list[Timing]) -> None:
    """Writes NAME.json (figures), and NAME.png (timings) if matplotlib is installed; output: the path of NAME."""
    output.with_name(f"{output.name}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        typer.echo('no chart: pip install matplotlib (or "fusion-attention[bench]")', err=True)
        return
    from fusion_attention.bench import chart

    chart.draw(timings, output.with_name(f"{output.name}.png"))


def _compare(before: Path, after: Path, console: Console, as_json: bool) -> None:
    from fusion_attention.bench.changes import compared
    from fusion_attention.bench.report import Report

    changes, removed, added = compared(before, after)
    if as_json:
        show_json({"changes": [asdict(change) for change in changes], "only_before": removed, "only_after": added})
        return
    report = Report(console, CHANGES_TITLE, CHANGES)
    for c in changes:
        times = (f"{c.before_ms:.3f}", f"{c.after_ms:.3f}", f"{c.faster:.2f}", f"{c.peer_faster:.2f}", f"{c.net:.2f}")
        report.add(c.name, c.peer_name, *times, "" if c.says == "same" else c.says, section=c.group)
    counts = {says: sum(c.says == says for c in changes) for says in ("faster", "slower", "same")}
    console.print(", ".join(f"{count} {says}" for says, count in counts.items()), style="bold", highlight=False)
    for names, where in ((removed, before), (added, after)):
        if names:
            console.print(f"only in {where}: {', '.join(names)}", highlight=False, markup=False, soft_wrap=True)


def _repository(only: str, quick: bool, turns: int, device: str, output: Path | None, as_json: bool) -> None:
    """Runs the benchmarks of the clone that contains this file, with the options of the command bench."""
    if not (REPOSITORY / "benchmarks" / "__main__.py").is_file():
        raise ValueError(
            "--repository: expected a clone of the repository, got an installed package, which has no other benchmarks "
            "than `fusion-attention bench` (in a clone: make bench)"
        )
    if device != "cpu" or as_json:
        raise ValueError("--repository: expected no --device and no --json (it times the CPU; --output writes JSON)")
    sys.path.insert(0, str(REPOSITORY))
    try:
        result = importlib.import_module("benchmarks.__main__")
    except ImportError as error:
        raise ValueError(f"--repository: {error} (`make bench` installs the packages of its peers)") from None
    if only not in (ALL, *result.NAMES):
        raise ValueError(f"--only: expected {ALL} or one of {', '.join(result.NAMES)}, got {only!r}")
    result.main(quick=quick, turns=turns, only=only, output=output)
