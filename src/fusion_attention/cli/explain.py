"""`fusion-attention explain`: prints why a call is refused, here or on the chip."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fusion_attention.cli.output import refuse, show_json

if TYPE_CHECKING:
    from rich.console import Console

    from fusion_attention.refusals.explanation import Explanation

COMMAND, LONGEST = "explain", 4 << 20
_HEADINGS = {
    "everywhere": ("bold red", "broken"),
    "chip": ("bold yellow", "on the chip"),
    "warning": ("yellow", "doubtful"),
    "likely": ("bold yellow", "likely"),
}


def explain(
    text: str = typer.Argument(
        ...,
        metavar="TEXT",
        show_default=False,
        help="A call as Python text, the text that CANN printed when a call failed, a file with one of these, or a "
        "saved call (.safetensors). A single - reads from standard input.",
    ),
    log: str = typer.Option("", metavar="TEXT|FILE", help="The text that CANN printed when the call in TEXT failed."),
    as_json: bool = typer.Option(False, "--json", help="Print the answer as JSON."),
) -> None:
    """Print the rules that a call violates, and how to fix it.

    The command needs neither tensors nor the chip: shapes and dtypes are enough. The text is parsed, never executed. A
    tensor is written as dtype and shape, q=bf16[2,1024,8,64], or by torch's functions in lines before the call. If a
    call failed on the chip, the text that CANN printed (error code 161002, 561002, 361001, ...) is enough, but the call
    with this text as --log gives a more precise answer.

    \b
    fusion-attention explain 'fa.attention(f16[2,5,8,64], ...)'
    fusion-attention explain call.py --log failed.log
    fusion-attention explain failed.log
    fusion-attention explain calls/0003-npu_fusion_attention.safetensors

    Exit code: 0 for a legal call, 1 if a rule is violated, 2 if the text cannot be read.
    """
    from rich.console import Console

    from fusion_attention.refusals.explanation import explain as explained

    try:
        path = _file(text)
        if path is not None and path.suffix == ".safetensors":
            result = _captured(path, log)
        else:
            result = explained(_words(text), log=_words(log))
    except (ValueError, OSError) as error:
        refuse(COMMAND, error)
    if as_json:
        show_json(result.as_dict())
    else:
        _show(result, Console())
    raise typer.Exit(1 if result.broken else 0)


def _file(text: str) -> Path | None:
    """Returns the path of the file that a text names; None if the text is not a path."""
    if not text or len(text) > 4096 or "\n" in text or "\0" in text:
        return None
    try:
        path = Path(text)
        if path.is_file():
            return path
        if path.is_dir():
            raise ValueError(f"{path} is a folder: pass one of its files")
    except OSError:
        return None
    if path.suffix in (".safetensors", ".py", ".log", ".txt") and "(" not in text:
        raise ValueError(f"there is no file {text}")
    return None


def _words(text: str) -> str:
    """Returns the text itself, the content of the file that it names, or of standard input for "-"."""
    if text == "-":
        return sys.stdin.read(LONGEST + 1)
    path = _file(text)
    if path is None:
        return text
    with path.open("rb") as file:
        data = file.read(LONGEST + 1)
    if len(data) > LONGEST:
        raise ValueError(f"{path} has more than {LONGEST} bytes: pass only the lines of the call")
    return data.decode(errors="replace")


def _captured(path: Path, log: str) -> Explanation:
    import torch

    from fusion_attention.captures.reader import read
    from fusion_attention.refusals.cann_logs import read_log
    from fusion_attention.refusals.explanation import explain_arguments

    recorded = read(path, torch.device("cpu"))
    op, args = recorded.op, recorded.args
    return explain_arguments(op, args, read_log(_words(log)) if log else None)


def _show(explanation: Explanation, console: Console) -> None:
    from rich.text import Text

    from fusion_attention.refusals.cann_logs import CODES
    from fusion_attention.refusals.fixes import shortened

    def line(text: str, style: str = "", indent: int = 0) -> None:
        console.print(Text(" " * indent + text, style), soft_wrap=True)

    line(f"{explanation.operator}: {explanation.summary}" if explanation.operator else "no operator", "bold")
    line(explanation.verdict + ("" if explanation.verdict.endswith(".") else "."))
    if explanation.log is not None:
        for reason in explanation.log.reasons:
            line(f"CANN printed: {reason}", "dim")
    for finding in explanation.findings:
        style, heading = _HEADINGS[finding.where]
        code = f" [{finding.code} {CODES[finding.code][0]}]" if finding.code in CODES else ""
        line("")
        line(f"{heading}{code}", style)
        line(finding.sentence, "", 2)
        if finding.fix:
            line(finding.fix, "green", 2)
    if explanation.fixes:
        line("")
        line("changes that make it legal (each was checked)", "bold green")
        for fix in explanation.fixes:
            line(fix, "", 2)
    if explanation.results:
        line("")
        sizes = {n: shortened(v) if isinstance(v, list) else v for n, v in explanation.sizes.items()}
        line("read as      " + ", ".join(f"{name} {value}" for name, value in sizes.items()))
        line("results      " + ", ".join(f"{name} {shape}" for name, shape in explanation.results.items()))
        line("computed by  " + ", ".join(f"{name}: {why}" for name, why in explanation.computes.items()))
        if explanation.unread:
            line(f"not checked  the content of {', '.join(explanation.unread)}, which only a saved call has")
    if explanation.operator:
        line("")
        line(f"All rules: fusion-attention ops {explanation.operator}", "dim")
