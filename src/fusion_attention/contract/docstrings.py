"""The docstring of a function that is made from a record: its page, as far as help() shows it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, get_origin

from fusion_attention.contract.expressions import shape_text
from fusion_attention.contract.record import Attr, Op, Param, Tensor

WIDTH = 116


def docstring(op: Op) -> str:
    """What help() says: a sentence, the formula, and sections as every public docstring here has them."""
    outputs = [p for p in op.tensors(output=True) if p.name not in op.declared]
    listed = [] if len(outputs) == 1 else [f"({', '.join(p.shown for p in outputs)})"]
    results = [f"{p.shown}: {_said(op, p)}" for p in outputs]
    trained = [op.by_name[name].shown for names in op.trains.values() for name in names if name in op.by_name]
    results += [f"Differentiable in {_either(trained, 'and')}."] if trained else []
    refused = (
        f"a call that `fusion-attention ops {op.name}` does not allow." if op.asked else "arguments that are not so."
    )
    written = " Nothing is written." if any(get_origin(t) is Annotated for t in op.declared.values()) else ""
    raised = [f"ContractError: {refused}{written}"]
    raised += ["BackendError: no back end computes it."] if op.lower else []
    sections = {
        "Args": [f"{p.shown}: {_said(op, p)}" for p in op.inputs],
        "Returns": [*([op.returns] if op.returns else listed), *results] if outputs or op.returns else [],
        "Raises": raised,
    }
    parts = [op.summary, op.spell(op.formula)]
    parts += [f"{title}:\n" + "\n".join(map(_flowed, lines)) for title, lines in sections.items() if lines]
    parts += [f"Source: {op.page}.", "Example:\n" + textwrap.indent(op.example, "    ") if op.example else ""]
    return "\n\n".join(filter(None, parts)) + "\n"


def _said(op: Op, p: Param) -> str:
    """What a record says of a parameter: its text, shape and dtypes, or its domain."""
    said = [p.text]
    if isinstance(p, Attr) and p.axis:
        said[0] = f"{p.axis}: {said[0]}"
    if isinstance(p, Attr) and p.name == op.layout_attr and len(op.layouts) > 1:
        said.append(f"{_either([repr(layout) for layout in op.layouts])}.")
    if isinstance(p, Tensor):
        shapes: dict[str, str] = {}  # each with the first layout that has it
        own = p.shape if isinstance(p.shape, Mapping) and p.form else ()
        for layout in dict.fromkeys((*op.layouts, *own)) or ("",):
            if words := p.words(layout):
                shapes.setdefault(shape_text(" ".join(words)), layout)
        several = len(shapes) > 1
        facts = [", ".join(f"{shape} ({layout})" if several else shape for shape, layout in shapes.items())]
        like = op.by_name.get(p.dtypes[1:]) if p.dtypes[:1] == "=" else None
        facts.append(f"as {like.shown}" if like else _either([word for word in p.dtypes.split() if word[0] != "="]))
        fact = "; ".join(word for word in facts if word and word not in p.text)
        said += [f"{fact[0].upper() if like else fact[0]}{fact[1:]}."] if fact else []
    elif isinstance(p, Attr) and p.domain:
        said.append(f"`{op.spell(p.domain)}`.")
    return " ".join(said)


def _either(words: Sequence[str], last: str = "or") -> str:
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _flowed(text: str) -> str:
    """An entry of a section."""
    return textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent=" " * 8, break_on_hyphens=False)
