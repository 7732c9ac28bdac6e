"""A dispatch mode that adds to float64 results random errors of the size of another dtype's roundings.

    with Roundings(torch.bfloat16, generator):
        program()

    result of an operation  x  ->  x * (1 + u * uniform(-1, 1)),  u half the unit of the dtype

Sums also have the errors of adding their terms in float32. Exact operations have no error: copies, selections,
comparisons, products with a power of two, and results that the dtype represents exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Roundings", "quantum"]

Tensor = torch.Tensor

# Operations with one rounding.
_ROUNDED = frozenset([
    "add", "sub", "rsub", "mul", "div", "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sqrt", "rsqrt",
    "reciprocal", "pow", "sigmoid", "erf", "erfc", "sin", "cos", "polar", "square",
])  # fmt: skip
_BILINEAR = frozenset([
    "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "convolution", "convolution_backward", "_grouped_mm",
])  # fmt: skip
_SUMS = frozenset(["sum", "cumsum", "index_add", "scatter_add", "index_put", "embedding_dense_backward"])
_EXACT = frozenset([
    "_local_scalar_dense", "_to_copy", "_unsafe_view", "floor_divide", "abs", "alias", "amax", "amin", "any", "all",
    "arange", "argmax", "argmin", "argsort", "as_strided_copy", "bernoulli", "bitwise_and", "bitwise_not", "bitwise_or",
    "cat", "ceil", "clamp", "clamp_max", "clamp_min", "clone", "complex", "constant_pad_nd", "contiguous", "copy",
    "cummax", "cummin", "embedding", "empty", "empty_like", "empty_strided", "eq", "equal", "eye", "fill", "flip",
    "floor", "fmod", "full", "full_like", "gather", "ge", "gt", "index", "index_copy", "index_fill", "index_select",
    "isfinite", "isinf", "isnan", "isneginf", "le", "lift", "lift_fresh", "linspace", "logical_and", "logical_not",
    "logical_or", "lt", "masked_fill", "masked_scatter", "masked_select", "max", "maximum", "min", "minimum", "ne",
    "neg", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "nonzero", "normal", "ones",
    "ones_like", "rand", "randint", "randn", "randperm", "relu", "remainder", "repeat", "repeat_interleave", "resize",
    "roll", "round", "scalar_tensor", "scatter", "select_backward", "select_scatter", "set_", "sgn", "sign",
    "slice_backward", "slice_scatter", "sort", "stack", "threshold_backward", "topk", "tril", "triu", "trunc",
    "uniform", "unique_consecutive", "where", "zero", "zeros", "zeros_like", "nan_to_num", "_unique2", "searchsorted",
    "bucketize", "tril_indices", "split_with_sizes_copy", "unbind_copy", "signbit", "copysign", "isposinf", "detach",
    "histc", "bincount", "_assert_async", "rot90", "conj", "_conj_physical", "real", "imag", "diagonal_backward",
    "diag_embed", "_reshape_copy", "record_stream", "unfold_backward",
])  # fmt: skip


class Roundings(TorchDispatchMode):
    """Adds to every result of float64 arithmetic a random error of a dtype's size.

    Args:
        dtype: the dtype whose roundings are simulated.
        generator: of the errors. noise: random numbers already drawn from it, shared by nested modes.
    """

    def __init__(self, dtype: torch.dtype, generator: torch.Generator, noise: Tensor | None = None) -> None:
        super().__init__()
        self.dtype, self.generator = dtype, generator
        self.noise = torch.empty(0, dtype=torch.float64) if noise is None else noise
        self.info = torch.finfo(dtype)
        # Sums, and steps within one operation of torch, are at least float32.
        self.inner = torch.float64 if dtype == torch.float64 else torch.float32

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        base = func.overloadpacket.__name__
        base = base[:-1] if base.endswith("_") and not base.endswith("__") else base
        if func.is_view or base in _EXACT or not _floats((args, kwargs)):
            return func(*args, **kwargs)
        if not func._schema.is_mutable:
            return self._result(func, base, args, kwargs)
        function = getattr(torch.ops.aten, base)
        if "out" in kwargs:
            kwargs = dict(kwargs)
            target = kwargs.pop("out")
        else:
            target, args = args[0], (args[0].clone(), *args[1:])
        return target.copy_(self._result(function, base, args, kwargs))

    def _result(self, func: Any, base: str, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation with its errors."""
        if base in _ROUNDED:
            result = func(*args, **kwargs)
            return self._rounded(result, _exact(base, result, args))
        if base in _BILINEAR or base in _SUMS:
            result = func(*args, **kwargs)
            squares = func(
                *_mapped(args, torch.square), **{n: x * x if _is_factor(n) else x for n, x in kwargs.items()}
            )
            terms = _terms(func, base, args, kwargs, result)
            several = isinstance(result, tuple)
            three = zip(*(x if several else (x,) for x in (result, squares, terms)), strict=True)
            added = tuple(self._added(total, q, n, base in _BILINEAR) for total, q, n in three)
            return added if several else added[0]
        with Roundings(self.inner, self.generator, self.noise):
            overload = getattr(func, "default", func)
            if overload == torch.ops.prims.var.default:
                result = _variance(*args, **kwargs)
            elif overload in decomposition_table:
                result = decomposition_table[overload](*args, **kwargs)
            else:
                result = overload.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise NotImplementedError(f"drawn: expected operations whose roundings are known, got {func}")
        if self.inner == self.dtype:  # already rounded by its last step
            return result
        return tuple(map(self._rounded, result)) if isinstance(result, tuple | list) else self._rounded(result)

    def _error(self, size: Tensor) -> Tensor:
        """Returns size * uniform(-1, 1), in place."""
        count = size.numel()
        if 2 * count > len(self.noise):  # drawing is slow: numbers are reused at random offsets
            self.noise.resize_(4 * count + 4096).uniform_(-1, 1, generator=self.generator)
        start = int(torch.randint(len(self.noise) - count + 1, (), generator=self.generator))
        return size.mul_(self.noise[start : start + count].view(size.shape))

    def _rounded(self, result: Any, exact: Any = None) -> Any:
        """Adds one rounding error, except to exact results."""
        if not isinstance(result, Tensor) or result.dtype not in (torch.float64, torch.complex128):
            return result
        size = result.abs().mul_(self.info.eps / 2)
        if result.is_complex():  # each part is a sum of two products, with errors relative to the absolute value
            return result + torch.complex(self._error(size.clone()), self._error(size))
        error = self._error(size.add_(quantum(self.dtype) / 2)).masked_fill_(self._is_exact(result), 0)
        return result + (error if exact is None else error.masked_fill_(exact, 0))

    def _added(self, total: Any, squares: Any, terms: Any, products: bool) -> Any:
        """Adds the errors of a sum in any order, rounded once.

        variance of the sum = (2 ** -24) ** 2 / 3 * (terms * (total ** 2 / 3 + squares) + squares, of products)
        """
        if not isinstance(total, Tensor) or total.dtype != torch.float64:
            return total
        size = total.square().div_(3).add_(squares).mul_(terms).add_(squares, alpha=float(products))
        error = self._error(size.sqrt_().mul_(torch.finfo(self.inner).eps / 2))
        # A single term besides zeros, or integers of one sign, are exact; sums with cancellation are not.
        exact = self._is_exact(total) & (total.square() >= squares * (1 - 1e-12))
        if not products:
            exact |= torch.as_tensor(terms <= 1)
        return self._rounded(total + error.masked_fill_(exact, 0), exact)

    def _is_exact(self, values: Tensor) -> Tensor:
        """True if the dtype represents a result exactly (for float64: if float32 does), or if it is beyond the range.

        Models fill masks with float64's least number, which would become -inf with an error.
        """
        rounded = values.to(torch.float32 if self.dtype == torch.float64 else self.dtype)
        return (rounded == values) | rounded.isinf()


def _variance(x: Tensor, dims: list[int], correction: float = 1, **_: Any) -> Tensor:
    """Replaces the primitive that torch's decompositions of norms use."""
    squares = (x - x.mean(dims, keepdim=True)).square()
    return squares.sum(dims) / (math.prod(x.shape[d] for d in dims) - correction)


def quantum(dtype: torch.dtype) -> float:
    """Returns the spacing of a dtype's smallest numbers."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.float64, torch.complex128)


def _floats(x: Any) -> bool:
    """True if a float64 tensor is among the arguments."""
    if isinstance(x, dict):
        x = list(x.values())
    return any(map(_floats, x)) if isinstance(x, tuple | list) else _is_float(x)


def _mapped(args: Any, change: Callable[[Tensor], Tensor]) -> list[Any]:
    return [change(x) if _is_float(x) else x for x in args]


def _is_factor(name: str) -> bool:
    return name in ("alpha", "beta")


def _terms(func: Any, base: str, args: Any, kwargs: Any, result: Any) -> Any:
    """Returns the number of terms of each sum."""
    if base in ("mm", "bmm"):
        return args[1].shape[-2]
    if base == "sum":
        return args[0].numel() // max(result.numel(), 1)
    return func(*_mapped(args, torch.ones_like), **{n: x for n, x in kwargs.items() if not _is_factor(n)})


def _exact(base: str, result: Any, args: Any) -> Any:
    """True for results without rounding: a factor is a power of two, or a term is 0."""
    if not isinstance(result, Tensor) or result.is_complex() or base not in ("add", "sub", "mul", "div"):
        return None
    exact = torch.zeros((), dtype=torch.bool)
    for i, x in enumerate(args[:2]):
        if base in ("add", "sub"):
            exact = exact | torch.as_tensor(x == 0)
        elif base == "mul" or i:
            exact = exact | _is_power(x)
    return exact


def _is_power(x: Any) -> Tensor:
    """True for plus or minus a power of two."""
    x = torch.as_tensor(x, dtype=torch.float64)
    return (x.view(torch.int64) & (2**52 - 1)) == 0  # no mantissa bits; true for 0 and infinity too
