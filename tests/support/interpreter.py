"""Corrects errors of Triton's interpreter and makes it faster, in this process only (TRITON_INTERPRET=1).

1. A run-time bound of a loop is an array of one element, but range() needs an integer: tensors get __index__.
2. tl.dot multiplies the bits of bfloat16 as integers: operands are converted to float32 first.
3. Conversion from float32 to bfloat16 truncates; a GPU rounds to nearest even. Integers are converted through float32.
4. numpy's rounding of a product depends on the position of the column: tl.dot is computed in float64 and rounded once,
   so that equal columns have equal products, as on a GPU.
5. Every call of a kernel's function patches and restores the whole language, which takes half of the time: here, the
   patches stay.
6. Every operation creates types of blocks and shapes of tensors, derives its type from those of its operands, copies
   the smaller operand and computes overflows for disabled assertions, which takes most of the rest: here, types and
   shapes are reused, numpy broadcasts, and overflows are not computed.
"""

import functools
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch, _dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
_cast, _patch_lang = interpreter.InterpreterBuilder.cast_impl, interpreter._patch_lang
_Semantic = interpreter.TritonSemantic
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
    """Patches the language for a module at its first call; returns a scope that restores nothing."""
    module = function.__globals__["__name__"]
    if module not in _patched:
        _patch_lang(function)
        _patched.add(module)
    return interpreter._LangPatchScope()


def _patch_member(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic, builtin = _Semantic(builder), getattr(member, "__wrapped__", member)

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return builtin(*args, **named)

    scope.set_attr(obj, name, call)


def _reuse_types() -> None:
    block_type, np_dtype = tl.block_type.__init__, interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[tl.tuple, tl.constexpr]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *map(tl.core._unwrap_if_constexpr, shape)
        if key not in types:
            block_type(self, element_ty, shape)
            types[key] = {**self.__dict__, "sizes": key[1:]}
        self.__dict__.update(types[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = type.sizes if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = tl.tuple([tl.constexpr(n) for n in sizes]), tl.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype, self.sizes = handle, type, type.scalar, sizes
        self.shape, self.numel = shapes[sizes]

    of_scalar = functools.cache(np_dtype)

    def np_dtype_of(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor
    interpreter._get_np_dtype = np_dtype_of


def _compare_less() -> None:
    """Answers the frequent cases of three functions of Triton at once."""
    equal, unwrap, broadcast = tl.dtype.__eq__, tl.core._unwrap_if_constexpr, _Semantic.broadcast_impl_value

    def unwrapped(x: Any) -> Any:
        return x if type(x) is tl.tensor or type(x) is int else unwrap(x)

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.sizes == rhs.sizes else broadcast(self, lhs, rhs)

    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    tl.core._unwrap_if_constexpr, _Semantic.broadcast_impl_value = unwrapped, broadcasted


_broadcast = functools.cache(np.broadcast_shapes)
_NUMBERS = ("int32", "int64", "fp16", "fp32", "fp64")  # types to which a number is converted here


def _kind(x: Any) -> Any:
    """Returns a tensor's type, int or float for a number of 32 bits, None for others."""
    if isinstance(x, tl.tensor):
        return x.dtype.name
    if type(x) is int:
        return int if -(2**31) <= x < 2**31 else None
    return float if type(x) is float and (2.0**-126 <= abs(x) < 2.0**127 or x in (0.0, math.inf, -math.inf)) else None


def _check_types_once() -> None:
    """Derives the types of an operation's two operands once for each pair of types; numpy broadcasts them."""
    check = _Semantic.binary_op_type_checking_impl
    goals: dict[Any, tuple[Any, Any]] = {}

    def converted(semantic: Any, x: Any, to: Any) -> Any:
        if isinstance(x, tl.tensor):
            return x if x.dtype.name == to.name else semantic.cast(x, to)
        return tl.tensor(interpreter.TensorHandle(np.array([x], interpreter._get_np_dtype(to)), to), to)

    def shaped(x: Any, sizes: tuple[int, ...]) -> Any:
        return x if x.sizes == sizes else tl.tensor(x.handle, tl.block_type(x.dtype, [*sizes]))

    def checked(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        key = (_kind(lhs), _kind(rhs), flags)
        if named or None in key:
            return check(self, lhs, rhs, *flags, **named)
        if key not in goals:
            result = check(self, lhs, rhs, *flags)
            if all(isinstance(k, str) or r.dtype.name in _NUMBERS for k, r in zip(key, result, strict=False)):
                goals[key] = tuple(r.dtype for r in result)
            return result
        lhs, rhs = converted(self, lhs, goals[key][0]), converted(self, rhs, goals[key][1])
        sizes = _broadcast(lhs.sizes, rhs.sizes)
        return shaped(lhs, sizes), shaped(rhs, sizes)

    _Semantic.binary_op_type_checking_impl = checked
    _Semantic.binary_op_sanitize_overflow_impl = lambda *_: None
    interpreter.TensorHandle.__post_init__ = lambda _: None  # a check of sizes


def repair() -> None:
    """Installs all corrections; to be called once in a process."""
    interpreter._patch_lang_tensor = _patch_with_index
    interpreter._patch_lang, interpreter._patch_attr = _patch_once, _patch_member
    interpreter.InterpreterBuilder.create_dot = _dot_of_widened
    interpreter.InterpreterBuilder.cast_impl = _cast_rounding
    _reuse_types()
    _compare_less()
    _check_types_once()
