"""Markdown pages of operators, made from their definitions: formula, parameters, shapes, rules by level, source."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fusion_attention.contract.expressions import shape_text
from fusion_attention.contract.record import INVALID, LEVELS, REQUIRED, Attr, Op, Param, Rule, Tensor, Tensors

TITLES = {
    "meaning": "Rules (always an error)",
    "limit": "Limits of the chip (an error when strict)",
    "content": "Rules on tensor content (on request)",
    "doubt": "Doubts (a warning; an error when strict)",
    "note": "Notes (a warning)",
}
AXES = {
    "B": "sequences",
    "S1": "query tokens",
    "S2": "key tokens",
    "S": "tokens of a sequence, or slots of its cache",
    "T1": "query tokens of all sequences",
    "T2": "key tokens of all sequences",
    "N1": "query heads",
    "N2": "key heads",
    "D": "elements per row of query and key",
    "Dv": "elements per row of value",
    "Dr": "elements per row of rope",
    "Ni": "heads of the indexer",
    "Di": "elements per row of the indexer",
    "L": "1 where it is asked for",
    "X": "query rows of a block",
    "Y": "keys of a block",
    "G": "query heads that share a key head",
    "K": "entries of a row's list",
    "Kv": "values of a row's list",
    "P": "pages",
    "Ps": "tokens of a page",
    "R": "rows of a page table, one per sequence",
    "M": "pages of a sequence",
    "S3": "compressed keys of a sequence",
    "T3": "compressed keys of all sequences",
    "Pc": "pages of compressed keys",
    "Pcs": "compressed keys of a page",
    "Pk": "elements of a row of the target",
    "Mc": "pages of a sequence's compressed keys",
    "Nl": "lists of a row",
    "Ko": "keys of a row's list",
    "Kc": "entries of a row's list, or compressed keys",
    "T": "tokens",
    "H": "elements of a token's row",
    "E": "experts",
    "C": "rows of an expert",
    "Cq": "elements of a query's latent",
    "Ckv": "elements of a key's latent",
    "W": "elements of a row",
    "N": "columns of a product",
    "Nw": "windows of a sequence",
    "Tw": "windows of all sequences",
    "Rw": "rows that a window pools",
    "Pw": "tokens of a window",
    "Cw": "channels of the projections",
    "pages": "as many as an item has",
}
# Shapes and expressions, which may contain axis words.
_SYMBOLS = re.compile(r"\[[^]`]*\]|`[^`]*`")
# The suffix of versions after the first one.
_VERSION = re.compile(r"_?[vV](\d+)$")
# Marks the text of a rule on dtypes.
_DTYPE = re.compile(r"\b(b?float16|float32|u?int8|dtype)\b")


@dataclass(frozen=True)
class Shown:
    """The sections of an operator's documentation page that are not made from its definition, as Markdown texts.

    Args:
        call: the function's signature. text: its docstring. example: a program. support: a table of back ends.
    """

    call: str = ""
    text: str = ""
    example: str = ""
    support: str = ""

    def lines(self) -> list[str]:
        """Returns the Markdown lines of all non-empty sections, with headings."""
        code = {"Call": "pyi", "Example": "python"}
        results = []
        for title, text in (("Call", self.call), ("", self.text), ("Example", self.example), ("Support", self.support)):
            if text:
                results += [f"## {title}", ""] if title else []
                results += [f"```{code[title]}", text, "```", ""] if title in code else [text, ""]
        return results


def render(op: Op, shown: Shown | None = None, *, tex: bool = False) -> str:
    """Returns an operator's documentation page as Markdown, with the sections `shown`; tex: formula in TeX."""
    lines = [f"# {op.name}", "", op.summary, ""]
    if tex and op.tex:
        lines += ["$$", op.tex, "$$", ""]
    elif op.formula:
        lines += ["```text", op.formula, "```", ""]
    lines += shown.lines() if shown else []
    titles = ("name", "CANN") if op.cann else ("name",)
    lines += ["## Parameters", "", *_table(*titles, "kind", "dtype", "shape or default", "meaning")]
    rows = [_row(op, p) for p in op.params]
    lines += rows
    if op.cann:
        lines += ["", f"CANN's names are those of {op.prototype.source}."]
    tables = _shapes(op) + _rules(op)
    lines += _axes("\n".join(rows + tables)) + tables
    if op.rulings:
        numbers = ", ".join(map(str, sorted(set(op.rulings))))
        lines += ["", f"Where the source is silent: [rulings](../rulings.md) {numbers}."]
    return "\n".join([*lines, "", f"Source: {op.page}.", ""])


def versions(records: Iterable[Op]) -> str:
    """Returns the documentation page, in Markdown, that compares the parameters and layouts of each operator's
    versions; records: all operator definitions."""
    named: dict[str, list[Op]] = {}
    for op in records:
        named.setdefault(_VERSION.sub("", op.name), []).append(op)
    lines = ["# Versions", "", "The parameters and layouts of each version, generated from the operator definitions."]
    for base, result in sorted(named.items()):
        if len(result) > 1:
            lines += ["", f"## {base}", "", *_versions(result)]
    return "\n".join([*lines, ""])


def _versions(ops: list[Op]) -> list[str]:
    """Returns lines of a Markdown table: a row per parameter and layout, a column for each version of an operator."""
    parameters = dict.fromkeys(name for op in (ops[-1], *ops) for name in op.names)
    layouts = dict.fromkeys(name for op in ops for name in op.layouts)
    numbers = [result[1] if (result := _VERSION.search(op.name)) else "1" for op in ops]
    lines = _table("", *(f"[V{number}]({op.name}.md)" for number, op in zip(numbers, ops, strict=True)))
    for name in parameters:
        spelled = [f"`{op.by_name[name].shown}`" if name in op.by_name else "" for op in ops]
        title = next(filter(None, reversed(spelled)))
        lines.append(_line(title, *("yes" if cell == title else cell for cell in spelled)))
    for name in layouts if len(layouts) > 1 else ():
        lines.append(_line(f"layout {name}", *("yes" if name in op.layouts else "" for op in ops)))
    return lines


def _rules(op: Op) -> list[str]:
    """Returns Markdown lines of the tables of an operator's rules, one table per level ("meaning", "limit", ...)."""
    lines = []
    for level in LEVELS:
        rules = [r for r in op.applicable_rules if r.level == level]
        if rules:
            lines += ["", f"## {TITLES[level]}", ""]
            lines += _table("parameter", "expected", "when", "code", "why, or what to do")
            lines += [_rule_row(op, r) for r in rules]
    return lines


def _axes(text: str) -> list[str]:
    """Returns Markdown lines that explain the axis words ("B", "S1", ...) in a page's text; [] if it has none."""
    words = {word for symbols in _SYMBOLS.findall(text) for word in re.findall(r"\w+", symbols)}
    axes = [f"{axis} {text}" for axis, text in AXES.items() if axis in words]
    return ["", f"Axes: {', '.join(axes)}."] if axes else []


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(*titles: str) -> list[str]:
    return [_line(*titles), "|---" * len(titles) + "|"]


def _row(op: Op, p: Param) -> str:
    kind, dtype, shape = "integers", "int64", ""
    if isinstance(p, Tensor):
        kind = "output" if p.output else "tensors" if isinstance(p, Tensors) else "tensor"
        dtype = f"as `{op.by_name[p.dtypes[1:]].shown}`" if p.dtypes.startswith("=") else p.dtypes.replace(" ", ", ")
        shapes = _by_layout(op, p)
        shape = shape_text(shapes[0]) if len(set(shapes)) == 1 else "by layout"
        judged = (
            "by the rules" if any(r.param == p.name and r.level == "meaning" for r in op.applicable_rules) else "any"
        )
        shape, dtype = shape if any(shapes) else judged, dtype or judged
        # Dtypes of strict calls are listed after those of other calls.
        limits = (r for r in op.applicable_rules if r.level == "limit" and r.code == INVALID and r.param == p.name)
        narrower = [r.expected for r in limits if _DTYPE.search(r.expected)]
        dtype = "; strict: ".join([dtype, *map(op.spell, narrower)])
    elif isinstance(p, Attr):
        kind, dtype = "attribute", p.type.__name__
        shape = "required" if p.default is REQUIRED else f"`{p.default!r}`"
    if p.optional:
        kind += ", optional"
    domain = f" `{op.spell(p.domain)}`" if isinstance(p, Attr) and p.domain else ""
    names = (f"`{p.shown}`", f"`{op.cann[p.shown]}`") if op.cann else (f"`{p.shown}`",)
    return _line(*names, kind, dtype, shape, p.text + domain)


def _by_layout(op: Op, p: Tensor) -> list[str]:
    return [" ".join(p.words(layout)) for layout in op.layouts or ("",)]


def _shapes(op: Op) -> list[str]:
    """Returns Markdown lines of a table of the tensors' shapes by layout; parameters with equal shapes share a row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for p in op.params:
        if isinstance(p, Tensor) and any(shapes := _by_layout(op, p)):
            groups.setdefault(tuple(shapes), []).append(f"`{p.shown}`")
    lines = []
    if len(op.layouts) > 1:
        layout = op.by_name[op.layout_attr].shown
        lines += ["", "## Shapes by layout", "", *_table(f"`{layout}`", *op.layouts)]
        several = {shapes: names for shapes, names in groups.items() if len(set(shapes)) > 1}
        lines += [_line(", ".join(names), *map(shape_text, shapes)) for shapes, names in several.items()]
    elif op.layouts:
        lines += ["", f"Layout: `{op.layouts[0]}` only."]
    single_shapes: dict[str, list[str]] = {}  # layout of a tensor with a layout attribute of its own -> shapes
    for p in op.params:
        if isinstance(p, Tensor) and p.form and not isinstance(p.shape, str):
            for layout in [layout for layout in p.shape if layout not in op.layouts]:  # in the definition's order
                single_shapes.setdefault(layout, []).append(f"`{p.shown}` {shape_text(p.shape[layout])}")
    lines += [
        line for layout, result in single_shapes.items() for line in ("", f"In layout {layout}: {', '.join(result)}.")
    ]
    return lines


def _rule_row(op: Op, r: Rule) -> str:
    when = [f"`{op.spell(r.when)}`"] if r.when not in ("", f"{r.param} is not None") else []
    only = [name for name in op.layouts if name in r.only]
    when += ["layout " + ", ".join(only)] if only and len(only) < len(op.layouts) else []
    expected = op.spell(r.expected)
    expected = f"`{expected}`" if r.expected == r.check else expected
    return _line(f"`{op.by_name[r.param].shown}`", expected, "; ".join(when), str(r.code), op.spell(r.advice))
