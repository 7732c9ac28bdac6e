"""acl.util of pyACL, CANN's Python binding: conversion between host data and addresses, which keep their data alive."""

import numpy as np

from fusion_attention.acl.rt import Pointer, bytes_at
from fusion_attention.acl.state import Refusal, checked


def _pointer(owner: object, address: int) -> Pointer:
    pointer = Pointer(address)
    pointer.owner = owner
    return pointer


@checked
def numpy_to_ptr(array: np.ndarray) -> Pointer:
    """Returns the address of a contiguous array's data; None for other objects.

    Example:
        >>> from fusion_attention import acl
        >>> acl.init()
        0
        >>> acl.util.ptr_to_bytes(acl.util.numpy_to_ptr(np.array([1, 2], np.uint8)), 2)
        b'\\x01\\x02'
        >>> acl.finalize()
        0
    """
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise Refusal(100000, "array: expected a C-contiguous numpy array")
    return _pointer(array, array.ctypes.data)


@checked
def bytes_to_ptr(data: bytes) -> Pointer:
    """Returns the address of the data of a bytes object; None for other objects."""
    if not isinstance(data, bytes):
        raise Refusal(100000, f"data: expected bytes, got {type(data).__name__}")
    return _pointer(data, np.frombuffer(data, np.uint8).ctypes.data if data else 1)


@checked
def ptr_to_bytes(pointer: int, size: int) -> bytes:
    """Returns a copy of `size` bytes of host memory at the address `pointer`; None if the allocation is smaller."""
    memory, on_host = bytes_at(pointer, size)
    if not on_host:
        raise Refusal(107000, "pointer: device memory; acl.rt.memcpy brings it to the host")
    return memory.numpy().tobytes()
