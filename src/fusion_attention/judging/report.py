"""Reports of judgements: a table for a terminal, and an HTML file with pictures of the errors."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fusion_attention.judging.error_bound import LEAST
from fusion_attention.judging.verdict import NOISY, RIGHT, Judgement, Opinion, times

_STYLE = {RIGHT: "bold green", NOISY: "bold yellow"}


def table(judgement: Judgement) -> RenderableType:
    """Makes a table of a call's outputs, back ends and explanations."""
    title = Text.assemble(
        (f"{judgement.source or judgement.operator}  ", "bold"), (judgement.verdict, _style(judgement.verdict))
    )
    grid = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    grid.add_column("output", no_wrap=True)
    grid.add_column(judgement.standard)
    for name in ("RMS", "largest", "of expected", "worst tile"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("where", ratio=1)
    for o in judgement.outputs.values():
        word = Text("right", "green") if o.passes else Text("wrong", "bold red")
        numbers = (f"{o.rms:.2g}", f"{o.largest:.2g}", times(o.z), times(o.z_tile))
        grid.add_row(o.name, word, *numbers, _figures(o))
    for name, why in judgement.unjudged.items():
        grid.add_row(name, Text("not judged", "dim"), "", "", "", "", why)
    return Group(grid, *(Text(line) for line in _below(judgement)), Text(""))


def _figures(o: Opinion) -> str:
    """Returns the location and size of an error; for a correct output its grade."""
    if o.passes:
        return o.grade if o.judged.standard == "error-bound" else ""
    return "; ".join((*o.where, o.judged.reason))


def _below(judgement: Judgement) -> list[str]:
    lines = _reasons(judgement) if judgement.searched and not judgement.passes else []
    for name, opinion in judgement.backends.items():
        if isinstance(opinion, str):
            lines.append(f"  {name} here: {opinion}")
        else:
            lines.append(f"  {name} here: " + ", ".join(f"{n} {times(t)}" for n, t in opinion.items()) + " of expected")
    return lines + [f"  note: {note}" for note in judgement.notes]


def _reasons(judgement: Judgement) -> list[str]:
    if judgement.verdict == NOISY:
        return ["  noisy: as exact as a program that sums in 16 bits; no mistake of meaning"]
    if not judgement.mistakes:
        return ["  no known mistake explains it"]
    lines = []
    for rank, m in enumerate(judgement.mistakes):
        before = any(m.outputs == other.outputs for other in judgement.mistakes[:rank])
        word = "or equally by" if before else "explained by"
        outputs_named = "" if set(m.outputs) == set(judgement.failing()) else f" [{', '.join(m.outputs)} alone]"
        left = "but for noise" if m.noisy else f"leaves {times(m.error)} of what is expected"
        lines += [f"  {word} {m}", f"    {left}{outputs_named}; {m.fix}"]
    return lines


def _style(verdict: str) -> str:
    return _STYLE.get(verdict, "bold red")


# --------------------------------------------------------------------------------------------------------------- HTML

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>fusion-attention verify</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .25rem .75rem; text-align: left; vertical-align: top; }}
tr + tr {{ border-top: 1px solid #8884; }} .right {{ color: #2a9d4a; }}
.wrong {{ color: #d33; }} .noisy {{ color: #c80; }}
td:last-child {{ min-width: 16rem; }}
.scroll {{ overflow-x: auto; }} figure {{ display: inline-block; margin: .5rem 1rem .5rem 0; }}
img {{ image-rendering: pixelated; width: 20rem; height: 12rem; border: 1px solid #8886; }}
figcaption {{ font-size: 85%; }} section {{ margin-bottom: 3rem; }}
</style>
<h1>fusion-attention verify</h1>
<p>{summary}</p>
{sections}
</html>
"""


def page(judgements: Sequence[Judgement]) -> str:
    """Returns all calls as one self-contained HTML file without scripts."""
    right = sum(j.passes for j in judgements)
    summary = f"{right} of {len(judgements)} calls are right."
    return _PAGE.format(summary=summary, sections="\n".join(map(_section, judgements)))


def _section(judgement: Judgement) -> str:
    rows = [
        f"<tr><td>{_e(o.name)}</td><td class='{_word(o.passes)}'>{_word(o.passes)}</td>"
        + "".join(f"<td>{_e(v)}</td>" for v in (f"{o.rms:.2g}", f"{o.largest:.2g}", times(o.z), times(o.z_tile)))
        + f"<td>{_e(_figures(o))}{_worst(o.worst)}</td></tr>"
        for o in judgement.outputs.values()
    ]
    names = ("output", judgement.standard, "RMS", "largest", "of expected", "worst tile", "where")
    head = "".join(f"<th>{_e(h)}</th>" for h in names)
    reasons = "".join(f"<p>{_e(line.strip())}</p>" for line in _below(judgement))
    pictures = "".join(_picture(o, b) for o in judgement.outputs.values() if o.map is not None for b in _shown(o))
    return (
        f"<section><h2>{_e(judgement.source or judgement.operator)}: "
        f"<span class='{judgement.verdict}'>{judgement.verdict}</span></h2>"
        f"<p>{_e(judgement.operator)}</p><div class='scroll'><table><tr>{head}</tr>{''.join(rows)}</table></div>"
        f"{reasons}{pictures}</section>"
    )


def _word(passes: bool) -> str:
    return "right" if passes else "wrong"


def _shown(o: Any) -> list[int]:
    """Returns the sequences to draw: at most four, wrong ones first."""
    order = sorted(range(len(o.map.off)), key=lambda b: (not bool((o.map.off[b] > 1).any()), b))
    return [b for b in order if o.map.off[b].numel()][:4]


def _worst(worst: tuple[Any, ...] | None) -> str:
    if worst is None:
        return ""
    b, head, row, element, ours, golden, size = worst
    place = f"worst: sequence {b}, head {head}, row {row}, element {element}"
    return f"<br>{_e(f'{place}: {ours:.6g}, golden {golden:.6g}, expected error {size:.2g}')}"


def _picture(o: Any, b: int) -> str:
    off = o.map.picture(b)
    heads, rows = o.map.off[b].shape
    data = base64.b64encode(png(off)).decode()
    most = float(o.map.off[b].max())
    scale = f"; red is off the most, {times(LEAST * most)} the expected error" if most > 1 else ""
    text = f"{o.name}, sequence {b}: {heads} heads down, {rows} {o.map.word} across{scale}"
    return (
        f"<figure><img alt='{_e(text)}' src='data:image/png;base64,{data}'><figcaption>{_e(text)}</figcaption></figure>"
    )


def png(off: torch.Tensor) -> bytes:
    """Draws the errors of rows as a PNG: green if correct, yellow to red by the logarithm of the error."""
    wrong = off > 1
    finite = off[wrong & off.isfinite()]
    most = float(finite.max().log10()) if len(finite) else 1.0
    least = float(finite.min().log10()) if len(finite) else 0.0
    level = ((off.clamp(min=1e-3).log10() - least) / max(most - least, 1e-6)).clamp(-1, 1).nan_to_num(nan=1.0)
    red = torch.where(wrong, torch.full_like(level, 220), torch.full_like(level, 60))
    green = torch.where(wrong, 200 * (1 - level), torch.full_like(level, 150))
    blue = torch.where(wrong, torch.full_like(level, 40), torch.full_like(level, 80))
    pixels = torch.stack((red, green, blue), -1).clamp(0, 255).byte()
    height, width = off.shape
    raw = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def _e(text: str) -> str:
    return html.escape(text, quote=True)
