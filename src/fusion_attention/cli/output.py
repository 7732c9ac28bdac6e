"""How commands speak: JSON, one sentence where the input is wrong, and a progress bar on a terminal.

Knows no command.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

BAD_INPUT = 2


def refuse(command: str, sentence: object) -> NoReturn:
    """Ends a command whose input is wrong: one sentence on stderr, exit code 2."""
    line = " ".join(str(sentence).split())
    typer.echo(f"fusion-attention {command}: {_printable(line)}", err=True)
    raise typer.Exit(BAD_INPUT)


def show_json(value: Any) -> None:
    """Prints a value as JSON; numbers that JSON lacks are null."""
    typer.echo(json.dumps(_finite(value), indent=1, ensure_ascii=False, default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _printable(text: str) -> str:
    """Text whose characters command no terminal, and no longer than a screen."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= 1000 else clean[:996] + " ..."


@contextmanager
def progress(what: str, total: float | None) -> Iterator[Any]:
    """A bar on a terminal, on stderr; yields a function of (done, further words). Elsewhere nothing is drawn."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(what, total=total)

        def update(done: float, words: str = "") -> None:
            bar.update(task, completed=done, description=f"{what} {words}".strip())

        yield update
