"""`fusion-attention npu`: lists the names of torch_npu that exist here, or those that a tree of sources uses."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer

from fusion_attention.cli.output import refuse, show_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN_FILES = 5  # largest number of unreadable files that are printed; --json has all


def npu(
    coverage: Path | None = typer.Option(
        None, metavar="PATH", help="List the names that this file or tree of Python sources uses, and those missing."
    ),
    missing: bool = typer.Option(False, "--missing", help="With --coverage: list only missing names."),
    as_json: bool = typer.Option(False, "--json", help="Print the same as JSON."),
) -> None:
    """List the names of torch_npu that exist here, or those that a program for the chip uses.

    Without --coverage the command lists every module and name that npu.install() provides. With --coverage it reads
    sources, without running them, and lists the names that they use of torch_npu, torch.npu, torch.ops.npu,
    torch.ops.atb, mindspeed.ops and cann_ops_transformer, the most frequent first.
    """
    from rich.console import Console
    from rich.text import Text

    if coverage is None:
        if missing:
            refuse("npu", "--missing: expected --coverage PATH with it")
        result = {
            name: sorted(n for n in vars(module) if not n.startswith("_") or n.startswith("_npu_"))
            for name, module in sorted(_modules().items())
        }
        if as_json:
            show_json(result)
        else:
            console = Console()
            for module, names in result.items():
                console.print(Text(module, "bold"))
                console.print(Text("  " + (" ".join(names) or "(a package)")))
        return
    try:
        facts = _facts(coverage)
    except OSError as error:
        refuse("npu", f"--coverage: {error}")
    if as_json:
        facts["names"] = [row for row in facts["names"] if not (missing and row["here"])]
        show_json(facts)
    else:
        _show_coverage(facts, missing, Console())


def _modules() -> dict[str, Any]:
    import torch

    from fusion_attention.npu.surface import transfer
    from fusion_attention.npu.surface.modules import beside, build_modules

    return build_modules(torch.device("cpu"), "npu") | beside() | {transfer.NAME: ModuleType(transfer.NAME)}


def _facts(path: Path) -> dict[str, Any]:
    """Returns, for the Python sources in a path, the names of torch_npu that they use, the number of uses, and whether
    this library has each, as JSON values."""
    from fusion_attention.npu.source_scan import present, read
    from fusion_attention.npu.surface.missing_name_hints import instead

    reading, modules = read(path), _modules()
    rows: list[dict[str, Any]] = []
    for use in sorted(reading.uses.values(), key=lambda use: (-use.calls, -use.others, use.name)):
        here = present(use.name, modules)
        notes = None if here else instead(use.name)
        row = {"name": use.name, "function": use.function, "calls": use.calls, "other_uses": use.others}
        rows.append({**row, "files": sorted(use.files), "here": here, "instead": notes})
    calls = [row for row in rows if row["function"]]
    wanted, answered = sum(row["calls"] for row in calls), sum(row["calls"] for row in calls if row["here"])
    return {
        "path": str(path),
        "files": reading.files,
        "unread": reading.unread,
        "names": rows,
        "function_calls": wanted,
        "answered": answered,
        "share": answered / wanted if wanted else None,
        "device_tests": reading.device_tests,
    }


def _show_coverage(facts: dict[str, Any], missing: bool, console: Console) -> None:
    from rich.text import Text

    rows = [row for row in facts["names"] if not (missing and row["here"])]
    if rows:
        console.print(_table(rows))
    lacks = sum(not row["here"] for row in facts["names"])
    names = f"names of the chip's packages: {len(facts['names'])}, of which missing here: {lacks}."
    lines = [f"Files read: {facts['files']}; {names}"]
    if facts["function_calls"]:
        answered = f"{facts['answered']} of {facts['function_calls']} calls of npu functions ({facts['share']:.0%})"
        lines.append(f"{answered} exist here.")
    if facts["device_tests"]:
        lines.append(f'Comparisons of a device with "npu": {facts["device_tests"]}.')
    for line in lines:
        console.print(Text(line))
    unread = list(facts["unread"].items())
    for file, why in unread[:SHOWN_FILES]:
        console.print(Text(f"not read: {file} ({why})", "yellow"))
    if len(unread) > SHOWN_FILES:
        console.print(Text(f"not read: {len(unread) - SHOWN_FILES} more", "yellow"))


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "calls", "other uses", "files", "here", pad_edge=False)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:4]:
        column.justify = "right"
    for row in rows:
        notes = f"no: {row['instead']}" if row["instead"] else "no"
        here = Text("yes", "green") if row["here"] else Text(notes, "red")
        numbers = (str(row[name] or "") for name in ("calls", "other_uses"))
        table.add_row(Text(row["name"]), *numbers, str(len(row["files"])), here)
    return table
