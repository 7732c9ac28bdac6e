"""What type checkers and editors read of aclnn, whose functions are made when they are first used: a stub.

Knows signatures and text. Refuses to know what any function does: its docstring says.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, get_args

from fusion_attention import acl

HEAD = '''\
"""The functions of aclnn, for type checkers; generated from the records by `fusion-attention ops --write --stub`."""

from collections.abc import Sequence
from typing import Any

from fusion_attention import acl

'''


def stub(functions: Iterable[Callable[..., Any]]) -> str:
    """The whole file."""
    return HEAD + "\n".join(map(_function, functions))


def _function(function: Callable[..., Any]) -> str:
    parameters: list[str] = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        default = "" if p.default is p.empty else f" = {p.default!r}"
        parameters.append(f"{p.name}: {_type(function.__annotations__[p.name])}{default}")
    lines = "\n".join(f"    {p}," for p in parameters)
    text = textwrap.indent(f'"""{inspect.getdoc(function)}\n"""', "    ", lambda line: bool(line.strip()))
    result = _type(function.__annotations__["return"])
    return f"def {function.__name__}(\n{lines}\n) -> {result}:\n{text}\n"


def _type(annotation: Any) -> str:
    """A type, or the text of one, as it is written."""
    if isinstance(annotation, str):
        return annotation
    if annotation in (None, NoneType):
        return "None"
    if not (parts := get_args(annotation)):
        return _named(annotation)
    written = [_type(part) for part in parts]
    origin = getattr(annotation, "__origin__", None)
    return f"{_named(origin)}[{', '.join(written)}]" if origin else " | ".join(written)


def _named(kind: Any) -> str:
    """Where a stub's imports find a class."""
    if kind is Any:
        return "Any"
    return ("acl." if kind.__module__.startswith(acl.__name__) else "") + str(kind.__name__)
