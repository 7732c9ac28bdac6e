"""The expression language of operator definitions: axis words ("B S1 N1*D"), and Python expressions over the names of a
call.

The text of an expression is also the text of its error.
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
    """A parsed expression.

    Attributes:
        names: the names that it reads, without functions; axes: names in the axis words of fits().
        parts: the operands of a top-level `and`; without one, the expression itself.
    """

    code: CodeType
    names: tuple[str, ...]
    axes: tuple[str, ...]
    parts: tuple[str, ...]


@functools.cache
def parse(text: str) -> Expression:
    """Parses an expression; results are cached."""
    tree = ast.parse(text, mode="eval")
    nodes = list(ast.walk(tree))
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    read = dict.fromkeys(n.id for n in nodes if isinstance(n, ast.Name) and n.id not in called)
    words = " ".join(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    axes = dict.fromkeys(re.findall(r"[A-Za-z]\w*", words)) if "fits" in called else ()
    top = tree.body.values if isinstance(tree.body, ast.BoolOp) and isinstance(tree.body.op, ast.And) else [tree.body]
    return Expression(compile(tree, text, "eval"), tuple(read), tuple(axes), tuple(map(ast.unparse, top)))


def functions_in(names: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The public functions that a module defines, for expressions; names: its globals()."""
    defined = {name: f for name, f in names.items() if isinstance(f, FunctionType) and not name.startswith("_")}
    return {name: f for name, f in defined.items() if f.__module__ == names["__name__"]}


def scope(names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """The namespace in which expressions are evaluated; its fits() compares a tensor's shape with axis words."""
    return {**functions, **names, "sum": _sum, "fits": lambda t, words: fits(t, words, names)}


def _sum(values: Any) -> Any:
    """sum() that is fast for arrays."""
    return int(values.sum()) if isinstance(values, np.ndarray) else sum(values)


def evaluate(text: str, within: dict[str, Any]) -> Any:
    """The value of an expression in a scope()."""
    return eval(parse(text).code, within)


def size_of(word: str, names: Mapping[str, Any]) -> int | None:
    """The size of an axis word ("N1*D", "8"); None if the size of a factor is not bound."""
    size = 1
    for factor in word.split("*"):
        factor_size = int(factor) if factor.isdigit() else names.get(factor)
        if factor_size is None:
            return None
        size *= int(factor_size)
    return size


def fits(tensor: torch.Tensor, alternatives: str, names: Mapping[str, Any]) -> bool:
    """True if a tensor has one of the shapes in axis words, such as 'B N1 S1 S2 | S1 S2'."""
    shape: list[int | None] = list(tensor.shape)
    return any(shape == [size_of(word, names) for word in words.split()] for words in alternatives.split("|"))


def shape_text(alternatives: str) -> str:
    """Formats shapes in axis words for readers: 'B 1 S | S' becomes '[B, 1, S] or [S]'."""
    return " or ".join("[" + ", ".join(words.split()) + "]" for words in alternatives.split("|"))


def dtype_text(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype, such as 'float16'."""
    return str(tensor.dtype).removeprefix("torch.")


def lazy(tensor: torch.Tensor) -> bool:
    """True if a tensor's memory does not hold its values: a lazily negated view, or zeros without memory."""
    return tensor.is_neg() or tensor._is_zerotensor()


def show(value: Any) -> str:
    """A value as text for errors, at most 80 characters; never raises."""
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
