"""Tests for overlap of strided views, from addresses and strides only; no memory is read."""

import functools

import numpy as np

from fusion_attention.acl.tensors import Tensor

# Limit of numpy's search; views are assumed to overlap if it is exceeded.
_WORK = 100_000


@functools.lru_cache(maxsize=1024)
def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True if two elements of a strided view of this shape are the same memory; strides: in elements."""
    reach, ordered = 1, True
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        ordered = ordered and stride >= reach
        reach += (size - 1) * stride
    if ordered or 0 in shape:
        return False
    reached = np.zeros(reach, bool)
    itemised = np.lib.stride_tricks.as_strided(reached, shape, strides)
    itemised[...] = True
    return int(reached.sum()) < itemised.size


class _Addressed:
    """A tensor's address and strides as numpy's array interface, for numpy.shares_memory(), which reads no elements."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.view is not None
        size = tensor.view.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.start, True),
            "typestr": f"|V{size}",
            "shape": tuple(tensor.view.shape),
            "strides": tuple(s * size for s in tensor.view.stride()),
        }


def overlap(a: Tensor, b: Tensor) -> bool:
    """True if the strided views `a` and `b` share an element (interleaved views may not), or the search is too long."""
    first, second = np.asarray(_Addressed(a)), np.asarray(_Addressed(b))
    try:
        return bool(np.shares_memory(first, second, max_work=_WORK))
    except Exception:  # The search exceeded its limit; the class of this error depends on the version of numpy.
        return True
