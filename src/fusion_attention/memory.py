"""Memory for results: torch's own, which asks for huge pages where it is large.

A fresh tensor has no pages until someone writes them, and each first write of 4 KiB is a fault: a quarter of a
microsecond and more, 8192 times for 32 MiB. Where the system hands out huge pages on request, one fault serves 2 MiB.
Refuses to know what is stored.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence

import torch

# Bytes from which a tensor asks: whole huge pages surely lie in it. Smaller ones come from memory that is in use again
# and again anyway.
LARGE = 4 << 20
_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


def empty(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """like.new_empty(shape, dtype=dtype), ready to be written all over."""
    return _ready(like.new_empty(shape, dtype=dtype))


def template(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What another() makes such memory from, in half the time: one element in every place."""
    return like.new_empty(1, dtype=dtype).expand(shape)


def another(template: torch.Tensor) -> torch.Tensor:
    """empty() of a template's shape and dtype."""
    return _ready(torch.empty_like(template, memory_format=torch.contiguous_format))


def _ready(fresh: torch.Tensor) -> torch.Tensor:
    # The tensors of a trace have another type, and no memory.
    if _advise is not None and type(fresh) is torch.Tensor and fresh.is_cpu and fresh.nbytes >= LARGE:
        first = -(-fresh.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        end = (fresh.data_ptr() + fresh.nbytes) // _HUGE_PAGE * _HUGE_PAGE
        _advise(first, end - first, _MADV_HUGEPAGE)  # A wish: nothing depends on its being granted.
    return fresh


def _adviser() -> Callable[[int, int, int], int] | None:
    """The C library's madvise(), where its advice means this."""
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


_advise = _adviser()
