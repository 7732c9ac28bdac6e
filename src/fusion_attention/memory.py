"""Allocation of results, scratch memory and caches: large tensors request huge pages, large results reuse memory.

The first write to each page of 4 KiB is a page fault, which takes a quarter of a microsecond or more; 32 MiB have 8192
pages. With huge pages a fault covers 2 MiB, but clearing one can take a millisecond under a hypervisor. Large results
therefore come from a free list by size, to which a block returns when its storage is freed. Free blocks larger than
128 MiB are marked MADV_FREE, so that the system can reclaim their memory.
"""

import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Sequence

import torch

# Least bytes of a tensor that requests huge pages, since it contains complete ones. Smaller blocks are reused by the
# allocator.
LARGE = 4 << 20
# Maximum total of the free blocks up to this size, in bytes: an output of 32 MiB and its three gradients.
IDLE = 128 << 20
# Maximum total of the larger free blocks, which the system can reclaim, in bytes.
LENDABLE = 1 << 30
_HUGE_PAGE = 2 << 20
_MADV_FREE, _MADV_HUGEPAGE = 8, 14
# Free blocks by address, the oldest first. Operations of a dictionary are atomic, so threads and finalizers need no
# lock, which a fork could leave locked.
_idle: dict[int, torch.Tensor] = {}


def empty(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocates an uninitialized tensor like like.new_empty(shape, dtype=dtype), from the free list if it is large."""
    return _ready(like.new_empty(shape, dtype=dtype))


def template(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a view [shape] of one element, from which another() allocates tensors twice as fast as empty()."""
    return like.new_empty(1, dtype=dtype).expand(shape)


def another(template: torch.Tensor) -> torch.Tensor:
    """Allocates an uninitialized contiguous tensor of the template's shape and dtype, from a free list if large."""
    return _ready(torch.empty_like(template, memory_format=torch.contiguous_format))


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Allocates zeros for long-lived memory such as caches; large ones request huge pages, which reduces TLB misses."""
    fresh = torch.empty(shape, dtype=dtype, device=device)
    if type(fresh) is torch.Tensor and fresh.is_cpu and fresh.nbytes >= LARGE:
        _ask(fresh)
    return fresh.zero_()


def of_machine() -> tuple[int, int]:
    """Returns (free, total) bytes of the machine's memory; macOS does not tell Python its free pages: free is total."""
    if sys.platform == "win32":
        # MEMORYSTATUSEX has 64 bytes: its size and the load in four bytes each, then the total, the free bytes, others.
        status = (ctypes.c_uint64 * 8)(64)
        ctypes.windll.kernel32.GlobalMemoryStatusEx(status)
        return status[2], status[1]
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    free = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else pages
    return page * min(free, pages), page * pages


def _ready(fresh: torch.Tensor) -> torch.Tensor:
    # All allocations pass here, so tests can fill them with NaN. Tensors of a trace have another type and no memory.
    if type(fresh) is torch.Tensor and fresh.is_cpu and fresh.nbytes >= LARGE:
        if fresh.nbytes <= (IDLE if _advise is None else LENDABLE):  # Nothing wrote the memory that this replaces.
            fresh.set_(_lent(fresh.nbytes), 0, fresh.shape, fresh.stride())
        else:
            _ask(fresh)
    return fresh


def _lent(size: int) -> torch.UntypedStorage:
    """Returns a storage of `size` bytes that cannot be resized; when it is freed, its memory joins the free list."""
    block = _taken(size)
    if block is None:
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
        _ask(block)
    array = block.numpy()  # Only the storage refers to this object.
    weakref.finalize(array, _give_back, block).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8).untyped_storage()


def _taken(size: int) -> torch.Tensor | None:
    """Removes memory of `size` bytes from the free list and returns it; None if there is none."""
    for place, block in _idle.copy().items():
        if block.nbytes == size and _idle.pop(place, None) is not None:
            return block
    return None


def _give_back(block: torch.Tensor) -> None:
    freed = block.nbytes > IDLE
    if freed:  # Pages that the system does not reclaim are written without a fault.
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
    # Gives the advice for the complete huge pages inside the memory; the system may ignore it.
    if _advise is not None:
        first = -(-memory.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        end = (memory.data_ptr() + memory.nbytes) // _HUGE_PAGE * _HUGE_PAGE
        _advise(first, end - first, advice)


def _adviser() -> Callable[[int, int, int], int] | None:
    """Returns the C library's function madvise(address, bytes, advice) on Linux; None on other systems."""
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


_advise = _adviser()
