"""Arguments as rules see them: host integers as int64 arrays, lists of tensors as tuples, blanks as nothing; what kind
of value each is, what came instead, and whether its memory is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fusion_attention.contract.expressions import lazy, show
from fusion_attention.contract.record import Attr, ContractError, Failure, Op

Fault = tuple[str, str, str]  # expected, got, advice
NESTED = (
    'its rows lie packed in x.values(): pass these with layout "TND" and the lengths x.offsets().diff() (packed ends: '
    "x.offsets()[1:])"
)
TYPES = {int: "an int below 2**63", float: "a number", str: "a string", bool: "True or False"}


def members(value: Any) -> Any:
    """A list of tensors as a tuple, one tensor as a tuple of one; else what came."""
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def is_memory(value: Any) -> bool:
    """Whether a value is a tensor, or holds some."""
    return isinstance(value, torch.Tensor) or (type(value) is tuple and any(isinstance(t, torch.Tensor) for t in value))


def is_number(value: Any) -> bool:
    """Whether a value is a tensor that torch takes for a number: without dimensions, and without a gradient."""
    return isinstance(value, torch.Tensor) and not (value.dim() or value.is_meta or value.requires_grad)


def to_array(value: Any) -> Any:
    """Host integers as a new int64 array, from a list, a tuple, a range, an array or a tensor; else what came."""
    array = value
    try:
        if isinstance(value, torch.Tensor):
            array = value.detach().cpu().numpy()
        elif isinstance(value, (list, tuple, range)):
            array = np.asarray(value) if len(value) else np.zeros(0, np.int64)
    except Exception:  # Elements that are no numbers, a tensor without memory: not integers, whatever else they are.
        return value
    if isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype in (np.int64, np.int32):
        # A copy: callers change lengths in place, and what follows from these is kept.
        return array.astype(np.int64, copy=array is value or isinstance(value, torch.Tensor))
    return value.tolist() if isinstance(value, np.ndarray) else value


def array_of(op: Op, position: int, value: Any) -> Any:
    """to_array() of an argument; None where it is optional and came as a tensor without elements."""
    if isinstance(value, torch.Tensor) and value.numel() == 0 and op.blank_is_absent and op.params[position].optional:
        return None
    return to_array(value)


def is_type(value: Any, p: Attr) -> bool:
    """Whether an attribute is of its record's type: an int is a float too, and no bool is a number."""
    wanted = p.type
    if wanted is bool or isinstance(value, bool):
        return wanted is bool and isinstance(value, bool)
    if wanted is float:
        return isinstance(value, (int, float))
    if wanted is int:
        return isinstance(value, int) and -(1 << 63) <= value < 1 << (64 if p.unsigned else 63)
    return isinstance(value, wanted)


def no_tensor(value: Any, output: bool) -> Fault | None:
    """What is wrong with a value that is no tensor of plain strided memory."""
    if not isinstance(value, torch.Tensor):
        return "a tensor", show(value), ""
    if value.is_nested:
        return "a dense tensor", "a nested one", NESTED
    if value.layout != torch.strided or value.is_quantized:
        kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
        return "a dense tensor", f"a {kind} one", "to_dense() or dequantize()"
    if lazy(value):
        return "a tensor whose values lie in memory", "a view that torch negates, or zeros without memory", "clone() it"
    if output and any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
        return (
            "memory of its own for every element",
            f"strides {value.stride()}",
            "an expanded tensor cannot be written",
        )
    return None


def no_tensors(values: Any) -> Fault | None:
    """What is wrong with a value that is no list of such tensors."""
    if not isinstance(values, tuple) or not values:
        return "a tensor or a list of tensors", show(values), ""
    return next((fault for fault in (no_tensor(value, False) for value in values) if fault), None)


def trained(value: Any) -> bool:
    """Whether autograd waits for a gradient of a tensor, or of one of several."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in members(value) or ())


# ------------------------------------------------------------------------------------------------------------- memory


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from a window's first one to behind its last one."""
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if all(shape) else 0


def span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last one."""
    return tensor.nbytes if tensor.is_contiguous() else reach(tensor.shape, tensor.stride()) * tensor.itemsize


def lost(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage, which may be resized under it, no longer holds its elements.

    torch asks when a view is made, and never again.
    """
    try:
        need, offset = tensor.nbytes if tensor.is_contiguous() else span(tensor), tensor.storage_offset()
        return need > 0 and tensor.untyped_storage().nbytes() < (need + offset * tensor.itemsize if offset else need)
    except Exception:  # Sparse, nested: they have no such storage; rules that need a dense tensor say so.
        return False


def _loss(op: str, param: str, tensor: torch.Tensor) -> Failure:
    need = span(tensor) + tensor.storage_offset() * tensor.itemsize
    advice = "was it emptied, as FSDP does between forward and backward?"
    got = f"one of {tensor.untyped_storage().nbytes()}"
    return Failure(op, param, f"a storage that holds its elements, {need} bytes", got, advice)


def intact(op: str, names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> None:
    """Raises where the storages of some tensors no longer hold them; names: what the tensors are called, in order."""
    for t in tensors:
        if t is not None and lost(t):
            named = zip(names, tensors, strict=False)
            raise ContractError([_loss(op, name, t) for name, t in named if t is not None and lost(t)])


def losses(op: Op, tensors: Mapping[str, Any]) -> list[Failure]:
    """The failures of all tensors, and lists of tensors, by canonical name, that are lost()."""
    shown = {op.by_name[name].shown: value for name, value in tensors.items()}
    named = [
        (f"{name}[{i}]" if type(value) is tuple and len(value) > 1 else name, t)
        for name, value in shown.items()
        for i, t in enumerate(members(value))
    ]
    return [_loss(op.name, name, t) for name, t in named if lost(t)]
