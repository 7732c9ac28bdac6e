"""Runs subcommands of `fusion-attention` in this process, and reads and changes files of capture()."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.text import Text
from safetensors import safe_open
from typer.testing import CliRunner

from fusion_attention.cli import app


class Ran(NamedTuple):
    """The exit code of a command, and its output on stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The output on stdout and stderr as one line, without colours."""
        return " ".join(Text.from_ansi(self.out + self.err).plain.split())


def run(*words: Any, stdin: str = "") -> Ran:
    """Runs `fusion-attention WORDS`; stdin: its standard input. An error that no command catches fails the test."""
    # Unset FORCE_COLOR, which would make rich treat the pipe as a terminal.
    runner = CliRunner(env={"FORCE_COLOR": None})
    outcome = runner.invoke(app, [str(word) for word in words], input=stdin, terminal_width=200)
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    return Ran(outcome.exit_code, outcome.stdout, outcome.stderr)


def content_of(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns the tensors and the metadata of a .safetensors file."""
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata())  # noqa: SIM118
