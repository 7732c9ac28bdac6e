"""Checks of an argument's type and memory; conversion of integers to int64 arrays, of tensor lists to tuples."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fusion_attention.contract.expressions import lazy, show
from fusion_attention.contract.record import Attr, ContractError, Failure, Op

Fault = tuple[str, str, str]  # expected, got, advice
NESTED = (
    'pass its packed rows, x.values(), with layout "TND" and the lengths x.offsets().diff() (cumulative lengths: '
    "x.offsets()[1:])"
)
TYPES = {int: "an int below 2**63", float: "a number below 2**1024", str: "a string", bool: "True or False"}


def members(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def is_memory(value: Any) -> bool:
    """True if a value is a tensor, or a tuple that contains one."""
    return isinstance(value, torch.Tensor) or (type(value) is tuple and any(isinstance(t, torch.Tensor) for t in value))


def is_number(value: Any) -> bool:
    """True for a tensor that torch accepts as a number: no dimensions, not on device meta, no gradient required."""
    return isinstance(value, torch.Tensor) and not (value.dim() or value.is_meta or value.requires_grad)


def to_array(value: Any) -> Any:
    """Returns integers (list, tuple, range, array or tensor) as a new int64 array.

    Other arrays are returned as lists, and other values unchanged, for the error texts of bind().
    """
    array = value
    try:
        if isinstance(value, torch.Tensor):
            array = value.detach().cpu().numpy()
        elif isinstance(value, (list, tuple, range)):
            array = np.asarray(value) if len(value) else np.zeros(0, np.int64)
    except Exception:  # Elements that are not numbers, or a tensor without memory: bind() reports them.
        return value
    if isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype in (np.int64, np.int32):
        # A copy, because callers may change lengths in place, while results derived from them are cached.
        return array.astype(np.int64, copy=array is value or isinstance(value, torch.Tensor))
    return value.tolist() if isinstance(value, np.ndarray) else value


def array_of(op: Op, position: int, value: Any) -> Any:
    """Returns the argument `value`, at `position` in op.params, as int64 array; None for an optional empty tensor."""
    if isinstance(value, torch.Tensor) and value.numel() == 0 and op.blank_is_absent and op.params[position].optional:
        return None
    return to_array(value)


def is_type(value: Any, p: Attr) -> bool:
    """True if `value` has the type that parameter p declares; a bool is no int."""
    wanted = p.type
    if wanted is bool or isinstance(value, bool):
        return wanted is bool and isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and -(1 << 63) <= value < 1 << (64 if p.unsigned else 63)
    return isinstance(value, wanted)


def no_tensor(value: Any, output: bool) -> Fault | None:
    """Returns (expected, actual, advice), texts of an error, for a value that is no dense tensor in memory; else None.

    output: True if the operator writes the tensor: its elements must then have separate memory.
    """
    if not isinstance(value, torch.Tensor):
        return "a tensor", show(value), ""
    if value.is_nested:
        return "a dense tensor", "a nested one", NESTED
    if value.layout != torch.strided or value.is_quantized:
        kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
        return "a dense tensor", f"a {kind} one", "to_dense() or dequantize()"
    if lazy(value):
        return "a tensor whose values are in memory", "a view that torch negates, or zeros without memory", "clone() it"
    if output and any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
        return (
            "a separate memory address for every element",
            f"strides {value.stride()}",
            "an expanded tensor cannot be written",
        )
    return None


def no_tensors(values: Any) -> Fault | None:
    """Returns (expected, actual, advice), an error's texts, for a value that is no tuple of tensors, or empty; else
    None."""
    if not isinstance(values, tuple) or not values:
        return "a tensor or a list of tensors", show(values), ""
    return next((fault for fault in (no_tensor(value, False) for value in values) if fault), None)


def trained(value: Any) -> bool:
    """True if autograd requires a gradient of a tensor, or of a tensor in a list."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in members(value) or ())


# ------------------------------------------------------------------------------------------------------------- memory


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of elements that a strided view spans in memory, from its first to its last element."""
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if all(shape) else 0


def span(tensor: torch.Tensor) -> int:
    """Returns the number of bytes that a tensor spans in memory, from its first to its last element."""
    return tensor.nbytes if tensor.is_contiguous() else reach(tensor.shape, tensor.stride()) * tensor.itemsize


def lost(tensor: torch.Tensor) -> bool:
    """True if a tensor's storage was resized and is now too small for its elements; torch checks it only for views."""
    try:
        need, offset = tensor.nbytes if tensor.is_contiguous() else span(tensor), tensor.storage_offset()
        return need > 0 and tensor.untyped_storage().nbytes() < (need + offset * tensor.itemsize if offset else need)
    except Exception:  # Sparse and nested tensors have no such storage; no_tensor() reports them.
        return False


def _loss(op: str, param: str, tensor: torch.Tensor) -> Failure:
    """Returns the Failure (error record) about a tensor with too small a storage; op, param: names for the error."""
    need = span(tensor) + tensor.storage_offset() * tensor.itemsize
    advice = "was it emptied, as FSDP does between forward and backward?"
    got = f"one of {tensor.untyped_storage().nbytes()}"
    return Failure(op, param, f"a storage that holds its elements, {need} bytes", got, advice)


def intact(op: str, names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> None:
    """Raises ContractError if the storage of a tensor is too small for its elements.

    op: the operator's name, for the error. names: the names of the tensors.
    """
    for t in tensors:
        if t is not None and lost(t):
            named = zip(names, tensors, strict=False)
            raise ContractError([_loss(op, name, t) for name, t in named if t is not None and lost(t)])


def losses(op: Op, tensors: Mapping[str, Any]) -> list[Failure]:
    """Returns an error record (Failure) for each tensor whose storage is too small for its elements; tensors: tensors
    and tuples of tensors by parameter name."""
    shown = {op.by_name[name].shown: value for name, value in tensors.items()}
    named = [
        (f"{name}[{i}]" if type(value) is tuple and len(value) > 1 else name, t)
        for name, value in shown.items()
        for i, t in enumerate(members(value))
    ]
    return [_loss(op.name, name, t) for name, t in named if lost(t)]
