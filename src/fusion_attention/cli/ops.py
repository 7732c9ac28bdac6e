"""`fusion-attention ops`: lists the operators, or prints the page of one."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import typer

from fusion_attention.cli.output import show_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from fusion_attention.contract import Op


def ops(
    name: str = typer.Argument("", help="Print this operator's page; without it, list all operators."),
    as_json: bool = typer.Option(False, "--json", help="Print the list, or NAME's parameters and rules, as JSON."),
) -> None:
    """List the operators, or print one operator's page."""
    from fusion_attention.ops.auxiliary_definitions.definitions import CONTRACTS

    if as_json:
        show_json(
            _described(_record_of(name, CONTRACTS)) if name else [_entry(r) for _, r in sorted(CONTRACTS.items())]
        )
        return
    from rich.console import Console

    console = Console()
    if not name:
        console.print(_listing(CONTRACTS))
        return
    from rich.markdown import Markdown

    from fusion_attention.cli.op_pages import page, terminal_page

    record = _record_of(name, CONTRACTS)
    if console.is_terminal:
        console.print(Markdown(terminal_page(record)))
    else:
        typer.echo(page(record))  # Markdown, for a file or a pager


def _record_of(name: str, records: Mapping[str, Op]) -> Op:
    if name not in records:
        close = _close_names(name, list(records))
        hint = f"did you mean {' or '.join(close)}?" if close else "`fusion-attention ops` lists the operators."
        raise typer.BadParameter(f"no operator {name!r}; {hint}", param_hint="NAME")
    return records[name]


def _entry(record: Op) -> dict[str, Any]:
    return {
        "name": record.name,
        "summary": record.summary,
        "source": record.source,
        "layouts": list(record.layouts),
        "results": list(record.results),
    }


def _described(record: Op) -> dict[str, Any]:
    """Returns an operator's definition (parameters, rules, formula) as JSON values."""
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
            "fix": record.spell(rule.advice),
            "when": record.spell(rule.when),
            "layouts": list(rule.only),
            "level": rule.level,
            "code": rule.code,
        }
        for rule in record.applicable_rules
    ]
    return {**_entry(record), "formula": record.formula, "parameters": parameters, "rules": rules}


def _close_names(name: str, names: list[str]) -> list[str]:
    """Returns up to three names that contain the given one, else the most similar names."""
    within = sorted((candidate for candidate in names if name.lower() in candidate.lower()), key=len)[:3]
    lower = {candidate.lower(): candidate for candidate in names}
    return within or [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)]


def _listing(records: Mapping[str, Op]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(caption="fusion-attention ops NAME prints an operator's page.", caption_justify="left")
    table.add_column("operator", style="bold", no_wrap=True)
    table.add_column("description")
    table.add_column("layouts")
    for name, record in sorted(records.items()):
        table.add_row(name, Text(record.summary), " ".join(record.layouts))
    return table
