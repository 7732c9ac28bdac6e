"""The progress of judging a call: a bar on a terminal, if it takes longer than two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

Item = TypeVar("Item")
Watch = Callable[[str, int, int], None]  # (description, number of completed steps, number of all steps)
PATIENCE = 2.0  # seconds without a bar


def silent(words: str, done: int, steps: int) -> None:
    """Does nothing: the callback of a search whose progress is not shown."""


def over(watch: Watch, words: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yields the items, and before each calls watch(words, number of completed items, number of items)."""
    for done, item in enumerate(items):
        watch(words, done, len(items))
        yield item


class Bar:
    """Shows progress as a bar after two seconds if the console is a terminal; the bar is erased at the end.

    Args:
        name: text before each step's description.
        console: the console to draw on; None: stderr.
    """

    def __init__(self, name: str = "", console: Console | None = None) -> None:
        self.name, self.began = name, time.monotonic()
        self.console = Console(stderr=True) if console is None else console
        self.progress: Progress | None = None
        self.task: Any = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.progress is not None:
            self.progress.stop()

    def __call__(self, words: str, done: int, steps: int) -> None:
        """Draws the bar: the number of completed steps (done) of `steps`, after the description `words`."""
        if self.progress is None:
            if time.monotonic() - self.began < PATIENCE or not self.console.is_terminal:
                return
            self.progress = Progress(console=self.console, transient=True)
            self.task = self.progress.add_task("")
            self.progress.start()
        self.progress.update(self.task, description=f"{self.name} {words}".strip(), completed=done, total=steps)
