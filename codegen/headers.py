"""C declarations of the operators, from their definitions: aclnnop/*.h.

A header declares two functions of every operator, with CANN's names and C types. The build makes their C definitions
from the headers (c_definitions.py). The last consecutive tensor parameters are those that an operator writes.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from textwrap import fill, wrap

from fusion_attention.contract import Attr, Op, Param, Prototype, Tensor, Tensors

PHASE_1 = "GetWorkspaceSize"
_NUMBERS = {int: "int64_t ", float: "double ", bool: "bool ", str: "char *"}
_WRITTEN = "Generated from the operator definitions by `python -m codegen`."
_TAIL = ["uint64_t *workspaceSize", "aclOpExecutor **executor"]
_RUN = ["void *workspace", "uint64_t workspaceSize", "aclOpExecutor *executor", "const aclrtStream stream"]


def c_type(p: Param, name: str, prototype: Prototype) -> str:
    """Returns the C type of a parameter, followed by a space or an asterisk; name: CANN's name of the parameter.

    Example:
        >>> c_type(Attr("num_heads", "", type=int), "headNum", Prototype(("headNum",), ""))
        'int64_t '
    """
    if isinstance(p, Attr):
        return _NUMBERS[p.type]
    if isinstance(p, Tensors):
        return "const aclTensorList *"
    return "const aclTensor *" if isinstance(p, Tensor) or name in prototype.tensors else "const aclIntArray *"


def parameters(op: Op) -> list[tuple[str, str]]:
    """Returns (C type, CANN's name) of every parameter, in order."""
    prototype = op.prototype
    return [(c_type(p, name, prototype), name) for p, name in zip(op.params, prototype.names, strict=True)]


def by_header(records: Mapping[str, Op]) -> dict[str, list[Op]]:
    """Returns the operators that are CANN's functions by their header, both sorted by name."""
    results: dict[str, list[Op]] = {}
    for name, op in sorted(records.items()):
        if name.startswith("aclnn"):
            results.setdefault(op.prototype.header, []).append(op)
    return dict(sorted(results.items()))


def header(ops: Iterable[Op], explained: dict[str, tuple[str, str]], name: str) -> str:
    """Returns the text of the header `name`; explained: by parameter its text, and the header with this text."""
    functions = "\n".join(
        f"{_comment(op, explained, name)}\n{_declaration(op, True)};\n{_declaration(op, False)};\n" for op in ops
    )
    return f'/* {_WRITTEN} */\n#pragma once\n#include "aclnn/aclnn_base.h"\n\n{functions}'


def _comment(op: Op, explained: dict[str, tuple[str, str]], home: str) -> str:
    """Returns a C comment with the texts of an operator and of its parameters, except those in `explained`."""
    lines, others = [fill(op.summary, 116, initial_indent="/* ", subsequent_indent=" * ")], set()
    for p, name in zip(op.params, op.prototype.names, strict=True):
        text = f"{name}: {p.text}{' Null: absent.' if p.optional else ''}".replace("*/", "* /")
        if name not in explained or explained[name][0] != text:
            lines.append(fill(text, 116, initial_indent=" *   ", subsequent_indent=" *       "))
            explained[name] = text, home
        others |= {explained[name][1]} - {home}
    if others:
        text = f"The other parameters are explained in {', '.join(sorted(others))}."
        lines.append(fill(text, 116, initial_indent=" * ", subsequent_indent=" * "))
    return "\n".join(lines) + " */"


def _declaration(op: Op, first: bool) -> str:
    words = [kind + name for kind, name in parameters(op)] + _TAIL if first else _RUN
    return f"ACLNN_FUNCTION aclnnStatus {op.name}{PHASE_1 if first else ''}(\n{_flow(words)})"


def _flow(words: Iterable[str]) -> str:
    """The words, separated by commas, in indented lines of at most 120 columns."""
    joined = ", ".join(word.replace(" ", "\0") for word in words)  # A line does not end inside a word with spaces.
    lines = wrap(joined, 113, break_long_words=False, break_on_hyphens=False)  # Indentation and ");" follow.
    return "\n".join("    " + line for line in lines).replace("\0", " ")


def files(records: Mapping[str, Op]) -> dict[str, str]:
    """Returns every generated header by its path below the folder of headers."""
    results = {}
    # Headers of an operator's versions explain a parameter once.
    explained: defaultdict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for name, ops in by_header(records).items():
        results[f"aclnnop/{name}"] = header(ops, explained[re.sub(r"(_v\d+)?\.h$", "", name)], name)
    return results
