"""Memory of a device that torch allocates, at plain addresses: what the C library libascendcl has it from where the
device is not the host's own.

Numbers in, numbers out; what goes wrong is an exception. Which addresses a program may use, the library has checked.
"""

from __future__ import annotations

import ctypes
import os

import torch

from fusion_attention.acl.state import Memory, State

# Of aclrtMemcpyKind: which ends lie on the device.
_FROM_DEVICE, _TO_DEVICE = (2, 3), (1, 3)


class DeviceMemory:
    """One device's memory; device: as torch names it."""

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
        """The address of new bytes."""
        return self._state.add(Memory(torch.empty(size, dtype=torch.uint8, device=self._device), host=False))

    def release(self, address: int) -> int:
        """Gives an allocation back."""
        self._state.remove(address)
        return 0

    def copy(self, target: int, source: int, count: int, kind: int) -> int:
        """Copies bytes; kind: aclrtMemcpyKind."""
        if count:
            to, what = self._bytes(target, count, kind in _TO_DEVICE), self._bytes(source, count, kind in _FROM_DEVICE)
            # torch does not say what a copy does whose ends overlap.
            to.copy_(what.clone() if to.device == what.device else what)
        return 0

    def set(self, address: int, value: int, count: int) -> int:
        """Sets bytes of the device to a value."""
        self._bytes(address, count, True).fill_(value & 0xFF)
        return 0

    def synchronize(self) -> int:
        """Waits for the device's work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return 0

    def total(self) -> int:
        """Bytes that the device has."""
        if self._device.type == "cuda":
            return int(torch.cuda.get_device_properties(self._device).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def _bytes(self, address: int, count: int, on_device: bool) -> torch.Tensor:
        if not on_device:
            return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)
        memory, start = self._state.find(address)
        return memory.bytes[start : start + count]
