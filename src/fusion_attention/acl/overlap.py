"""Whether windows of memory share an element; addresses and strides alone say it, no memory is read."""

from __future__ import annotations

import functools

import numpy as np

from fusion_attention.acl.tensors import Tensor

# Beyond this much of numpy's search two windows count as sharing memory.
_WORK = 100_000


@functools.lru_cache(maxsize=1024)
def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True if two elements of a strided window are the same memory."""
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
    """Memory at an address for numpy to compare, never to read."""

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
    """True if two windows have an element in common; interleaved ones may have none."""
    first, second = np.asarray(_Addressed(a)), np.asarray(_Addressed(b))
    try:
        return bool(np.shares_memory(first, second, max_work=_WORK))
    except Exception:  # Too hard to tell; the class that says so moved between versions of numpy.
        return True
