"""`fusion-attention verify`: judges the outputs of calls that are saved in files with their inputs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fusion_attention.cli.output import refuse

if TYPE_CHECKING:
    from fusion_attention.judging.calls import Recorded
    from fusion_attention.judging.naming import Reading
    from fusion_attention.judging.verdict import Judgement

COMMAND = "verify"
_STANDARDS = ("error-bound", "cann-0.5%", "cann-double")


def verify(
    files: list[Path] = typer.Argument(
        metavar="PATH...", help="Files of capture(), folders of them, msprobe dumps, .npz, .pt, .safetensors files."
    ),
    op: str = typer.Option("", "--op", help="The operator of the call, for files that capture() did not write."),
    names: list[str] = typer.Option(
        [], "--map", help="PARAMETER=NAME or RESULT=NAME, with its name in the file; or a JSON file of such pairs."
    ),
    values: list[str] = typer.Option(
        [], "--set", help="PARAMETER=VALUE that is not in the file: JSON, a word, or a band such as window(63,0)."
    ),
    pick: str = typer.Option("", "--call", help="Judge only calls of a folder whose name contains this text."),
    seed: int = typer.Option(0, "--seed", help="The seed of drawn dropout, for files that capture() did not write."),
    dtype: str = typer.Option("", "--dtype", help="The call's dtype, if files contain 16-bit values as float32."),
    standard: str = typer.Option("error-bound", "--standard", help=f"The standard: {', '.join(_STANDARDS)}."),
    search: bool = typer.Option(True, "--diagnose/--no-diagnose", help="Search for the mistake that explains errors."),
    backends: bool = typer.Option(True, "--backends/--no-backends", help="Also judge the back ends of this machine."),
    allow_noisy: bool = typer.Option(False, "--allow-noisy", help="Exit with 0 if results are only noisy."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    page: Path | None = typer.Option(None, "--html", help="Write one HTML file with pictures of the error."),
    unsafe_pickle: bool = typer.Option(False, "--unsafe-pickle", help="Read pickles that may run code."),
) -> None:
    """Judge saved calls: print which outputs are wrong, where, and which well-known mistake explains the errors.

    \b
    fusion-attention verify calls/
    fusion-attention verify dump/step0/rank0/ --html page.html
    fusion-attention verify kernel.npz --op npu_fusion_attention --map query=Q --set head_num=8
    fusion-attention verify kernel.pt --op attention --map out=my_out --set band=causal

    Exit code 0: all are right by the standard. 1: some are not. 2: a file cannot be read or judged.
    """
    if standard not in _STANDARDS:
        refuse(COMMAND, f"--standard: expected one of {', '.join(_STANDARDS)}, got {standard!r}")
    from fusion_attention.judging.calls import JudgeError
    from fusion_attention.judging.naming import Reading

    try:
        how = Reading(op, _names(names), _values(values), seed, unsafe_pickle, pick, dtype)
        result = _judged(files, how, search=search, backends=backends, standard=standard, bar=not as_json)
    except JudgeError as error:
        refuse(COMMAND, error)
    if page is not None:
        from fusion_attention.judging.report import page as written

        try:
            page.write_text(written(result), encoding="utf-8")
        except OSError as error:
            refuse(COMMAND, f"{page}: {error.strerror}")
    _print(result, standard, as_json=as_json)
    wrong = [j for j in result if not j.passes and not (allow_noisy and j.verdict == "noisy")]
    raise typer.Exit(1 if wrong else 0)


def _judged(
    files: list[Path], how: Reading, *, search: bool, backends: bool, standard: str, bar: bool
) -> list[Judgement]:
    from rich.console import Console

    from fusion_attention.judging.calls import JudgeError
    from fusion_attention.judging.judge import judged
    from fusion_attention.judging.loaders import read_calls
    from fusion_attention.judging.progress import Bar

    console = Console(stderr=True, quiet=not bar)

    def one(call: Recorded) -> Judgement:
        try:
            with Bar(call.source, console) as watch:
                return judged(call, search=search, backends=backends, standard=standard, watch=watch)
        except JudgeError as error:
            raise JudgeError(f"{call.source}: {error}") from None
        except (ArithmeticError, IndexError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            # Invalid files may cause errors that no rule detects.
            why = " ".join(str(error).split())[:160]
            raise JudgeError(f"{call.source}: cannot be judged ({type(error).__name__}: {why})") from None

    return [one(call) for file in files for call in read_calls(file, how)]


def _print(judgements: list[Judgement], standard: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"standard": standard, "calls": [j.json() for j in judgements]}, indent=1))
        return
    from rich.console import Console

    from fusion_attention.judging.report import table

    console = Console()
    for judgement in judgements:
        console.print(table(judgement))
    right = sum(j.passes for j in judgements)
    console.print(f"{right} of {len(judgements)} right by {standard}.", highlight=False)


def _names(given: list[str]) -> dict[str, str]:
    from fusion_attention.judging.calls import JudgeError

    results: dict[str, str] = {}
    for text in given:
        if "=" in text:
            name, _, source = text.partition("=")
            results[name] = source
            continue
        try:
            pairs = json.loads(Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise JudgeError(f"--map {text}: neither NAME=NAME nor a readable JSON file ({error})") from None
        if not isinstance(pairs, dict) or not all(isinstance(v, str) for v in pairs.values()):
            raise JudgeError(f"--map {text}: expected an object of names")
        results |= pairs
    return results


def _values(given: list[str]) -> dict[str, Any]:
    """Returns {parameter: value} of the options --set, "PARAMETER=VALUE"; a VALUE that is no JSON is a text."""
    from fusion_attention.judging.calls import JudgeError

    results: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise JudgeError(f"--set {text}: expected PARAMETER=VALUE")
        results[name] = value
        with contextlib.suppress(ValueError):
            results[name] = json.loads(value)
    return results
