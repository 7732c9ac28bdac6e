"""`fusion-attention doctor`: describes the machine and its back ends, and tests their results."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from fusion_attention.cli.machine import processor
from fusion_attention.cli.output import progress, show_json

if TYPE_CHECKING:
    from rich.console import Console

AMX_NOTE = (
    "This processor has AMX, which the library uses for bfloat16 in dense attention, decode with a multiple of 16 "
    "heads to a key, selections, the indexer and its loss; float16, float32 and integers use vector instructions."
)
AMX_REFUSED_NOTE = "This processor has AMX, but {}: the library computes without it."
RUNTIMES_NOTE = (
    "More than one OpenMP runtime is loaded: each has its own threads, which compete for the cores. Import torch "
    "first, and no package with another runtime (some builds of numpy, scikit-learn, onnxruntime)."
)
FORKED_NOTE = (
    "This process is a child of fork(), which does not copy threads: the core computes on one thread. "
    'Start processes by "spawn".'
)
EXPERIMENTAL = {  # by sys.platform
    "darwin": "macOS: built, and its arithmetic tested as Linux arm64, but never run on a Mac.",
    "win32": "Windows: built, and the core tested under wine, but never run with torch on Windows.",
}
EXPERIMENTAL_NOTE = "Experimental on {} Please send the authors the output of: fusion-attention doctor --json"
SHOWN = 5  # largest number of failed steps that are printed; --json has all
MANY_THREADS_NOTE = "torch has more threads than this process may use cores: set OMP_NUM_THREADS={}."


def doctor(
    quick: bool = typer.Option(False, "--quick", help="Omit the peak rates and the self test: takes two seconds."),
    seconds: float = typer.Option(10.0, min=1.0, max=60.0, help="Time limit of the self test, in seconds."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON, for a bug report."),
    model: str = typer.Option(
        "", "--model", help="A folder, file or name of a model of transformers: list how its layers are computed."
    ),
) -> None:
    """Print the machine's hardware and software and its back ends, and test their results.

    The command prints the processor and its instruction sets, threads and OpenMP runtimes, GPUs (with the reason if one
    is not used), installed and tested versions of packages, and measured peak rates. The self test compares every back
    end with the float64 model: first fixed calls, then random calls until the time limit.

    With --model nothing is computed: for every layer of the configuration the command lists the attention that
    attn_implementation="fusion_attention" selects, and the calls that transformers' own code computes.

    Exit code: 0 if no problem was found; 1 if a requirement is missing, a result of the self test is wrong, or the
    model is refused.
    """
    from rich.console import Console

    if model:
        from fusion_attention.cli.doctor_model import show_paths

        raise typer.Exit(show_paths(model, as_json))
    result = facts()
    if not quick:
        _measured(result, seconds)
    if as_json:
        show_json(result)
    else:
        _show(result, Console())
    raise typer.Exit(1 if result["problems"] else 0)


def facts() -> dict[str, Any]:
    """Returns facts about hardware, packages and back ends that need no measurement, notes and problems, by name."""
    import torch

    from fusion_attention import __version__
    from fusion_attention.cli import machine

    releases = machine.releases()
    back_ends = machine.back_ends()
    problems = [f"{r.name} is not installed" for r in releases if r.says == "missing"]
    problems += [f"{r.name} {r.installed} is older than the tested {r.tested}" for r in releases if "older" in r.says]
    native: dict[str, Any] = {"features": [], "built": [], "runnable": []}
    native |= {"chosen": "", "forced": "", "forked": False, "tiles_refused": ""}
    try:
        from fusion_attention import _native

        native = dict(_native.cpu_features())
    except ImportError as error:
        problems.append(f"the native core cannot be loaded ({error}): on the CPU only the float64 model computes")
    runtimes, cores = machine.openmp_runtimes(), machine.cores()
    messages = [EXPERIMENTAL_NOTE.format(text) for system, text in EXPERIMENTAL.items() if sys.platform == system]
    refused = native["tiles_refused"]
    amx_note = AMX_REFUSED_NOTE.format(refused) if refused else AMX_NOTE
    messages += [amx_note] * ("amx_bf16" in native["features"]) + [FORKED_NOTE] * native["forked"]
    messages += [RUNTIMES_NOTE] * (len(runtimes) > 1)
    allowed = int(cores["quota"] or cores["usable"] or 1) or 1
    messages += [MANY_THREADS_NOTE.format(allowed)] * (torch.get_num_threads() > max(allowed, 1))
    messages += [f"{r.name} {r.installed} is newer than the tested {r.tested}." for r in releases if "newer" in r.says]
    return {
        "library": __version__,
        "processor": processor(),
        "native": native,
        "cores": cores,
        "threads": torch.get_num_threads(),
        "environment": machine.settings(),
        "openmp": runtimes,
        "releases": [asdict(r) for r in releases],
        "gpus": machine.gpus(),
        "npu": machine.npu(),
        "back_ends": back_ends,
        "notes": messages,
        "problems": problems,
    }


def _measured(report: dict[str, Any], seconds: float) -> None:
    """Measures peak rates, runs the self test for at most `seconds`, and adds both to a report of facts()."""
    from fusion_attention.cli import machine, selftest

    if report["native"]["chosen"]:
        report["peaks"] = machine.peaks(report["threads"])
    usable = [name for name, why in report["back_ends"].items() if why == "yes" and name != "golden"]
    with progress("self test", seconds) as advance:
        outcomes = list(selftest.outcomes(usable, seconds, advance))
    wrong = [outcome for outcome in outcomes if outcome.fault]
    report["self_test"] = {
        "back_ends": usable,
        "steps": len(outcomes),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 2),
        "wrong": [asdict(outcome) for outcome in wrong],
    }
    messages = [f"self test: {one.name} ({one.backend}): {one.fault}" for one in wrong]
    report["problems"] += messages[:SHOWN]
    if len(messages) > SHOWN:
        report["problems"].append(f"{len(messages) - SHOWN} more steps of the self test are wrong")


def _show(report: dict[str, Any], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _rows(report):
        table.add_row(name, Text(value))
    console.print(table)
    for note in report["notes"]:
        console.print(Text(f"\n{note}", "yellow"))
    for problem in report["problems"]:
        console.print(Text(f"\nPROBLEM: {problem}", "bold red"))
    if not report["problems"]:
        console.print(Text("\nAll is well.", "bold green"))


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    native, cores = report["native"], report["cores"]
    quota = f", a quota of {cores['quota']:g}" if cores["quota"] else ""
    rows = [
        ("fusion-attention", report["library"]),
        ("processor", report["processor"]),
        ("features", " ".join(native["features"]) or "none that the library uses"),
        ("instruction sets built", " ".join(native["built"]) or "none"),
        ("usable here", " ".join(native["runnable"]) or "none"),
        ("chosen", (native["chosen"] or "none") + (" (FUSION_ATTENTION_CPU)" if native["forced"] else "")),
        ("cores", f"{cores['usable']} of {cores['system']}{quota}"),
        ("threads", str(report["threads"])),
        ("environment", " ".join(f"{k}={v}" for k, v in report["environment"].items()) or "no variables of threads"),
        ("OpenMP runtimes", " ".join(report["openmp"]) or "none found"),
    ]
    for one in report["releases"]:
        installed = one["installed"] or "-"
        rows.append((one["name"], f"{installed:<14} {one['says']} (tested: {one['tested']})"))
    devices = ", ".join(f"{d['name']} ({d['capability']}, {d['memory_gib']} GiB)" for d in report["gpus"]["devices"])
    why = f"not used: {report['gpus']['why_not']}" if report["gpus"]["why_not"] else ""
    rows += [("GPUs", "; ".join(text for text in (devices or "none", why) if text)), ("NPU", report["npu"])]
    rows += [(f"back end {name}", why) for name, why in report["back_ends"].items()]
    if "peaks" in report:
        units = (f"{name} {rate:g} {'GB/s' if name == 'read' else 'GFLOP/s'}" for name, rate in report["peaks"].items())
        rows.append(("measured peaks", ", ".join(units)))
    if "self_test" in report:
        test = report["self_test"]
        passed = test["steps"] - len(test["wrong"])
        of = ", ".join(test["back_ends"]) or "no back end"
        rows.append(("self test", f"{passed} of {test['steps']} calls right in {test['seconds']:g} s ({of})"))
    return rows
