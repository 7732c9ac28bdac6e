"""Handles of operator arguments (tensors in device memory, int arrays, tensor lists), and CANN's dtypes and formats.

A handle exists until it is destroyed or no longer referenced. Strides and offsets count elements.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fusion_attention.acl.state import STATE, Memory, Refusal, checked, coded, integer
from fusion_attention.contract import INVALID, NULL_POINTER, reach, span


class DataType(enum.IntEnum):
    """The dtypes of tensors with CANN's numbers (aclDataType)."""

    ACL_DT_UNDEFINED = -1
    ACL_FLOAT = 0
    ACL_FLOAT16 = 1
    ACL_INT8 = 2
    ACL_INT32 = 3
    ACL_UINT8 = 4
    ACL_INT16 = 6
    ACL_UINT16 = 7
    ACL_UINT32 = 8
    ACL_INT64 = 9
    ACL_UINT64 = 10
    ACL_DOUBLE = 11
    ACL_BOOL = 12
    ACL_STRING = 13
    ACL_COMPLEX64 = 16
    ACL_COMPLEX128 = 17
    ACL_BF16 = 27
    ACL_INT4 = 29
    ACL_UINT1 = 30
    ACL_COMPLEX32 = 33
    ACL_HIFLOAT8 = 34
    ACL_FLOAT8_E5M2 = 35
    ACL_FLOAT8_E4M3FN = 36


class Format(enum.IntEnum):
    """The memory formats of tensors with CANN's numbers (aclFormat)."""

    ACL_FORMAT_UNDEFINED = -1
    ACL_FORMAT_NCHW = 0
    ACL_FORMAT_NHWC = 1
    ACL_FORMAT_ND = 2
    ACL_FORMAT_NC1HWC0 = 3
    ACL_FORMAT_FRACTAL_Z = 4
    ACL_FORMAT_NC1HWC0_C04 = 12
    ACL_FORMAT_HWCN = 16
    ACL_FORMAT_NDHWC = 27
    ACL_FORMAT_FRACTAL_NZ = 29
    ACL_FORMAT_NCDHW = 30
    ACL_FORMAT_NDC1HWC0 = 32
    ACL_FRACTAL_Z_3D = 33
    ACL_FORMAT_NC = 35
    ACL_FORMAT_NCL = 47


# Formats with row-major memory; the others have the element order of the chip's matrix unit.
STRIDED_FORMATS = frozenset(
    getattr(Format, f"ACL_FORMAT_{name}") for name in ("ND", "NCHW", "NHWC", "HWCN", "NDHWC", "NCDHW", "NC", "NCL")
)
TORCH_DTYPES = {
    DataType.ACL_FLOAT: torch.float32,
    DataType.ACL_FLOAT16: torch.float16,
    DataType.ACL_BF16: torch.bfloat16,
    DataType.ACL_DOUBLE: torch.float64,
    DataType.ACL_INT8: torch.int8,
    DataType.ACL_UINT8: torch.uint8,
    DataType.ACL_INT16: torch.int16,
    DataType.ACL_UINT16: torch.uint16,
    DataType.ACL_INT32: torch.int32,
    DataType.ACL_UINT32: torch.uint32,
    DataType.ACL_INT64: torch.int64,
    DataType.ACL_UINT64: torch.uint64,
    DataType.ACL_BOOL: torch.bool,
    DataType.ACL_COMPLEX64: torch.complex64,
    DataType.ACL_COMPLEX128: torch.complex128,
    DataType.ACL_FLOAT8_E5M2: torch.float8_e5m2,
    DataType.ACL_FLOAT8_E4M3FN: torch.float8_e4m3fn,
}
_LARGEST = (1 << 63) - 1
ACL_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Tensor:
    """aclTensor: a handle on a strided view of device memory.

    Attributes:
        view: a torch tensor on the memory; None after destruction.
        dtype, format: dtype and memory format given at its creation; is_strided: True if the format is row-major.
        offset: elements from the given address to the view's first element.
        memory: the allocation that contains the view.
        start, stop: address of the view's first byte, and the address behind its last byte.
        needs: least size of the storage in bytes.
    """

    __slots__ = ("__weakref__", "dtype", "format", "is_strided", "memory", "needs", "offset", "start", "stop", "view")

    def __init__(self, view: torch.Tensor, dtype: DataType, format: Format, offset: int, memory: Memory) -> None:
        self.dtype, self.format, self.offset, self.is_strided = dtype, format, offset, format in STRIDED_FORMATS
        self._attach(view, memory)

    def _attach(self, view: torch.Tensor, memory: Memory) -> None:
        self.view: torch.Tensor | None = view
        self.memory = memory
        self.start = view.data_ptr()
        size = span(view)
        self.stop = self.start + size
        self.needs = size and size + view.storage_offset() * view.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor, format: Format = Format.ACL_FORMAT_ND) -> Tensor:
        """Makes an aclTensor handle on a torch tensor, with its strides, and keeps the tensor's memory alive.

        Args:
            tensor: a tensor with a dtype of CANN.
            format: the memory format that the handle reports.

        Returns:
            the handle; it exists until destroy_tensor() or its last reference.

        Example:
            >>> Tensor.of(torch.zeros(2, 3)).dtype.name
            'ACL_FLOAT'
        """
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in ACL_DTYPES:
            raise TypeError(
                f"expected a torch tensor of a dtype that CANN has, got {getattr(tensor, 'dtype', tensor)!r}"
            )
        return cls(tensor.detach(), ACL_DTYPES[tensor.dtype], format, 0, _memory_of(tensor.untyped_storage()))

    @property
    def alive(self) -> bool:
        """True if neither the handle was destroyed nor its memory freed."""
        return self.view is not None and self.memory.alive

    @property
    def lost(self) -> bool:
        """True if the storage of the handle's torch tensor was resized and is now too small for its elements."""
        return self.view is not None and self.view.untyped_storage().nbytes() < self.needs

    def destroy(self) -> None:
        """Destroys the handle; the tensor's memory stays allocated."""
        self.view = None

    def move(self, data: Any) -> None:
        """Makes the handle's view use the memory `data` (an address, torch tensor or storage); raises Refusal, and
        changes nothing, if the memory is too small."""
        assert self.view is not None
        memory, first = _storage(data, self.view.element_size())
        self._attach(_window(memory, self.view.dtype, self.view.shape, self.view.stride(), first + self.offset), memory)

    def __repr__(self) -> str:
        if self.view is None:
            return "acl.Tensor(destroyed)"
        return f"acl.Tensor({self.dtype.name}, {list(self.view.shape)}, strides={list(self.view.stride())})"


class IntArray:
    """aclIntArray: int64 values on the host; None after destruction."""

    __slots__ = ("values",)

    def __init__(self, values: np.ndarray) -> None:
        self.values: np.ndarray | None = values

    def __repr__(self) -> str:
        return f"acl.IntArray({'destroyed' if self.values is None else self.values.tolist()})"


class TensorList:
    """aclTensorList: a tuple of tensors that are destroyed together with the list; None after destruction."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors: tuple[Tensor, ...] | None = tensors


# ------------------------------------------------------------------------------------------------------------- memory


def _memory_of(storage: torch.UntypedStorage) -> Memory:
    """Returns a Memory (record of an allocation) with a torch storage's bytes, not copied; keeps the storage alive."""
    return Memory(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), host=False)


def _storage(data: Any, itemsize: int) -> tuple[Memory, int]:
    """Returns (allocation that contains `data`, an address, tensor or storage; index of its first element there)."""
    if isinstance(data, torch.Tensor):
        memory, start = _memory_of(data.untyped_storage()), data.storage_offset() * data.element_size()
    elif isinstance(data, torch.UntypedStorage):
        memory, start = _memory_of(data), 0
    else:
        address = integer(0 if data is None else data, "data", INVALID)
        if address == 0:
            raise Refusal(NULL_POINTER, "data: expected an address, got null")
        memory, start = STATE.find(address)
        if memory.host:
            raise Refusal(INVALID, f"data: {address:#x} is host memory")
    if start % itemsize:
        raise Refusal(INVALID, f"data: expected memory aligned to {itemsize} bytes, got byte {start} of an allocation")
    return memory, start // itemsize


def _window(
    memory: Memory, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], first: int
) -> torch.Tensor:
    """Returns a strided view of an allocation from element `first` on; raises Refusal if it exceeds the allocation."""
    size, count = dtype.itemsize, memory.bytes.numel()
    stop = (first + reach(shape, strides)) * size
    if stop > count:
        raise Refusal(INVALID, f"data: the view ends at byte {stop} of an allocation of {count}")
    return memory.bytes[: count // size * size].view(dtype).as_strided(tuple(shape), tuple(strides), first)


# ------------------------------------------------------------------------------------------------------------ handles


def _sizes(values: Any, name: str) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple, torch.Size, np.ndarray)):
        raise Refusal(INVALID, f"{name}: expected a sequence of ints, got {type(values).__name__}")
    sizes = tuple(integer(value, name, INVALID) for value in values)
    if any(size < 0 for size in sizes):
        raise Refusal(INVALID, f"{name}: expected no negative number, got {list(sizes)}")
    return sizes


def _number(kind: type[enum.IntEnum], value: Any, name: str) -> Any:
    try:
        return kind(integer(value, name, INVALID))
    except ValueError:
        raise Refusal(INVALID, f"{name}: {value!r} is no {kind.__name__} of CANN") from None


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a contiguous tensor of a shape."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = shape[axis + 1] * strides[axis + 1]
    return tuple(strides)


@checked
def create_tensor(
    view_shape: Sequence[int],
    dtype: int | torch.dtype,
    strides: Sequence[int] | None = None,
    offset: int = 0,
    format: int = Format.ACL_FORMAT_ND,
    storage_shape: Sequence[int] | None = None,
    data: Any = None,
) -> Tensor:
    """aclCreateTensor: makes a strided view of device memory.

    Args:
        view_shape: sizes of the view.
        dtype: a DataType, or the torch dtype.
        strides: in elements, none negative; None: contiguous.
        offset: elements from data to the first one.
        format: a Format; operators accept the row-major ones.
        storage_shape: sizes of the memory that must contain the view; None: all of data.
        data: an address from acl.rt.malloc (or inside such memory), a torch tensor or a torch storage.

    Returns:
        the handle, or None for invalid arguments; acl.get_recent_err_msg() has the reason.

    Example:
        >>> from fusion_attention import acl
        >>> acl.init(), acl.rt.set_device(3)
        (0, 0)
        >>> address, ret = acl.rt.malloc(24)
        >>> acl.create_tensor((2, 3), acl.ACL_FLOAT, (1, 2), 0, acl.ACL_FORMAT_ND, (6,), address)
        acl.Tensor(ACL_FLOAT, [2, 3], strides=[1, 2])
        >>> acl.finalize()
        0
    """
    shape = _sizes(view_shape, "view_shape")
    steps = contiguous_strides(shape) if strides is None else _sizes(strides, "strides")
    number = ACL_DTYPES.get(dtype) if isinstance(dtype, torch.dtype) else _number(DataType, dtype, "dtype")
    if number not in TORCH_DTYPES:
        raise Refusal(INVALID, f"dtype: {dtype if number is None else number.name} cannot be computed with here")
    first = integer(offset, "offset", INVALID)
    if len(steps) != len(shape) or first < 0:
        got = f"{len(steps)} strides, offset {first}"
        raise Refusal(INVALID, f"strides: expected {len(shape)} of them and an offset >= 0, got {got}")
    if max(math.prod(max(n, 1) for n in shape), *steps, 0) > _LARGEST:
        got = f"{list(shape)} with strides {list(steps)}"
        raise Refusal(INVALID, f"view_shape: expected fewer elements than 64 bits can count, got {got}")
    tag = _number(Format, format, "format")
    torch_dtype = TORCH_DTYPES[number]
    memory, base = _storage(data, torch_dtype.itemsize)
    if storage_shape is not None:
        buffer = int(np.prod(_sizes(storage_shape, "storage_shape"), dtype=object))
        stop = reach(shape, steps)
        if stop and first + stop > buffer:
            raise Refusal(INVALID, f"view_shape: the view ends at element {first + stop} of a storage of {buffer}")
        _window(memory, torch_dtype, (buffer,), (1,), base)
    return Tensor(_window(memory, torch_dtype, shape, steps, base + first), number, tag, first, memory)


@checked
def create_int_array(values: Sequence[int]) -> IntArray:
    """aclCreateIntArray: makes an array of int64 values on the host; returns None for other values.

    Example:
        >>> from fusion_attention import acl
        >>> acl.init()
        0
        >>> acl.create_int_array([3, 8])
        acl.IntArray([3, 8])
        >>> acl.finalize()
        0
    """
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise Refusal(INVALID, f"values: expected a sequence of ints, got {type(values).__name__}")
    numbers = [integer(value, "values", INVALID) for value in values]
    try:
        return IntArray(np.array(numbers, np.int64))
    except OverflowError:
        raise Refusal(INVALID, "values: expected int64, got a larger one") from None


@checked
def create_tensor_list(tensors: Sequence[Tensor]) -> TensorList:
    """aclCreateTensorList: makes a list that owns its tensors and destroys them; None if one is not a tensor."""
    if not isinstance(tensors, (list, tuple)):
        raise Refusal(INVALID, f"tensors: expected a sequence of tensors, got {type(tensors).__name__}")
    return TensorList(tuple(_owned(tensor, Tensor, "view", f"tensors[{i}]") for i, tensor in enumerate(tensors)))


def _owned(value: Any, kind: type, owned: str, name: str) -> Any:
    """Returns the handle `value`; raises Refusal if it is not of class `kind` or was destroyed, which sets its
    attribute `owned` to None. name: the argument's name in the error text."""
    if value is None:
        raise Refusal(NULL_POINTER, f"{name}: expected an acl.{kind.__name__}, got null")
    if not isinstance(value, kind):
        raise Refusal(INVALID, f"{name}: expected an acl.{kind.__name__}, got {type(value).__name__}")
    if getattr(value, owned) is None:
        raise Refusal(INVALID, f"{name}: destroyed before")
    return value


@coded
def destroy_tensor(tensor: Tensor) -> None:
    """aclDestroyTensor: destroys a handle, not its memory; returns an error code."""
    _owned(tensor, Tensor, "view", "tensor").destroy()


@coded
def destroy_int_array(array: IntArray) -> None:
    """aclDestroyIntArray: destroys an array; returns an error code."""
    _owned(array, IntArray, "values", "array").values = None


@coded
def destroy_tensor_list(tensors: TensorList) -> None:
    """aclDestroyTensorList: destroys a list and its tensors; returns an error code."""
    owned = _owned(tensors, TensorList, "tensors", "tensors")
    for tensor in owned.tensors:
        tensor.destroy()
    owned.tensors = None
