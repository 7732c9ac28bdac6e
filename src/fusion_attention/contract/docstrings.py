"""docstring(): the docstring of a function that is made from an operator definition."""

import re
from collections.abc import Sequence
from typing import Annotated, get_origin

from fusion_attention.contract.expressions import shape_text
from fusion_attention.contract.record import Attr, Op, Param, Tensor

# A line of an entry, without its indentation. textwrap would dominate the import time.
_LINE = re.compile(r"(.{1,108})(?: |$)")


def docstring(op: Op) -> str:
    """Returns the docstring of an operator's function, made from its definition: summary, formula, Args, ..."""
    outputs = [p for p in op.tensors(output=True) if p.name not in op.declared]
    listed = [] if len(outputs) == 1 else [f"({', '.join(p.shown for p in outputs)})"]
    results = [f"{p.shown}: {_description(op, p)}" for p in outputs]
    trained = [op.by_name[name].shown for names in op.trains.values() for name in names if name in op.by_name]
    results += [f"Differentiable in {_either(trained, 'and')}."] if trained else []
    refused = (
        f"a call that `fusion-attention ops {op.name}` does not allow." if op.applicable_rules else "invalid arguments."
    )
    written = " Nothing is written." if any(get_origin(t) is Annotated for t in op.declared.values()) else ""
    raised = [f"ContractError: {refused}{written}"]
    raised += ["BackendError: no back end computes the call."] if op.lower else []
    sections = {
        "Args": [f"{p.shown}: {_description(op, p)}" for p in op.inputs],
        "Returns": [*([op.returns] if op.returns else listed), *results] if outputs or op.returns else [],
        "Raises": raised,
    }
    parts = [op.summary, op.spell(op.formula)]
    for title, entries in sections.items():
        wrapped = ("    " + "\n        ".join(_LINE.findall(entry)) for entry in entries)
        parts += [f"{title}:\n" + "\n".join(wrapped)] if entries else []
    parts += [f"Source: {op.page}.", "Example:\n    " + op.example.replace("\n", "\n    ") if op.example else ""]
    return "\n\n".join(filter(None, parts)) + "\n"


def _description(op: Op, p: Param) -> str:
    """Returns the text that describes a parameter in a docstring: its description, shape and dtypes, or its domain."""
    sentences = [p.text]
    if isinstance(p, Attr) and p.axis:
        sentences[0] = f"{p.axis}: {sentences[0]}"
    if isinstance(p, Attr) and p.name == op.layout_attr and len(op.layouts) > 1:
        sentences.append(f"{_either([repr(layout) for layout in op.layouts])}.")
    if isinstance(p, Tensor):
        facts = [_shapes(op, p)]
        like = op.by_name.get(p.dtypes[1:]) if p.dtypes[:1] == "=" else None
        facts.append(_either([word for word in p.dtypes.split() if word[0] != "="]))
        if like and f"as {like.shown}" not in p.text:
            facts.append(f"in {like.shown}'s dtype" if facts[0] else f"In {like.shown}'s dtype")
        fact = "; ".join(word for word in facts if word and word not in p.text)
        sentences += [f"{fact}."] if fact else []
    elif isinstance(p, Attr) and p.domain:
        sentences.append(f"`{op.spell(p.domain)}`.")
    return " ".join(sentences)


def _shapes(op: Op, p: Tensor) -> str:
    """Returns a tensor parameter's shapes as text, "[B, S1, H] (BSH), ...", each with the first layout that has it."""
    if isinstance(p.shape, str):
        return shape_text(p.shape) if p.shape else ""
    shapes: dict[str, str] = {}
    for layout in p.shape if p.form else op.layouts:
        if layout in p.shape:
            shapes.setdefault(p.shape[layout], layout)
    several = len(shapes) > 1
    return ", ".join(shape_text(shape) + (f" ({layout})" if several else "") for shape, layout in shapes.items())


def _either(words: Sequence[str], last: str = "or") -> str:
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
