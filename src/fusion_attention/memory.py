"""Memory for results, scratch and caches: torch's own, which asks for huge pages where it is large; that of results
serves again when it is given back.

A fresh tensor has no pages until someone writes them, and each first write of 4 KiB is a fault: a quarter of a
microsecond and more, 8192 times for 32 MiB. Where the system hands out huge pages on request, one fault serves 2 MiB;
but they are cleared one by one, and under a hypervisor that can take a millisecond each. So large
results come from a free list by size: a block returns when its storage dies. Free blocks over 128 MiB are marked
MADV_FREE, so the system may take them.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Sequence

import torch

# Bytes from which a tensor asks: whole huge pages surely lie in it. Smaller ones come from memory that is in use again
# and again anyway.
LARGE = 4 << 20
# Bytes that wait to be lent again, at most: an output of 32 MiB and its three gradients.
IDLE = 128 << 20
# The same of those larger than that, where the system may take what waits.
LENDABLE = 1 << 30
_HUGE_PAGE = 2 << 20
_MADV_FREE, _MADV_HUGEPAGE = 8, 14
# By address, the first given back first. A dictionary's own operations are atomic: threads, and storages that die at
# any time, need no lock, which a fork could leave locked.
_idle: dict[int, torch.Tensor] = {}


def empty(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """like.new_empty(shape, dtype=dtype), ready to be written all over."""
    return _ready(like.new_empty(shape, dtype=dtype))


def template(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What another() makes such memory from, in half the time: one element in every place."""
    return like.new_empty(1, dtype=dtype).expand(shape)


def another(template: torch.Tensor) -> torch.Tensor:
    """empty() of a template's shape and dtype."""
    return _ready(torch.empty_like(template, memory_format=torch.contiguous_format))


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """torch.zeros for memory that stays, as a cache does; with the same advice: a read of all of it waits less often
    for the tables of addresses."""
    fresh = torch.empty(shape, dtype=dtype, device=device)
    if type(fresh) is torch.Tensor and fresh.is_cpu and fresh.nbytes >= LARGE:
        _ask(fresh)
    return fresh.zero_()


def _ready(fresh: torch.Tensor) -> torch.Tensor:
    # All that is given out comes through here, where tests poison it. The tensors of a trace have another type, and no
    # memory.
    if type(fresh) is torch.Tensor and fresh.is_cpu and fresh.nbytes >= LARGE:
        if fresh.nbytes <= (IDLE if _advise is None else LENDABLE):  # Its memory was not touched: it costs nothing.
            fresh.set_(_lent(fresh.nbytes), 0, fresh.shape, fresh.stride())
        else:
            _ask(fresh)
    return fresh


def _lent(size: int) -> torch.UntypedStorage:
    """A storage of so many bytes, which cannot be resized; its memory is given back when it dies."""
    block = _taken(size)
    if block is None:
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
        _ask(block)
    array = block.numpy()  # Only the storage holds this object.
    weakref.finalize(array, _give_back, block).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8).untyped_storage()


def _taken(size: int) -> torch.Tensor | None:
    """Idle memory of so many bytes, which is then the caller's."""
    for place, block in _idle.copy().items():
        if block.nbytes == size and _idle.pop(place, None) is not None:
            return block
    return None


def _give_back(block: torch.Tensor) -> None:
    freed = block.nbytes > IDLE
    if freed:  # Until the system takes them its pages stay, and a write finds them without a fault.
        _tell(block, _MADV_FREE)
    _idle[block.data_ptr()] = block
    idle = {place: block for place, block in _idle.copy().items() if (block.nbytes > IDLE) == freed}
    left, most = sum(block.nbytes for block in idle.values()), LENDABLE if freed else IDLE
    for place, block in idle.items():
        if left > most and _idle.pop(place, None) is not None:
            left -= block.nbytes


def _ask(fresh: torch.Tensor) -> None:
    _tell(fresh, _MADV_HUGEPAGE)


def _tell(memory: torch.Tensor, advice: int) -> None:
    # Of the whole huge pages. A wish: nothing depends on its being granted.
    if _advise is not None:
        first = -(-memory.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        end = (memory.data_ptr() + memory.nbytes) // _HUGE_PAGE * _HUGE_PAGE
        _advise(first, end - first, advice)


def _adviser() -> Callable[[int, int, int], int] | None:
    """The C library's madvise(), where its advice means this."""
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


_advise = _adviser()
