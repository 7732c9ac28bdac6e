"""Stubs of aclnn and of torch_npu's functions, from their operator definitions, for type checkers and editors."""

import inspect
from collections.abc import Callable, Iterable
from textwrap import wrap
from types import NoneType
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np
import torch

from fusion_attention import acl

WIDTH = 118
PREFIXES = {np.ndarray: "np.", torch.dtype: "torch."}
HEAD = '''\
"""The functions of aclnn. Written by `python -m codegen`; `fusion-attention ops NAME` explains the parameters.

Phase 1 of an operator checks and plans, and returns a code, the bytes of workspace that phase 2 needs, and an executor.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from fusion_attention import acl

_Tensor = acl.Tensor | None
_Tensors = acl.TensorList | None
_Numbers = acl.IntArray | acl.Tensor | Sequence[int] | None
_Planned = tuple[int, int, acl.Executor | None]

class _Run(Protocol):
    """Phase 2: runs what phase 1 planned, into its output tensors, and returns 0 or a code."""

    def __call__(
        self, workspace: Any, workspace_size: int, executor: acl.Executor | None, stream: acl.Stream | None
    ) -> int: ...

'''


NPU_HEAD = '''\
"""torch_npu's functions. Written by `python -m codegen`; help() and `fusion-attention ops NAME` explain them."""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from fusion_attention.npu.auxiliary.transposes import get_npu_format as get_npu_format
from fusion_attention.npu.dropout import _npu_dropout_gen_mask as _npu_dropout_gen_mask
from fusion_attention.npu.fused_out import WithOut
from fusion_attention.npu.install import install as install
from fusion_attention.npu.install import uninstall as uninstall
from fusion_attention.settings import strict as strict

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Some = Tensor | None
_Lengths = Sequence[int] | np.ndarray | Tensor | None

def _with_out(function: Callable[_P, _R]) -> WithOut[_P, _R]: ...

'''
SHORT = {
    "Sequence[int] | np.ndarray | Tensor | None": "_Lengths",
    "Tensor | Sequence[int] | np.ndarray | None": "_Lengths",
    "Tensor | None": "_Some",
    "acl.Tensor | None": "_Tensor",
    "acl.TensorList | None": "_Tensors",
    "acl.IntArray | acl.Tensor | Sequence[int] | None": "_Numbers",
    "tuple[int, int, acl.Executor | None]": "_Planned",
}


def stub(functions: Iterable[Callable[..., Any]]) -> str:
    """The text of aclnn's stub; functions: those of both phases."""
    return HEAD + "".join(map(_function, functions))


def npu_stub(functions: Iterable[Callable[..., Any]]) -> str:
    """The text of the stub of the package npu; functions: those that are made from operator definitions."""
    return NPU_HEAD + "".join(_declaration(f, " ...") for f in functions)


def _declaration(function: Callable[..., Any], body: str) -> str:
    """The source text of a function: its declaration, wrapped to WIDTH, and the first line of its body."""
    parameters, returns = _signature(function)
    end = f") -> {returns}:{body}".replace(" ", "\0")
    signature = f"def {function.__name__}({', '.join(parameters)}{end}"
    lines = wrap(signature, WIDTH, break_on_hyphens=False, subsequent_indent="    ")
    head = "@_with_out\n" if hasattr(function, "out") else ""
    return head + "\n".join(lines).replace("\0", " ") + "\n"


def _function(function: Callable[..., Any]) -> str:
    """The source text of a phase-1 function, or of a variable for a phase-2 function, which all have one signature."""
    signature = inspect.signature(function)
    if next(iter(signature.parameters)) == "workspace":
        return f"{function.__name__}: _Run\n"
    summary = (inspect.getdoc(function) or "").partition(" Phase 1: ")[0]
    text = "\n    ".join(wrap(f'"""{summary}"""', WIDTH - 4))
    return f"{_declaration(function, '')}    {text}\n"


def _signature(function: Callable[..., Any]) -> tuple[list[str], str]:
    """(parameters, type of the result) as source text, with "\0" for spaces at which no line may end."""
    parameters: list[str] = []
    signature = inspect.signature(function)
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        kind = _type(p.annotation)
        default = "" if p.default is p.empty else f" = {p.default!r}"
        parameters.append(f"{p.name}: {SHORT.get(kind, kind)}{default}".replace(" ", "\0"))
    returned = _type(signature.return_annotation)
    return parameters, SHORT.get(returned, returned)


def _type(annotation: Any) -> str:
    """The source text of a type annotation."""
    if isinstance(annotation, str):
        return annotation
    if annotation in (None, NoneType):
        return "None"
    if not (parts := get_args(annotation)):
        return _named(annotation)
    origin = getattr(annotation, "__origin__", None)
    if get_origin(annotation) is Annotated:
        return _type(parts[0])  # further arguments of Annotated are for torch's schemas
    if origin is Union:
        return " | ".join(map(_type, parts))
    written = [_type(operand) for operand in parts]
    return f"{_named(origin)}[{', '.join(written)}]" if origin else " | ".join(written)


def _named(kind: Any) -> str:
    """The name of a class in the stub, with the module's prefix."""
    if kind is Any:
        return "Any"
    place = "acl." if kind.__module__.startswith(acl.__name__) else PREFIXES.get(kind, "")
    return place + str(kind.__name__)
