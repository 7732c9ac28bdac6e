"""Simulates how a program's results vary with the rounding errors of a dtype, in one run of the program in float64.

    copies = Copies(24)
    with Roundings(torch.bfloat16, copies, Noise(seed)):
        result = program()  # in float64, without errors
    copies.of(result)  # [24, *shape]: the results of 24 runs with random errors of bfloat16's size

    result of an operation  x  ->  x * (1 + u * uniform(-1, 1)),  u = finfo(dtype).eps / 2

Roundings is a torch dispatch mode: it intercepts each operation, and runs it also on every copy of its arguments. Sums
also have the errors of adding their terms in float32. Exact operations have no error: copying, selecting, comparing,
products with a power of two, and results that the dtype represents exactly.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["Copies", "Noise", "Roundings", "quantum"]

Tensor = torch.Tensor

# Operations with one rounding.
_ROUNDED = frozenset([
    "add", "sub", "rsub", "mul", "div", "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sqrt", "rsqrt",
    "reciprocal", "pow", "sigmoid", "erf", "erfc", "sin", "cos", "polar", "square",
])  # fmt: skip
_ERF = 1.5e-7  # largest error of torch's float32 polynomial (Abramowitz and Stegun, 7.1.26)
_BILINEAR = frozenset([
    "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "convolution", "convolution_backward", "_grouped_mm",
])  # fmt: skip
_SUMS = frozenset(
    ["sum", "cumsum", "index_add", "scatter_add", "index_put", "embedding_dense_backward", "zeros_and_scatter"]
)
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


# Views, values in Python, and operations on memory itself.
_WITHOUT_COPIES = frozenset([
    "_unsafe_view", "_local_scalar_dense", "set_", "resize", "record_stream", "_assert_async",
])  # fmt: skip
# All copies get the same random numbers.
_RANDOM = frozenset(["bernoulli", "normal", "rand", "randint", "randn", "randperm", "uniform"])
# Operations of which broadcasting runs all copies; torch.vmap, which takes longer, runs the others.
_ELEMENTWISE = frozenset([
    "_to_copy", "abs", "bitwise_and", "bitwise_not", "bitwise_or", "ceil", "clamp", "clamp_max", "clamp_min", "clone",
    "copysign", "eq", "floor", "fmod", "ge", "gt", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "le",
    "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "nan_to_num", "ne", "neg",
    "relu", "remainder", "round", "sgn", "sign", "signbit", "trunc", "where",
])  # fmt: skip
_PRODUCTS = frozenset(["mm", "bmm"])
_FACTORS = ("alpha", "beta")  # keyword arguments of torch's operations
# torch.vmap needs these dispatch keys, and a dispatch mode runs without them.
_VMAP_KEYS = functools.reduce(operator.or_, (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in (
    "FuncTorchBatched", "FuncTorchVmapMode", "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode",
)))  # fmt: skip
_LEAST_BYTES = 2**24


class Copies:
    """Copies of tensors' memory, `count` of each storage, each with other random rounding errors. A storage gets copies
    when an operation with errors first writes to it. Views share the copies of their storage."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.memory: dict[int, tuple[StorageWeakRef, Tensor]] = {}
        self.largest = 1  # elements of the largest tensor
        self.bytes, self.most = 0, _LEAST_BYTES  # above `most` bytes, copies of freed storages are removed

    def of(self, t: Tensor) -> Tensor | None:
        """Returns the copies of a tensor t, [copies, *shape]; None if all are equal to the tensor."""
        entry = self.memory.get(t.untyped_storage()._cdata)
        return None if entry is None else self._view(entry[1], t)

    def writable(self, t: Tensor) -> Tensor:
        """Returns the copies of a tensor t, [copies, *shape], as writable views; makes the copies if there are none."""
        storage = t.untyped_storage()
        if storage._cdata not in self.memory:
            if self.bytes > self.most:
                self.memory = {key: entry for key, entry in self.memory.items() if not entry[0].expired()}
                self.bytes = sum(memory.numel() for _, memory in self.memory.values())
                self.most = max(_LEAST_BYTES, 2 * self.bytes)
            memory = torch.empty(0, dtype=torch.uint8).set_(storage).expand(self.count, -1).contiguous()
            self.memory[storage._cdata] = (StorageWeakRef(storage), memory)
            self.bytes += memory.numel()
            self.largest = max(self.largest, t.numel())
        return self._view(self.memory[storage._cdata][1], t)

    def _view(self, memory: Tensor, t: Tensor) -> Tensor:
        """Returns the copies of a tensor t, [copies, *shape], as a view of `memory`, the copies of its storage."""
        elements = memory.view(t.dtype)
        return elements.as_strided((self.count, *t.shape), (elements.shape[1], *t.stride()), t.storage_offset())


class Roundings(TorchDispatchMode):
    """A context in which torch also computes copies of float64 results, with random errors of a dtype's size.

    Values in Python (from item() and the like) and the shapes of results are those of the program without errors, so
    all copies take the same branches.

    Args:
        dtype: the dtype whose rounding errors are simulated.
        copies: where the results with errors are stored.
        noise: the source of the errors.
    """

    def __init__(self, dtype: torch.dtype, copies: Copies, noise: Noise) -> None:
        super().__init__()
        self.dtype, self.copies, self.noise = dtype, copies, noise
        self.info = torch.finfo(dtype)
        # Sums, and steps within one operation of torch, are at least float32.
        self.inner = torch.float64 if dtype == torch.float64 else torch.float32

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        base = func.overloadpacket.__name__
        base = base[:-1] if base.endswith("_") and not base.endswith("__") else base
        if func.is_view or base in _WITHOUT_COPIES:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._in_place(func, base, args, kwargs)
        if not self._has_copies((args, kwargs)) and (base in _EXACT or not _floats((args, kwargs))):
            return func(*args, **kwargs)
        return self._result(func, base, args, kwargs)

    def _in_place(self, func: Any, base: str, args: Any, kwargs: Any) -> Any:
        """Runs a torch operation that writes to an argument; the variant that returns a result computes its copies."""
        target = kwargs["out"] if "out" in kwargs else args[0]
        if base in _RANDOM or (not self._has_copies((args, kwargs)) and (base in _EXACT or not _is_float(target))):
            result = func(*args, **kwargs)
            if self._has_copies(target):
                self.copies.writable(target).copy_(target)
            return result
        if "out" in kwargs:
            returned = {name: x for name, x in kwargs.items() if name != "out"}
            value = self._result(getattr(torch.ops.aten, base), base, args, returned)
        elif base == "copy":
            value = args[1]
        else:
            value = self._result(getattr(torch.ops.aten, base), base, args, kwargs)
        moved = self.copies.of(value)
        self.copies.writable(target).copy_(value if moved is None else _aligned(moved, target.dim()))
        return target.copy_(value)

    def _result(self, func: Any, base: str, args: Any, kwargs: Any) -> Any:
        """Returns the result of the torch operation `func`, named `base`; computes its copies with random errors."""
        if base in _EXACT:
            return self._exact(func, base, args, kwargs)
        if base in _ROUNDED:
            result = func(*args, **kwargs)
            exact = _exact(base, result, self._moved(args, result.dim()))
            self.copies.writable(result).copy_(
                self._rounded(self._each(func, base, args, kwargs), exact, _ERF * (base == "erf"))
            )
            return result
        if base in _BILINEAR or base in _SUMS:
            return self._sum(func, base, args, kwargs)
        with Roundings(self.inner, self.copies, self.noise):
            overload = getattr(func, "default", func)
            if overload == torch.ops.prims.var.default:
                result = _variance(*args, **kwargs)
            elif overload in decomposition_table:
                result = decomposition_table[overload](*args, **kwargs)
            else:
                result = overload.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise NotImplementedError(f"drawn: expected operations whose roundings are known, got {func}")
        if self.inner != self.dtype:  # else already rounded by its last step
            for x in result if isinstance(result, tuple | list) else (result,):
                if _is_float(x):
                    moved = self.copies.writable(x)
                    moved.copy_(self._rounded(moved))
        return result

    def _sum(self, func: Any, base: str, args: Any, kwargs: Any) -> Any:
        """Returns the result of the torch operation `func` (`base`), sums; stores copies with random errors."""
        result = func(*args, **kwargs)
        terms = _terms(func, base, args, kwargs, result)
        moved = self._each(func, base, args, kwargs)
        factors = {name: x * x if name in _FACTORS else x for name, x in kwargs.items()}
        squares = self._each(func, base, args, factors, torch.square)
        several = isinstance(result, tuple)
        sums = zip(*(x if several else (x,) for x in (result, moved, squares, terms)), strict=True)
        for one, total, its_squares, count in sums:
            if isinstance(one, Tensor):
                self.copies.writable(one).copy_(self._added(total, its_squares, count, base in _BILINEAR))
        return result

    def _exact(self, func: Any, base: str, args: Any, kwargs: Any) -> Any:
        """Returns the result of the torch operation `func`, which rounds nothing; also runs it on arguments' copies."""
        result = func(*args, **kwargs)
        several = isinstance(result, tuple | list)
        if not any(isinstance(x, Tensor) for x in (result if several else (result,))):
            return result
        moved = self._each(func, base, args, kwargs)
        for one, copies in zip(result, moved, strict=True) if several else ((result, moved),):
            if isinstance(one, Tensor):
                self.copies.writable(one).copy_(copies)
        return result

    def _each(
        self, func: Any, base: str, args: Any, kwargs: Any, change: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Any:
        """Returns the results of a torch operation for all copies of its arguments, [copies, *shape]. func, base: the
        operation and its name without overload; change: function that is applied to each float64 argument first."""
        if not self._has_copies((args, kwargs)):
            return self._expanded(func(*_mapped(args, change), **kwargs))
        if base in _PRODUCTS:
            return torch.matmul(*_mapped(self._moved(args), change))
        if base in ("addmm", "baddbmm"):
            x, *factors = _mapped(self._moved(args, args[1].dim()), change)
            return x * kwargs.get("beta", 1) + torch.matmul(*factors) * kwargs.get("alpha", 1)
        if base in _ROUNDED or base in _ELEMENTWISE:
            rank = max(x.dim() for x in args if isinstance(x, Tensor))
            return func(*_mapped(self._moved(args, rank), change), **kwargs)
        if base == "sum":
            (x,), dims = _mapped(self._moved(args[:1]), change), args[1] if len(args) > 1 else ()
            return x.sum(
                [d - args[0].dim() if d >= 0 else d for d in dims or range(args[0].dim())], *args[2:], **kwargs
            )
        with contextlib.suppress(RuntimeError):  # results of unequal sizes, of unequal masks, or an index in Python
            return self._vmapped(func, args, kwargs, change, lambda x: True)
        return self._vmapped(func, args, kwargs, change, _is_float)

    def _vmapped(
        self, func: Any, args: Any, kwargs: Any, change: Callable[[Tensor], Tensor], differs: Callable[[Tensor], bool]
    ) -> Any:
        """Returns the results of the torch operation `func` for all arguments' copies, [copies, *shape], by vmap.

        Args:
            change: applied to the float64 arguments.
            differs: true for the tensors whose copies are used; others have equal elements in all copies.
        """
        flat, spec = tree_flatten((args, kwargs))
        moved = [self.copies.of(x) if isinstance(x, Tensor) and differs(x) else None for x in flat]
        values = _mapped([x if m is None else m for x, m in zip(flat, moved, strict=True)], change)
        batched = [v for v, m in zip(values, moved, strict=True) if m is not None]

        def one(*items: Tensor) -> Any:
            rest = iter(items)
            flat = [v if m is None else next(rest) for v, m in zip(values, moved, strict=True)]
            args, kwargs = tree_unflatten(flat, spec)
            result = func(*args, **kwargs)
            if isinstance(result, tuple | list):  # a gradient that is not requested is None, which vmap refuses
                return tuple(torch.zeros(()) if x is None else x for x in result)
            return result

        if not batched:
            return self._expanded(one())
        included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        with torch._C._ForceDispatchKeyGuard(included, excluded - _VMAP_KEYS):  # autograd stays excluded
            return torch.vmap(one)(*batched)

    def _expanded(self, result: Any) -> Any:
        """Returns results, equal for all copies of the arguments, expanded to [copies, *shape]."""
        if isinstance(result, tuple | list):
            return [self._expanded(x) for x in result]
        return result.expand(self.copies.count, *result.shape) if isinstance(result, Tensor) else result

    def _has_copies(self, x: Any) -> bool:
        return any(isinstance(t, Tensor) and self.copies.of(t) is not None for t in tree_leaves(x))

    def _moved(self, args: Any, rank: int = 0) -> list[Any]:
        """Returns arguments in which copies [copies, ...] replace tensors that have some. rank: number of axes of the
        operation's result, to which the copies are aligned for broadcasting."""
        copies = [self.copies.of(x) if isinstance(x, Tensor) else None for x in args]
        return [x if c is None else _aligned(c, rank) for x, c in zip(args, copies, strict=True)]

    def _error(self, size: Tensor) -> Tensor:
        """Returns uniform random errors between -size and size, written over `size`."""
        return size.mul_(self.noise(size.numel()).view(size.shape))

    def _rounded(self, moved: Tensor, exact: Tensor | None = None, added: float = 0.0) -> Tensor:
        """Returns values, each with a random rounding error, except those that are exact.

        Args:
            moved: the values.
            exact: where an operation's result has no rounding error; None: only where the dtype represents it.
            added: the size of an additional absolute error.
        """
        if moved.dtype not in (torch.float64, torch.complex128):
            return moved
        size = moved.abs().mul_(self.info.eps / 2)
        if moved.is_complex():  # each part is a sum of two products, with errors relative to the absolute value
            return moved + torch.complex(self._error(size.clone()), self._error(size))
        is_exact = self._is_exact(moved) if exact is None else self._is_exact(moved).logical_or_(exact)
        if added or self.dtype == torch.float16:  # numbers of other dtypes do not reach their smallest spacing
            size.add_(added + quantum(self.dtype) / 2)
        return self._error(size).masked_fill_(is_exact, 0).add_(moved)

    def _added(self, total: Tensor, squares: Tensor, terms: Any, products: bool) -> Tensor:
        """Returns sums (total) with random errors of adding float32 terms in any order, and of rounding the result.
        variance = (2**-24)**2 / 3 * (terms * (total**2 / 3 + squares) + products * squares), squares = sum(term**2)"""
        if total.dtype != torch.float64:
            return total
        size = total.square().div_(3).add_(squares).mul_(terms).add_(squares, alpha=float(products))
        error = self._error(size.sqrt_().mul_(torch.finfo(self.inner).eps / 2))
        # Sums of one term and zeros, or of integers of one sign, are exact; sums with cancellation are not.
        exact = self._is_exact(total) & (total.square() >= squares * (1 - 1e-12))
        if not products:
            exact |= torch.as_tensor(terms <= 1)
        return self._rounded(total + error.masked_fill_(exact, 0), exact)

    def _is_exact(self, values: Tensor) -> Tensor:
        """True for values that the dtype represents exactly (for float64: if float32 does), or that exceed its range.
        Models fill masks with the lowest float64 number, which would become -inf with an error."""
        rounded = values.to(torch.float32 if self.dtype == torch.float64 else self.dtype)
        return (rounded == values).logical_or_(rounded.isinf())


class Noise:
    """Uniform random numbers in [-1, 1]. Drawing is slow, so numbers are drawn once and read from random offsets."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.numbers = torch.empty(0, dtype=torch.float64)

    def __call__(self, count: int) -> Tensor:
        """Returns `count` random numbers, uniform in [-1, 1]: a view of drawn numbers from a random offset on."""
        if 2 * count > len(self.numbers):
            self.numbers.resize_(4 * count + 4096).uniform_(-1, 1, generator=self.generator)
        start = int(torch.randint(len(self.numbers) - count + 1, (), generator=self.generator))
        return self.numbers[start : start + count]


def _variance(x: Tensor, dims: list[int], correction: float = 1, **_: Any) -> Tensor:
    squares = (x - x.mean(dims, keepdim=True)).square()
    return squares.sum(dims) / (math.prod(x.shape[d] for d in dims) - correction)


def quantum(dtype: torch.dtype) -> float:
    """Returns the spacing of a dtype's smallest (denormal) numbers."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.float64, torch.complex128)


def _floats(x: Any) -> bool:
    """True if x is a float64 or complex128 tensor, or a list or dictionary with one."""
    return any(map(_is_float, tree_leaves(x)))


def _aligned(copies: Tensor, rank: int) -> Tensor:
    """Returns copies of a tensor, [copies, *shape], with axes of size 1 before shape, so that it has `rank` axes."""
    return copies.view(copies.shape[0], *(1,) * (rank + 1 - copies.dim()), *copies.shape[1:])


def _mapped(args: Any, change: Callable[[Tensor], Tensor]) -> list[Any]:
    return [change(x) if _is_float(x) else x for x in args]


def _terms(func: Any, base: str, args: Any, kwargs: Any, result: Any) -> Any:
    """Returns the number of terms of each sum in the result of the torch operation `func`, named `base`."""
    if base in ("mm", "bmm"):
        return args[1].shape[-2]
    if base == "sum":
        return args[0].numel() // max(result.numel(), 1)
    return func(*_mapped(args, torch.ones_like), **{n: x for n, x in kwargs.items() if n not in _FACTORS})


def _exact(base: str, result: Any, args: Any) -> Any:
    """Returns a bool tensor, true for elements of `result` that have no rounding error; None if unknown.
    base: name of the torch operation that computed it from `args`. A product is exact if a factor is a power of two, a
    quotient if the divisor is one, a sum or difference if a term is 0."""
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
    """True for elements of x that are plus or minus a power of two."""
    x = torch.as_tensor(x, dtype=torch.float64)
    return (x.view(torch.int64) & (2**52 - 1)) == 0  # no mantissa bits; true for 0 and infinity too
