"""The stubs of aclnn and npu, whose functions are made from their records, for type checkers and editors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from textwrap import wrap
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from fusion_attention import acl, aclnn

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


OF_NPU = '''\
"""The functions of npu. Written by `python -m codegen`; help() and `fusion-attention ops NAME` explain them."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

MODULES: tuple[ModuleType, ...]
FUNCTIONS: dict[str, Callable[..., Any]]

'''


def stub(functions: Iterable[Callable[..., Any]]) -> str:
    """The stub of aclnn."""
    return HEAD + "".join(map(_function, functions))


def npu_stub(functions: Mapping[str, Callable[..., Any]]) -> str:
    """The stub of npu, signatures alone."""
    names = "\n".join(wrap(", ".join(f'"{name}"' for name in functions), WIDTH - 4, break_on_hyphens=False))
    listed = "__all__ = [\n" + "".join(f"    {line}\n" for line in names.split("\n")) + "]\n\n"
    return OF_NPU + listed + "".join(f"{_header(name, f)} ...\n" for name, f in functions.items())


def _function(function: Callable[..., Any]) -> str:
    """A function of phase 1, or the name of one of phase 2, which all have one signature."""
    signature = inspect.signature(function)
    if next(iter(signature.parameters)) == "workspace":
        return f"{function.__name__}: _Run\n\n"
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    text = "\n    ".join(wrap(f'"""{summary}"""', WIDTH - 4))
    return f"{_header(function.__name__, function)}\n    {text}\n\n"


def _header(name: str, function: Callable[..., Any]) -> str:
    """What stands before a function's body."""
    signature, parameters = inspect.signature(function), list[str]()
    types = {p.name: p.annotation for p in signature.parameters.values()} | {"return": signature.return_annotation}
    if not function.__module__.startswith(aclnn.__name__) and any(isinstance(t, str) for t in types.values()):
        types |= get_type_hints(inspect.unwrap(function))
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        default = "" if p.default is p.empty else f" = {p.default!r}"
        parameters.append(f"{p.name}: {_type(types[p.name])}{default}")
    lines = wrap(", ".join(p.replace(" ", "\0") for p in parameters), WIDTH - 4, break_on_hyphens=False)
    flowed = "\n".join(f"    {line}" for line in lines).replace("\0", " ")
    return f"def {name}(\n{flowed},\n) -> {_type(types['return'])}:"


def _type(annotation: Any) -> str:
    """A type, or the text of one, as source code."""
    if isinstance(annotation, str):
        return annotation
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if annotation in (None, NoneType):
        return "None"
    if not (parts := get_args(annotation)):
        return _named(annotation)
    written = [_type(part) for part in parts]
    origin = get_origin(annotation)
    return " | ".join(written) if origin in (Union, UnionType) else f"{_named(origin)}[{', '.join(written)}]"


def _named(kind: Any) -> str:
    """The name by which the stub's imports find a class."""
    if kind is Any:
        return "Any"
    if kind is Ellipsis:
        return "..."
    prefix = {"numpy": "np.", "torch": "" if kind is Tensor else "torch."}.get(kind.__module__, "")
    return ("acl." if kind.__module__.startswith(acl.__name__) else prefix) + str(kind.__name__)
