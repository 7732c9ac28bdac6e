"""The stub of aclnn, whose functions are made when they are first used, for type checkers and editors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from textwrap import wrap
from types import NoneType
from typing import Any, get_args

from fusion_attention import acl

WIDTH = 118
HEAD = '''\
"""The functions of aclnn. Written by `python -m codegen`; `fusion-attention ops NAME` explains the parameters."""

from collections.abc import Sequence
from typing import Any, Protocol

from fusion_attention import acl

class _Run(Protocol):
    """Phase 2: runs what phase 1 planned, into its output tensors, and returns 0 or a code."""

    def __call__(
        self, workspace: Any, workspace_size: int, executor: acl.Executor | None, stream: acl.Stream | None
    ) -> int: ...

'''


def stub(functions: Iterable[Callable[..., Any]]) -> str:
    """The whole file."""
    return HEAD + "".join(map(_function, functions))


def _function(function: Callable[..., Any]) -> str:
    """A function of phase 1, or the name of one of phase 2, which all have one signature."""
    signature = inspect.signature(function)
    if next(iter(signature.parameters)) == "workspace":
        return f"{function.__name__}: _Run\n\n"
    parameters: list[str] = []
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        default = "" if p.default is p.empty else f" = {p.default!r}"
        parameters.append(f"{p.name}: {_type(function.__annotations__[p.name])}{default}")
    lines = wrap(", ".join(p.replace(" ", "\0") for p in parameters), WIDTH - 4, break_on_hyphens=False)
    flowed = "\n".join(f"    {line}" for line in lines).replace("\0", " ")
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    text = "\n    ".join(wrap(f'"""{summary}"""', WIDTH - 4))
    return f"def {function.__name__}(\n{flowed},\n) -> {_type(function.__annotations__['return'])}:\n    {text}\n\n"


def _type(annotation: Any) -> str:
    """A type, or the text of one, as source code."""
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
    """The name by which the stub's imports find a class."""
    if kind is Any:
        return "Any"
    return ("acl." if kind.__module__.startswith(acl.__name__) else "") + str(kind.__name__)
