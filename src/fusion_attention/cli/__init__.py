"""The command `fusion-attention`: its subcommands by name.

A command's module loads torch, and what needs it, when the command runs.
"""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Callable

import typer

from fusion_attention import __version__

# Under other names: the modules of these names stay reachable as attributes of the package.
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
    help="Ascend's fused attention operators, with the same meaning, on any machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _add(name: str, function: Callable[..., None]) -> None:
    """A subcommand whose help flows: paragraphs fill the screen, but those behind a line of \\b."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    text = "\n\n".join(p if p.startswith("\b") else " ".join(p.split()) for p in paragraphs)
    app.command(name, help=text)(function)


_add("bench", bench_command)
_add("capi", capi_command)
_add("demo", demo_command)
_add("doctor", doctor_command)
_add("explain", explain_command)
_add("mask", mask_command)
_add("npu", npu_command)
_add("ops", ops_command)
_add("replay", replay_command)
_add("verify", verify_command)


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
