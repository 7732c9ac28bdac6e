"""Makes reports of judgements: a table for a terminal, and an HTML file, both with pictures of the errors."""

import html
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fusion_attention.judging.error_heatmap import figure, text
from fusion_attention.judging.verdict import NOISY, RIGHT, Judgement, Opinion, times

_STYLE = {RIGHT: "bold green", NOISY: "bold yellow"}


def table(judgement: Judgement) -> RenderableType:
    """Returns a table of a verdict's outputs, pictures of wrong outputs, the back ends' errors and explanations."""
    title = Text.assemble(
        (f"{judgement.source or judgement.operator}  ", "bold"),
        (judgement.verdict, _STYLE.get(judgement.verdict, "bold red")),
    )
    grid = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    grid.add_column("output", no_wrap=True)
    grid.add_column(judgement.standard)
    for name in ("RMS", "largest", "of expected", "worst tile"):
        grid.add_column(name, justify="right", no_wrap=True)
    for o in judgement.outputs.values():
        word = Text("right", "green") if o.passes else Text("wrong", "bold red")
        numbers = (f"{o.rms:.2g}", f"{o.largest:.2g}", times(o.z), times(o.z_tile))
        grid.add_row(o.name, word, *numbers)
    lines: list[RenderableType] = []
    for o in judgement.outputs.values():
        lines += [Text(f"  {o.name}: {line}") for line in (_figures(o),) if line]
        lines += [text(name, surface) for name, surface in judgement.drawn.items() if name == o.name]
    lines += [] if judgement.mask is None else map(Text, judgement.mask.lines())
    lines += [Text(f"  {name}: not judged: {why}") for name, why in judgement.unjudged.items()]
    notes = (Text(f"  note: {note}", "yellow") for note in judgement.notes)
    return Group(grid, *notes, *lines, *(Text(line) for line in _below(judgement)), Text(""))


def _figures(o: Opinion) -> str:
    """Returns the location and size of an output's error; of a correct output, its precision in words."""
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
    return lines


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
        lines += [f"  {word} {m}", f"    {m.fix}", f"    {left}{outputs_named}"]
    return lines


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
.axes {{ display: grid; grid-template-columns: auto auto; gap: .25rem .5rem; font-size: 85%; }}
.down, .across {{ display: flex; justify-content: space-between; }} .down {{ flex-direction: column; }}
.across {{ grid-column: 2; }}
figcaption {{ font-size: 85%; }} section {{ margin-bottom: 3rem; }}
</style>
<h1>fusion-attention verify</h1>
<p>{summary}</p>
{sections}
</html>
"""


_RIGHT, _WRONG = (f"<td class='{word}'>{word}</td>" for word in ("right", "wrong"))


def page(judgements: Sequence[Judgement]) -> str:
    """Returns the verdicts on calls as one self-contained HTML file without scripts."""
    right = sum(j.passes for j in judgements)
    summary = f"{right} of {len(judgements)} calls are right."
    return _PAGE.format(summary=summary, sections="\n".join(map(_section, judgements)))


def _section(judgement: Judgement) -> str:
    rows = [
        f"<tr><td>{_e(o.name)}</td>{_RIGHT if o.passes else _WRONG}"
        + "".join(f"<td>{_e(v)}</td>" for v in (f"{o.rms:.2g}", f"{o.largest:.2g}", times(o.z), times(o.z_tile)))
        + f"<td>{_e(_figures(o))}{_worst(o.worst)}</td></tr>"
        for o in judgement.outputs.values()
    ]
    names = ("output", judgement.standard, "RMS", "largest", "of expected", "worst tile", "where")
    head = "".join(f"<th>{_e(h)}</th>" for h in names)
    notes = "".join(f"<p>note: {_e(note)}</p>" for note in judgement.notes)
    reasons = "".join(f"<p>{_e(line.strip())}</p>" for line in _below(judgement))
    drawn = [(o.name, o.surface) for o in judgement.outputs.values() if o.surface is not None]
    # Of an output at most four sequences are drawn, wrong ones first.
    pictures = "".join(figure(name, surface, b) for name, surface in drawn for b in surface.order()[:4])
    return (
        f"<section><h2>{_e(judgement.source or judgement.operator)}: "
        f"<span class='{judgement.verdict}'>{judgement.verdict}</span></h2>"
        f"<p>{_e(judgement.operator)}</p>{notes}<div class='scroll'><table><tr>{head}</tr>{''.join(rows)}</table></div>"
        f"{reasons}{pictures}{judgement.mask_in_html()}</section>"
    )


def _worst(worst: tuple[Any, ...] | None) -> str:
    if worst is None:
        return ""
    b, head, row, element, ours, golden, size = worst
    place = f"worst: sequence {b}, head {head}, row {row}, element {element}"
    return f"<br>{_e(f'{place}: {ours:.6g}, golden {golden:.6g}, expected error {size:.2g}')}"


def _e(text: str) -> str:
    return html.escape(text, quote=True)
