"""Generates the tables and picture of docs/ascend_code.md from the library: functions, call counts, command output."""

import inspect
from pathlib import Path

from typer.testing import CliRunner

from fusion_attention.cli import app, docstring_markdown
from fusion_attention.cli.op_pages import another, groups
from fusion_attention.npu.surface.modules import functions
from fusion_attention.ops.auxiliary_definitions.definitions import AUXILIARY, CONTRACTS
from website.ascend_call_counts import ALL_CALLS, EVERYWHERE
from website.svg import Picture

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 8  # calls; what has fewer is summed up


def table() -> str:
    """Formats the supported functions of torch_npu by family, each with one sentence."""
    functions_here = functions()
    families = groups(sorted(name for name in functions_here if name.startswith("npu_")))
    families["Beside them"] = sorted(set(functions_here) - {name for names in families.values() for name in names})
    lines: list[str] = []
    for title, names in families.items():
        head = title.removeprefix("torch_npu: ").capitalize()
        lines += [f"| {head} | what it computes | computed by |", "|---|---|---|"]
        lines += [_row(name, functions_here[name]) for name in names]
        lines.append("")
    return "\n".join(lines)


def _row(name: str, function: object) -> str:
    record = CONTRACTS.get(name)
    first = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
    summary = record.summary if record else docstring_markdown.prose(first, "")
    text = summary.removeprefix("torch_npu's ").replace("|", r"\|").replace("\n", " ")
    text = text if text.startswith("npu_") else text[:1].upper() + text[1:]
    link = f"[`{name}`](ops/{name}.md)" if record else f"`{name}`"
    core = record is not None and (name not in AUXILIARY or another(name))
    return f"| {link} | {text} | {'the core' if core else 'torch'} |"


def coverage() -> str:
    """Returns the output of `fusion-attention npu --coverage` for the example's folder."""
    arguments = ["npu", "--coverage", str(ROOT / "examples" / "ascend")]
    ran = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"}, catch_exceptions=False)
    return f"```text\n{ran.output.rstrip()}\n```\n"


def calls(tall: bool = False) -> Picture:
    """Draws the most called functions of torch_npu and marks the supported ones; tall: for a small screen."""
    functions_here = set(functions())
    rows = [(names.split(), count) for names, count in EVERYWHERE if count >= SHOWN]
    rows.sort(key=lambda row: -row[1])
    answered = sum(count for names, count in EVERYWHERE if set(names.split()) <= functions_here)
    step, left, edge, scale = (44, 6, 4, 2.6) if tall else (24, 296, 24, 4.2)
    picture = Picture(
        420 if tall else 860, 104 + step * len(rows), "What programs for the chip call, and what is here"
    )  # fmt: skip
    picture.text(edge, 34, "What programs for the chip call", size=18, bold=True)
    caption = f"{ALL_CALLS} calls in thirteen public repositories; {answered / ALL_CALLS:.0%} are answered"
    picture.note(edge, 56, caption)
    for place, (names, count) in enumerate(rows):
        y, here = 76 + step * place, set(names) <= functions_here
        words = names[0] + (f" + {len(names) - 1}" if len(names) > 1 else "")
        if tall:
            picture.text(left, y + 12, words, size=13, mono=True)
        else:
            picture.text(left - 10, y + 13, words, size=12.5, anchor="end", mono=True)
        top = y + 18 if tall else y
        picture.rect(left, top, count * scale, 17, "b" if here else "d2", r=2)
        note = str(count) if here else f"{count}, not here"
        picture.text(left + count * scale + 7, top + 13, note, size=12.5, fill="ink" if here else "d")
    return picture
