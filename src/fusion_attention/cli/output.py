"""Input and output of commands: JSON, errors, progress bars, devices."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

BAD_INPUT = 2


def refuse(command: str, sentence: object) -> NoReturn:
    """Prints an error about invalid input, one sentence, on stderr, and ends the process with exit code 2."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(str(sentence).split()))
    line = line if len(line) <= 1000 else line[:996] + " ..."
    typer.echo(f"fusion-attention {command}: {line}", err=True)
    raise typer.Exit(BAD_INPUT)


def show_json(value: Any) -> None:
    """Prints a value as JSON; numbers that are not finite become null."""
    typer.echo(json.dumps(_finite(value), indent=1, ensure_ascii=False, default=str))


def device_of(text: str) -> torch.device:
    """Returns the torch device that the option --device names; ValueError: this machine cannot compute on it."""
    import torch

    device = torch.device(text)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, got {text}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: no GPU is available (fusion-attention doctor prints the reason)")
    return device


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(
    what: str, total: float | None, console: Console | None = None, *, calm: bool = False
) -> Iterator[Callable[[float, str], None]]:
    """Shows a progress bar on a terminal; yields a function of (amount done, next item).

    The bar is drawn on `console`, the command's output, if it is a terminal, else on stderr if that is one.

    what, total: description and amount of the work; calm: draw only when the function is called, so that no thread
    draws during a timing.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    place = console if console is not None and console.is_terminal else Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    options: dict[str, Any] = {"transient": True, "disable": not place.is_terminal, "auto_refresh": not calm}
    with Progress(*columns, console=place, **options) as bar:
        task = bar.add_task(what, total=total)

        def update(done: float, words: str) -> None:
            bar.update(task, completed=done, description=f"{what} {words}".strip()[:60], refresh=calm)

        yield update
