"""The small language of the records: axis words ("B S1 N1*D"), and expressions over the names that a call binds.

An expression is what is checked and what an error shows.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np
import torch

_SHOWN = 80


@dataclass(frozen=True)
class Expression:
    """A parsed expression.

    Attributes:
        names: the names it reads, functions left out; axes: those that stand in the axis words of fits().
        parts: the expressions that a top-level `and` joins; itself without one.
    """

    code: CodeType
    names: tuple[str, ...]
    axes: tuple[str, ...]
    parts: tuple[str, ...]


@functools.cache
def parse(text: str) -> Expression:
    """An expression, parsed once."""
    tree = ast.parse(text, mode="eval")
    nodes = list(ast.walk(tree))
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    read = dict.fromkeys(n.id for n in nodes if isinstance(n, ast.Name) and n.id not in called)
    words = " ".join(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    axes = dict.fromkeys(re.findall(r"[A-Za-z]\w*", words)) if "fits" in called else ()
    top = tree.body.values if isinstance(tree.body, ast.BoolOp) and isinstance(tree.body.op, ast.And) else [tree.body]
    return Expression(compile(tree, text, "eval"), tuple(read), tuple(axes), tuple(map(ast.unparse, top)))


def scope(names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """What expressions are evaluated in, beside Python's builtins; fits() compares a tensor's shape with axis words."""
    return {**functions, **names, "sum": _sum, "fits": lambda t, words: fits(t, words, names)}


def _sum(values: Any) -> Any:
    """sum(), of as many lengths as there may be."""
    return int(values.sum()) if isinstance(values, np.ndarray) else sum(values)


def evaluate(text: str, within: dict[str, Any]) -> Any:
    """The value of an expression in a scope()."""
    return eval(parse(text).code, within)


def size_of(word: str, names: Mapping[str, Any]) -> int | None:
    """The size of an axis word ("N1*D", "8"); None while a factor is unknown."""
    size = 1
    for factor in word.split("*"):
        factor_size = int(factor) if factor.isdigit() else names.get(factor)
        if factor_size is None:
            return None
        size *= int(factor_size)
    return size


def fits(tensor: torch.Tensor, alternatives: str, names: Mapping[str, Any]) -> bool:
    """Whether a tensor has one of the shapes 'B N1 S1 S2 | S1 S2'."""
    shape: list[int | None] = list(tensor.shape)
    return any(shape == [size_of(word, names) for word in words.split()] for words in alternatives.split("|"))


def shape_text(alternatives: str) -> str:
    """'B 1 S | S' as '[B, 1, S] or [S]'."""
    return " or ".join("[" + ", ".join(words.split()) + "]" for words in alternatives.split("|"))


def dtype_text(tensor: torch.Tensor) -> str:
    """'float16' for torch.float16."""
    return str(tensor.dtype).removeprefix("torch.")


def lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory does not hold its values: torch negates them when it reads, or there is none."""
    return tensor.is_neg() or tensor._is_zerotensor()


def show(value: Any) -> str:
    """A value as an error shows it: short, whatever it is."""
    try:
        text = _text(value)
    except Exception:  # A caller's object may fail in any way, and so does an int of more than 4300 digits.
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 4] + " ..."


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_text(value)} {list(value.shape)}"
    if isinstance(value, tuple) and value and all(isinstance(t, torch.Tensor) for t in value):
        return _text(value[0]) if len(value) == 1 else f"{len(value)} tensors, the first {_text(value[0])}"
    if isinstance(value, np.ndarray) and value.ndim == 1:
        shown = ", ".join(map(str, value[:8].tolist()))
        return f"[{shown}{', ...' if len(value) > 8 else ''}]"
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype} {list(value.shape)}"
    return repr(value)
