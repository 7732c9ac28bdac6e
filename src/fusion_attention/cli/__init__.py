"""The command `fusion-attention` and its subcommands.

The module of a subcommand imports torch only when the subcommand runs.
"""

import inspect
import io
import sys
from collections.abc import Callable

import typer

from fusion_attention import __version__

# Aliases, because cli.bench, cli.capi ... must remain the modules of these names.
from fusion_attention.cli.bench import bench as bench_command
from fusion_attention.cli.capi import capi as capi_command
from fusion_attention.cli.demo import demo as demo_command
from fusion_attention.cli.doctor import doctor as doctor_command
from fusion_attention.cli.explain import explain as explain_command
from fusion_attention.cli.mask import mask as mask_command
from fusion_attention.cli.npu import npu as npu_command
from fusion_attention.cli.ops import ops as ops_command
from fusion_attention.cli.replay import replay as replay_command
from fusion_attention.cli.verify import verify as verify_command

app = typer.Typer(
    name="fusion-attention",
    help="Ascend's fused attention operators, with the same results, on any machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _add(function: Callable[..., None]) -> None:
    """Registers a function as a subcommand with its name, and its docstring as help; paragraphs that start with \\b
    keep their line breaks."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    text = "\n\n".join(p if p.startswith("\b") else " ".join(p.split()) for p in paragraphs)
    app.command(function.__name__, help=text)(function)


for _command in (
    *(bench_command, capi_command, demo_command, doctor_command, explain_command),
    *(mask_command, npu_command, ops_command, replay_command, verify_command),
):
    _add(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fusion-attention {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Declares the options that precede a subcommand."""


def main() -> None:
    """Runs the command `fusion-attention` with the arguments of this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that a terminal cannot encode are printed as "?".
            stream.reconfigure(errors="replace")
    app()
