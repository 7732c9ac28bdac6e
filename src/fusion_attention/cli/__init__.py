"""The command `fusion-attention`: its subcommands by name. Knows nothing of what they do.

A command's module loads torch, and what needs it, when the command runs.
"""

from __future__ import annotations

import io
import sys

import typer

from fusion_attention import __version__

# Under other names: the modules of these names stay reachable as attributes of the package.
from fusion_attention.cli.demo import demo as demo_command
from fusion_attention.cli.doctor import doctor as doctor_command
from fusion_attention.cli.mask import mask as mask_command
from fusion_attention.cli.ops import ops as ops_command

app = typer.Typer(
    name="fusion-attention",
    help="Ascend's fused attention operators, with the same meaning, on any machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo_command)
app.command("doctor")(doctor_command)
app.command("mask")(mask_command)
app.command("ops")(ops_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fusion-attention {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Entry point of the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A screen that cannot show a character shows "?"; no reason to stop.
            stream.reconfigure(errors="replace")
    app()


__all__ = ["app", "main"]
