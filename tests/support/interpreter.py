"""Repairs what Triton's interpreter gets wrong, in this process only: TRITON_INTERPRET=1.

1. A run-time bound of a loop is an array of one element, which range() wants as an integer.
2. tl.dot of bfloat16 multiplies the raw bits: operands are widened first.
3. float32 to bfloat16 cuts bits off: a GPU rounds to the nearest, halves to even. Integers go by float32.
4. numpy rounds the product of a row and a column by the place of the column: tl.dot is rounded from float64, so that
   equal columns have equal products, as on a GPU.
5. Every call of a kernel's function exchanges the whole language, and puts it back: half of all time. Here it stays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch, _dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
_cast, _patch_lang = interpreter.InterpreterBuilder.cast_impl, interpreter._patch_lang
_patched: set[str] = set()


def _patch_with_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))


def _widened(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _dot_of_widened(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    a, b = _widened(a), _widened(b)
    if not (a.dtype.scalar.is_floating() and d.dtype.scalar == tl.float32):
        return _dot(self, a, b, d, *rest)
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
    return interpreter.TensorHandle(product.astype(np.float32) + d.data, tl.float32)


def _cast_rounding(self: Any, source: Any, to: Any) -> Any:
    if to.scalar != tl.bfloat16 or source.dtype.scalar == tl.bfloat16:
        return _cast(self, source, to)
    values = np.ascontiguousarray(source.data, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return interpreter.TensorHandle(np.where(np.isnan(values), np.uint16(0x7FC0), rounded), tl.bfloat16)


def _patch_once(function: Any) -> Any:
    """A scope that puts nothing back; what a module calls the language is exchanged at its first call."""
    module = function.__globals__["__name__"]
    if module not in _patched:
        _patch_lang(function)
        _patched.add(module)
    return interpreter._LangPatchScope()


def repair() -> None:
    """Once in a process."""
    interpreter._patch_lang_tensor = _patch_with_index
    interpreter._patch_lang = _patch_once
    interpreter.InterpreterBuilder.create_dot = _dot_of_widened
    interpreter.InterpreterBuilder.cast_impl = _cast_rounding
