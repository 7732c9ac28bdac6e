"""The expressions in operator definitions: shapes as axis words ("B S1 N1*D"), and Python conditions over named values.

The text of a condition is also the text of its error.
"""

import ast
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch

_SHOWN = 80


@dataclass(frozen=True)
class Expression:
    """A rule's condition, a parsed Python expression.

    Attributes:
        code: the compiled expression.
        names: the names that it reads, without functions.
        axes: the axis words ("B", "S1") in arguments of fits().
        parts: the operands of a top-level `and`; without one, the expression itself.
    """

    code: CodeType
    names: tuple[str, ...]
    axes: tuple[str, ...]
    parts: tuple[str, ...]


@functools.cache
def parse(text: str) -> Expression:
    """Parses the text of a rule's condition; results are cached."""
    tree = ast.parse(text, mode="eval")
    nodes = list(ast.walk(tree))
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    read = dict.fromkeys(n.id for n in nodes if isinstance(n, ast.Name) and n.id not in called)
    words = " ".join(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    axes = dict.fromkeys(re.findall(r"[A-Za-z]\w*", words)) if "fits" in called else ()
    top = tree.body.values if isinstance(tree.body, ast.BoolOp) and isinstance(tree.body.op, ast.And) else [tree.body]
    return Expression(compile(tree, text, "eval"), tuple(read), tuple(axes), tuple(map(ast.unparse, top)))


def functions_in(names: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Returns a module's public functions by name, for use in rules' conditions; names: the module's globals()."""
    defined = {name: f for name, f in names.items() if isinstance(f, FunctionType) and not name.startswith("_")}
    return {name: f for name, f in defined.items() if f.__module__ == names["__name__"]}


def scope(names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Returns the namespace in which rules' conditions are evaluated: names, functions, sum(), and fits(), which
    compares a tensor's shape with axis words."""
    return {**functions, **names, "sum": _sum, "fits": lambda t, words: fits(t, words, names)}


def _sum(values: Any) -> Any:
    return int(values.sum()) if isinstance(values, np.ndarray) else sum(values)


def evaluate(text: str, within: dict[str, Any]) -> Any:
    """Returns the value of a Python expression; within: its namespace, which scope() makes."""
    return eval(parse(text).code, within)


def size_of(word: str, names: Mapping[str, Any]) -> int | None:
    """Returns the size of an axis word: "N1*D" is names["N1"] * names["D"], "8" is 8; None if names lacks a factor."""
    size = 1
    for factor in word.split("*"):
        factor_size = int(factor) if factor.isdigit() else names.get(factor)
        if factor_size is None:
            return None
        size *= int(factor_size)
    return size


def fits(tensor: torch.Tensor, alternatives: str, names: Mapping[str, Any]) -> bool:
    """True if a tensor has one of the shapes in axis words, such as "B N1 S1 S2 | S1 S2"; names: sizes by axis."""
    shape: list[int | None] = list(tensor.shape)
    return any(shape == [size_of(word, names) for word in words.split()] for words in alternatives.split("|"))


def shape_text(alternatives: str) -> str:
    """Formats alternative shapes in axis words for readers: 'B 1 S | S' becomes '[B, 1, S] or [S]'."""
    return " or ".join("[" + ", ".join(words.split()) + "]" for words in alternatives.split("|"))


def dtype_text(tensor: torch.Tensor) -> str:
    """Returns the name of a tensor's dtype, such as 'float16'."""
    return str(tensor.dtype).removeprefix("torch.")


def lazy(tensor: torch.Tensor) -> bool:
    """True if a tensor's values are not in its memory: a lazily negated view, or zeros without memory."""
    return tensor.is_neg() or tensor._is_zerotensor()


def show(value: Any) -> str:
    """Returns a value as text for errors, at most 80 characters; never raises."""
    try:
        text = _text(value)
    except Exception:  # repr() of a caller's object may raise anything; an int of over 4300 digits raises too.
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
