"""The operators as their records describe them: a list, a page, and the pages of docs/ops.

Knows files and tables. Refuses to know what a page says: `pages.render` does.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fusion_attention.contract import Op

INDEX = "index.md"


def pages(records: Mapping[str, Op]) -> dict[str, str]:
    """Every generated page by file name: one per record, and the index."""
    from fusion_attention.pages import render

    texts = {f"{name}.md": render(record) for name, record in records.items()}
    texts[INDEX] = index(records)
    return {name: text.rstrip() + "\n" for name, text in texts.items()}


def index(records: Mapping[str, Op]) -> str:
    """The page that lists all pages."""
    lines = [f"| [{name}]({name}.md) | {_cell(record.summary)} |" for name, record in sorted(records.items())]
    head = ["# Operators", "", "Generated from the contract records by `fusion-attention ops --write`.", ""]
    return "\n".join([*head, "| Operator | What it computes |", "|---|---|", *lines])


def problems(folder: Path, expected: Mapping[str, str]) -> list[str]:
    """One line for each page that is missing, stale or extra in a folder."""
    present = {path.name: path for path in folder.glob("*.md")}
    found = []
    for name in sorted(expected.keys() | present.keys()):
        if name not in present:
            found.append(f"missing: {folder / name}")
        elif name not in expected:
            found.append(f"extra: {folder / name} (no operator has this name: delete it)")
        elif present[name].read_text(encoding="utf-8") != expected[name]:
            found.append(f"stale: {folder / name}")
    return found


def ops(
    name: str = typer.Argument("", help="Print this operator's page; without it, list all operators."),
    write: Path | None = typer.Option(
        None, metavar="DIR", file_okay=False, help="Write all pages and index.md into this folder."
    ),
    check: Path | None = typer.Option(
        None, metavar="DIR", file_okay=False, help="Fail and name each page of this folder that is not as generated."
    ),
) -> None:
    """List the operators, print one operator's page, or write or check the pages of docs/ops."""
    from fusion_attention.ops import RECORDS

    if sum(bool(given) for given in (name, write, check)) > 1:
        raise typer.BadParameter("NAME, --write and --check exclude each other.")
    if write:
        _write(write, pages(RECORDS))
    elif check:
        _check(check, pages(RECORDS))
    elif name:
        _print_page(name, RECORDS)
    else:
        Console().print(_listing(RECORDS))


def _write(folder: Path, expected: Mapping[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in expected.items():
            # The same bytes on every system.
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise typer.BadParameter(f"cannot write: {error}", param_hint="--write") from None
    typer.echo(f"{len(expected)} pages in {folder}")


def _check(folder: Path, expected: Mapping[str, str]) -> None:
    found = problems(folder, expected)
    for line in found:
        typer.echo(line, err=True)
    if found:
        typer.echo(f"{len(found)} pages differ from the records: fusion-attention ops --write {folder}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{len(expected)} pages in {folder} are as generated")


def _print_page(name: str, records: Mapping[str, Op]) -> None:
    from fusion_attention.pages import render

    if name not in records:
        close = _close_names(name, list(records))
        hint = f"did you mean {' or '.join(close)}?" if close else "`fusion-attention ops` lists them."
        raise typer.BadParameter(f"no operator {name!r}; {hint}", param_hint="NAME")
    page, console = render(records[name]), Console()
    if console.is_terminal:
        console.print(Markdown(page))
    else:
        typer.echo(page)  # The source itself, for a file or a pager.


def _close_names(name: str, names: list[str]) -> list[str]:
    """Up to three names that contain what was asked for, else the most similar ones."""
    within = sorted((known for known in names if name.lower() in known.lower()), key=len)[:3]
    lower = {known.lower(): known for known in names}
    return within or [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]


def _listing(records: Mapping[str, Op]) -> Table:
    table = Table(caption="fusion-attention ops NAME prints an operator's page.", caption_justify="left")
    table.add_column("operator", style="bold", no_wrap=True)
    table.add_column("what it computes")
    table.add_column("layouts")
    for name, record in sorted(records.items()):
        table.add_row(name, Text(record.summary), " ".join(record.layouts))
    return table


def _cell(text: str) -> str:
    """Text inside a Markdown table."""
    return text.replace("|", r"\|").replace("\n", " ")
