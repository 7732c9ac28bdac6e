"""`fusion-attention replay`: computes saved calls again, times them, and judges the saved results."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fusion_attention.cli.output import BAD_INPUT, device_of, progress, refuse, show_json

if TYPE_CHECKING:
    from rich.console import Console

    from fusion_attention.judging.replay import Replay

COMMAND = "replay"
RIGHT, UNJUDGED, WRONG, UNREADABLE = "right", "unjudged", "wrong", "unreadable"
_STYLES = {RIGHT: "green", UNJUDGED: "yellow", WRONG: "bold red", UNREADABLE: "bold red"}


class Backend(str, Enum):
    """Names of back ends for the option --backend."""

    auto, cpu, triton, golden = "auto", "cpu", "triton", "golden"


@dataclass(frozen=True)
class Call:
    """The result of computing one saved call again: file, operator, sizes, verdict, largest difference, time."""

    file: str  # the file of the saved call
    operator: str  # the operator's name; "" for an unreadable file
    sizes: str  # dtype and shape of the call's first result
    verdict: str  # "right", "unjudged", "wrong" or "unreadable"
    reason: str  # the reason for the verdict; "" for a right call
    worst: float  # the largest absolute difference between saved and recomputed results
    milliseconds: float  # median time of the timed runs; 0.0 without runs


def replay(
    paths: list[Path] = typer.Argument(
        ..., metavar="PATH...", show_default=False, help="Saved calls (.safetensors), or folders of them."
    ),
    backend: Backend = typer.Option(Backend.auto, help="The back end that computes the calls again."),
    device: str = typer.Option("cpu", help="The device that computes: cpu, cuda, cuda:1, ..."),
    runs: int = typer.Option(3, min=0, max=1000, help="Timed runs of every call, after one run that is not timed."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Compute calls again that fusion_attention.capture() saved, time every call, and judge the saved results.

    The files of a folder are read in the order in which they were saved. A saved result is right if its difference from
    float64 is no larger than rounding errors; fusion-attention verify FILE explains wrong results.

    \b
    fusion-attention replay calls/
    fusion-attention replay calls/0003-attention.safetensors --backend golden

    Exit code: 0 if every call is right, 1 if one is wrong, 2 if one cannot be read or judged.
    """
    from rich.console import Console

    try:
        place, files = device_of(device), session(paths)
    except (ValueError, OSError, RuntimeError) as error:
        refuse(COMMAND, error)
    results: list[Call] = []
    console = Console()
    if not as_json:
        _print(console, f"{len(files)} call{'s' * (len(files) != 1)}, computed again by: {backend.value}", "italic")
        _print(console, f"{'verdict':<10}  {'ms':>9}  {'largest diff.':>13}  call", "bold")
    with progress("replaying", len(files), None if as_json else console, calm=True) as advance:
        for call in calls(files, backend.value, place, runs, advance):
            results.append(call)
            if not as_json:
                _line(console, call)
    if as_json:
        show_json({"backend": backend.value, **summary(results), "calls": [asdict(call) for call in results]})
    else:
        counts = summary(results)
        words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _STYLES if counts[verdict])
        _print(console, f"{words or 'nothing'}; {counts['milliseconds']:.3f} ms in all", "bold")
    verdicts = {call.verdict for call in results}
    raise typer.Exit(BAD_INPUT if {UNREADABLE, UNJUDGED} & verdicts else 1 if WRONG in verdicts else 0)


def session(paths: list[Path]) -> list[Path]:
    """Returns the files of saved calls in `paths` (files or folders); those of a folder in the order of their numbers.

    Raises:
        ValueError: a path does not exist, or a folder has no saved calls.
    """

    def order(file: Path) -> tuple[int, str]:
        number = re.match(r"(\d{1,18})-", file.name)
        return (int(number[1]) if number else 1 << 62, file.name)

    files: list[Path] = []
    for path in paths:
        if not (path.is_dir() or path.is_file()):
            raise ValueError(f"{path}: no such file or folder")
        inside = sorted(path.glob("*.safetensors"), key=order) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path}: no .safetensors file in this folder")
        files += inside
    return files


def calls(
    files: list[Path], backend: str, device: Any, runs: int, advance: Callable[[float, str], None]
) -> Iterator[Call]:
    """Computes the saved call in each file again, times it `runs` times, and yields the result; advance: called with
    the number of files done and a name. One call is in memory at a time."""
    from fusion_attention.contract import BackendError
    from fusion_attention.judging.replay import CaptureError

    for number, file in enumerate(files):
        advance(number, file.name)
        try:
            yield _replayed(file, backend, device, runs)
        except BackendError as error:
            yield Call(str(file), "", "", UNREADABLE, f"no back end computes it: {_sentence(error)}", 0.0, 0.0)
        except (CaptureError, OSError, MemoryError) as error:
            yield Call(str(file), "", "", UNREADABLE, _sentence(error).removeprefix(f"{file}: "), 0.0, 0.0)


def summary(results: list[Call]) -> dict[str, Any]:
    """Returns {verdict: number of replayed calls with it, "milliseconds": total time of all calls}."""
    counts = {verdict: sum(call.verdict == verdict for call in results) for verdict in _STYLES}
    return {**counts, "milliseconds": sum(call.milliseconds for call in results)}


def _replayed(file: Path, backend: str, device: Any, runs: int) -> Call:
    from fusion_attention.judging import replay as replaying

    result = replaying.replay(file, backend=backend, device=device)
    verdict, reason = _verdict(result)
    first = next(iter(result.recorded.values()), None)
    sizes = "" if first is None else f"{str(first.dtype).removeprefix('torch.')}{list(first.shape)}"
    milliseconds = _milliseconds(result, backend, runs) if runs else 0.0
    return Call(str(file), result.operator, sizes, verdict, reason, result.worst, milliseconds)


def _milliseconds(replayed: Replay, backend: str, runs: int) -> float:
    """Returns the median milliseconds of `runs` computations of a saved call, with checks, without file access."""
    import statistics

    import torch

    from fusion_attention.captures.gradients import complete_call
    from fusion_attention.contract import bind
    from fusion_attention.ops import RECORDS
    from fusion_attention.plan import compute

    op, times = RECORDS[replayed.operator], []
    for _ in range(runs + 1):
        start = time.perf_counter()
        call = complete_call(op, bind(op, replayed.args, strict=False, check_content=False), 1, 0)
        compute(call, call.results(), backend)
        if call.device.type == "cuda":
            torch.cuda.synchronize(call.device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def _verdict(replayed: Replay) -> tuple[str, str]:
    """Returns (verdict on saved results: "right" if within rounding errors of float64, "wrong", "unjudged"; reason)."""
    from fusion_attention.judging.calls import JudgeError

    try:
        judgement = replayed.judgement
    except JudgeError as error:
        return UNJUDGED, _sentence(error)
    notes = [line.split(maxsplit=1)[-1] for line in judgement.lines() if line.startswith(("where", "error"))]
    return judgement.verdict, "" if judgement.passes else "; ".join(reversed(notes))


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _print(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(text, style), soft_wrap=True)


def _line(console: Console, call: Call) -> None:
    name = Path(call.file).name
    notes = "" if call.verdict == UNREADABLE else f"{call.milliseconds:9.3f}  {call.worst:13.3g}"
    _print(console, f"{call.verdict:<10}  {notes:>24}  {name}  {call.sizes}", _STYLES.get(call.verdict, ""))
    if call.reason and call.verdict != RIGHT:
        _print(console, f"            {call.reason}")
