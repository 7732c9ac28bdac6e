"""The command `fusion-attention`: its subcommands by name. Knows nothing of what they do."""

from __future__ import annotations

import io
import sys

import typer

# Under other names: the modules of these names stay reachable as attributes of the package.
from fusion_attention.cli.demo import demo as demo_command
from fusion_attention.cli.ops import ops as ops_command

app = typer.Typer(
    name="fusion-attention",
    help="Ascend's fused attention operators, with the same meaning, on any machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo_command)
app.command("ops")(ops_command)


def main() -> None:
    """Entry point of the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A screen that cannot show a character shows "?"; no reason to stop.
            stream.reconfigure(errors="replace")
    app()


__all__ = ["app", "main"]
