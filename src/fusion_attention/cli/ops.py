"""The operators as their records describe them: a list, a page, the pages of docs/ops, and aclnn's stub.

Knows files and tables. Refuses to know what a page or a stub says: `pages.render` and `stubs.stub` do.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fusion_attention.cli.output import show_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from fusion_attention.contract import Op

INDEX, VERSIONS = "index.md", "versions.md"


def pages(records: Mapping[str, Op]) -> dict[str, str]:
    """Every generated page by file name: one per record, what versions differ in, and the index."""
    from fusion_attention.cli.op_pages import index, page
    from fusion_attention.contract.doc_pages import versions

    texts = {f"{name}.md": page(record) for name, record in records.items()}
    texts[INDEX], texts[VERSIONS] = index(records), versions(records.values())
    return {name: text.rstrip() + "\n" for name, text in texts.items()}


def files(folder: Path, stub: Path | None, records: Mapping[str, Op]) -> dict[Path, str]:
    """Every generated file: the pages in a folder, and aclnn's stub where it is asked for."""
    found = {folder / name: text for name, text in pages(records).items()}
    if stub is not None:
        from fusion_attention import aclnn
        from fusion_attention.cli import stubs

        found[stub] = stubs.stub([getattr(aclnn, name) for name in aclnn.__all__])
    return found


def problems(folder: Path, expected: Mapping[Path, str]) -> list[str]:
    """One line for each file that is missing or stale, and each page that is extra in a folder."""
    found = []
    for path in sorted(expected.keys() | {*folder.glob("*.md")}):
        if path not in expected:
            found.append(f"extra: {path} (no operator has this name: delete it)")
        elif not path.is_file():
            found.append(f"missing: {path}")
        elif path.read_text(encoding="utf-8") != expected[path]:
            found.append(f"stale: {path}")
    return found


def ops(
    name: str = typer.Argument("", help="Print this operator's page; without it, list all operators."),
    write: Path | None = typer.Option(
        None, metavar="DIR", file_okay=False, help="Write all pages and index.md into this folder."
    ),
    check: Path | None = typer.Option(
        None, metavar="DIR", file_okay=False, help="Fail and name each page of this folder that is not as generated."
    ),
    stub: Path | None = typer.Option(
        None, metavar="FILE", dir_okay=False, help="With --write or --check: the type checkers' stub of aclnn too."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the list, or NAME's parameters and rules, as JSON."),
) -> None:
    """List the operators, print one operator's page, or write or check the pages of docs/ops."""
    from fusion_attention.ops.companions import CONTRACTS

    if sum(bool(given) for given in (name, write, check)) > 1:
        raise typer.BadParameter("NAME, --write and --check exclude each other.")
    if as_json and (write or check):
        raise typer.BadParameter("--json goes with NAME, or with the list.")
    if stub and not (write or check):
        raise typer.BadParameter("--stub goes with --write or --check.")
    if write:
        _write(write, files(write, stub, CONTRACTS))
    elif check:
        _check(check, files(check, stub, CONTRACTS))
    elif as_json:
        show_json(_described(_known(name, CONTRACTS)) if name else [_entry(r) for _, r in sorted(CONTRACTS.items())])
    elif name:
        _print_page(_known(name, CONTRACTS))
    else:
        from rich.console import Console

        Console().print(_listing(CONTRACTS))


def _write(folder: Path, expected: Mapping[Path, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in expected.items():
            # The same bytes on every system.
            path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise typer.BadParameter(f"cannot write: {error}", param_hint="--write") from None
    typer.echo(f"{len(expected)} files in {folder}{_beside(folder, expected)}")


def _check(folder: Path, expected: Mapping[Path, str]) -> None:
    found = problems(folder, expected)
    for line in found:
        typer.echo(line, err=True)
    if found:
        typer.echo(f"{len(found)} files differ from the records: write them with --write in place of --check", err=True)
        raise typer.Exit(1)
    typer.echo(f"{len(expected)} files in {folder}{_beside(folder, expected)} are as generated")


def _beside(folder: Path, expected: Mapping[Path, str]) -> str:
    return "".join(f" and {path}" for path in expected if path.parent != folder)


def _known(name: str, records: Mapping[str, Op]) -> Op:
    if name not in records:
        close = _close_names(name, list(records))
        hint = f"did you mean {' or '.join(close)}?" if close else "`fusion-attention ops` lists them."
        raise typer.BadParameter(f"no operator {name!r}; {hint}", param_hint="NAME")
    return records[name]


def _print_page(record: Op) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    from fusion_attention.cli.op_pages import page, terminal_page

    console = Console()
    if console.is_terminal:
        console.print(Markdown(terminal_page(record)))
    else:
        typer.echo(page(record))  # The source itself, for a file or a pager.


def _entry(record: Op) -> dict[str, Any]:
    return {
        "name": record.name,
        "summary": record.summary,
        "source": record.source,
        "layouts": list(record.layouts),
        "results": list(record.results),
    }


def _described(record: Op) -> dict[str, Any]:
    """What a record says of a call, as JSON holds it."""
    from fusion_attention.contract import Attr

    parameters = [
        {
            "name": p.shown,
            "cann": record.cann.get(p.shown, ""),
            "kind": type(p).__name__.lower(),
            "optional": p.optional,
            "text": p.text,
            **{word: getattr(p, word) for word in ("dtypes", "output", "domain") if hasattr(p, word)},
            **({"default": repr(p.default), "type": p.type.__name__} if isinstance(p, Attr) else {}),
        }
        for p in record.params
    ]
    rules = [
        {
            "parameter": record.by_name[rule.param].shown,
            "expected": record.spell(rule.expected),
            "mend": record.spell(rule.advice),
            "when": record.spell(rule.when),
            "layouts": list(rule.only),
            "level": rule.level,
            "code": rule.code,
        }
        for rule in record.asked
    ]
    return {**_entry(record), "formula": record.formula, "parameters": parameters, "rules": rules}


def _close_names(name: str, names: list[str]) -> list[str]:
    """Up to three names that contain what was asked for, else the most similar ones."""
    within = sorted((known for known in names if name.lower() in known.lower()), key=len)[:3]
    lower = {known.lower(): known for known in names}
    return within or [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]


def _listing(records: Mapping[str, Op]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(caption="fusion-attention ops NAME prints an operator's page.", caption_justify="left")
    table.add_column("operator", style="bold", no_wrap=True)
    table.add_column("what it computes")
    table.add_column("layouts")
    for name, record in sorted(records.items()):
        table.add_row(name, Text(record.summary), " ".join(record.layouts))
    return table
