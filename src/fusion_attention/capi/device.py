"""Device memory for the C library libascendcl (CANN's runtime API), allocated by torch and addressed by numbers.

Arguments and results are numbers, failures are exceptions. The C library validates addresses before it calls.
"""

import ctypes

import torch

from fusion_attention.acl.state import Memory, State
from fusion_attention.memory import of_machine

# Values of aclrtMemcpyKind with the source, and with the target, on the device.
_FROM_DEVICE, _TO_DEVICE = (2, 3), (1, 3)


class DeviceMemory:
    """Memory of one torch device ("cpu" or "cuda" with an optional index) for the C library: allocation, copies."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        if self._device.type not in ("cpu", "cuda"):
            raise ValueError(f"device: expected cpu or cuda, got {device}")
        if self._device.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if (self._device.index or 0) >= count:
                raise ValueError(f"device: expected one of the {count} that torch sees, got {device}")
        self._state = State()

    def allocate(self, size: int) -> int:
        """Allocates `size` bytes and returns their address."""
        return self._state.add(Memory(torch.empty(size, dtype=torch.uint8, device=self._device), host=False))

    def release(self, address: int) -> int:
        """Frees the memory at an address that allocate() returned; returns 0, the code of success."""
        self._state.remove(address)
        return 0

    def copy(self, target: int, source: int, count: int, kind: int) -> int:
        """Copies `count` bytes between addresses; kind: the direction (host or device to host or device) as CANN's
        aclrtMemcpyKind; returns 0, the code of success."""
        if count:
            to, what = self._bytes(target, count, kind in _TO_DEVICE), self._bytes(source, count, kind in _FROM_DEVICE)
            # torch does not define a copy between overlapping ranges.
            to.copy_(what.clone() if to.device == what.device else what)
        return 0

    def set(self, address: int, value: int, count: int) -> int:
        """Sets `count` bytes on the device to a value; returns 0, the code of success."""
        self._bytes(address, count, True).fill_(value & 0xFF)
        return 0

    def synchronize(self) -> int:
        """Waits until the device has finished its work; returns 0, the code of success."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return 0

    def total(self) -> int:
        """Returns the size of the device's memory in bytes."""
        if self._device.type == "cuda":
            return int(torch.cuda.get_device_properties(self._device).total_memory)
        return of_machine()[1]

    def _bytes(self, address: int, count: int, on_device: bool) -> torch.Tensor:
        if not on_device:
            return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)
        memory, start = self._state.find(address)
        return memory.bytes[start : start + count]
