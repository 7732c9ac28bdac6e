"""acl.rt of pyACL (Huawei's runtime for Ascend chips), emulated: devices, contexts, streams and memory.

Functions return (value, ret) or ret, an error code, 0 for success. Eight device ids share the device of acl.init().
Streams are synchronous. Addresses are ints; one outside all allocations is an error and is never accessed.

    >>> from fusion_attention import acl
    >>> acl.init(), acl.rt.set_device(0)
    (0, 0)
    >>> address, ret = acl.rt.malloc(64, acl.ACL_MEM_MALLOC_HUGE_FIRST)
    >>> acl.rt.memcpy(address, 64, bytes(64), 64, acl.ACL_MEMCPY_HOST_TO_DEVICE)
    0
    >>> acl.rt.free(address), acl.finalize()
    (0, 0)
"""

import enum
from typing import Any

import numpy as np
import torch

from fusion_attention.acl import state
from fusion_attention.acl.state import STATE, Context, Memory, Refusal, Stream, coded, integer, valued
from fusion_attention.contract import lost
from fusion_attention.memory import of_machine

RT = state.RT_INVALID_PARAM


class MallocPolicy(enum.IntEnum):
    """Policies of memory allocation (aclrtMemMallocPolicy), accepted without effect."""

    ACL_MEM_MALLOC_HUGE_FIRST = 0
    ACL_MEM_MALLOC_HUGE_ONLY = 1
    ACL_MEM_MALLOC_NORMAL_ONLY = 2


class MemcpyKind(enum.IntEnum):
    """The direction of a copy between host and device (aclrtMemcpyKind)."""

    ACL_MEMCPY_HOST_TO_HOST = 0
    ACL_MEMCPY_HOST_TO_DEVICE = 1
    ACL_MEMCPY_DEVICE_TO_HOST = 2
    ACL_MEMCPY_DEVICE_TO_DEVICE = 3


class RunMode(enum.IntEnum):
    """The place where the program runs (aclrtRunMode): the host or the device."""

    ACL_DEVICE = 0
    ACL_HOST = 1


# ------------------------------------------------------------------------------------------------------------ devices


def _device_id(value: Any) -> int:
    number = integer(value, "device_id", state.RT_INVALID_DEVICE)
    if not 0 <= number < state.DEVICE_COUNT:
        raise Refusal(state.RT_INVALID_DEVICE, f"device_id: expected 0 to {state.DEVICE_COUNT - 1}, got {number}")
    return number


def _current() -> Context:
    if STATE.context is None or not STATE.context.open:
        raise Refusal(state.RT_CONTEXT_NULL, "no device: call acl.rt.set_device(device_id) first")
    return STATE.context


@coded
def set_device(device_id: int) -> None:
    """Makes a device id current, with its default context; returns an error code."""
    number = _device_id(device_id)
    STATE.context = STATE.contexts.setdefault(number, [Context(number)])[0]


@coded
def reset_device(device_id: int) -> None:
    """Destroys all contexts and streams of a device id; memory stays until it is freed. Returns an error code."""
    number = _device_id(device_id)
    if number not in STATE.contexts:
        raise Refusal(state.RT_CONTEXT_NULL, f"device_id: {number} is not in use (acl.rt.set_device was not called)")
    for context in STATE.contexts.pop(number):
        context.open = False


@valued(-1)
def get_device() -> int:
    """Returns (device id of the current context, error code)."""
    return _current().device_id


@valued(0)
def get_device_count() -> int:
    """The number of device ids, always 8: (8, error code)."""
    return state.DEVICE_COUNT


@valued(-1)
def get_run_mode() -> RunMode:
    """Returns (RunMode.ACL_HOST, error code): the program runs on the host, even if the emulated device is the CPU."""
    return RunMode.ACL_HOST


@coded
def synchronize_device() -> None:
    """Waits until all work on the current device is complete; returns an error code."""
    _current()
    _wait()


def _wait() -> None:
    if STATE.device is not None and STATE.device.type == "cuda":
        torch.cuda.synchronize(STATE.device)


# ----------------------------------------------------------------------------------------------- contexts and streams


def _handle(value: Any, kind: type[Context] | type[Stream], name: str) -> Any:
    """Returns `value`, a context or stream; raises Refusal if it is not of class `kind`, or was destroyed. name: the
    argument's name in the error text."""
    if not isinstance(value, kind):
        raise Refusal(state.INVALID_PARAM, f"{name}: expected an acl {kind.__name__}, got {type(value).__name__}")
    if not value.usable:
        raise Refusal(state.RT_INVALID_HANDLE, f"{name}: destroyed, or its device was reset")
    return value


@valued()
def create_context(device_id: int) -> Context:
    """Makes a context on a device id, and makes it current; returns (the new context, error code)."""
    number = _device_id(device_id)
    STATE.context = Context(number)
    STATE.contexts.setdefault(number, [Context(number)]).append(STATE.context)
    return STATE.context


@coded
def destroy_context(context: Context) -> None:
    """Ends a context and its streams; returns an error code."""
    _handle(context, Context, "context").open = False


@coded
def set_context(context: Context) -> None:
    """Makes a context current; returns an error code."""
    STATE.context = _handle(context, Context, "context")


@valued()
def get_context() -> Context:
    """Returns (the current context, error code)."""
    return _current()


@valued()
def create_stream() -> Stream:
    """Makes a stream in the current context; returns (the new stream, error code)."""
    return Stream(_current())


@coded
def destroy_stream(stream: Stream) -> None:
    """Ends a stream; returns an error code."""
    _handle(stream, Stream, "stream").open = False


@coded
def synchronize_stream(stream: Stream | None) -> None:
    """Waits for a stream's work (None or 0: the default stream); returns an error code."""
    check_stream(stream)
    _wait()


def check_stream(stream: Any) -> None:
    """Raises Refusal for a stream that is destroyed or not a stream; None and 0 are the default stream."""
    if stream is None or (isinstance(stream, int) and stream == 0):
        _current()
    else:
        _handle(stream, Stream, "stream")


# ------------------------------------------------------------------------------------------------------------- memory


def _allocate(size: Any, device: torch.device | None, host: bool) -> int:
    count = integer(size, "size")
    if count <= 0:
        raise Refusal(state.INVALID_PARAM, f"size: expected bytes > 0, got {count}")
    try:
        memory = torch.empty(count, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        text = f"{count} bytes could not be allocated: {str(error).splitlines()[0]}"
        raise Refusal(state.RT_MEMORY_ALLOCATION, text) from None
    return STATE.add(Memory(memory, host))


def _release(address: Any, host: bool, malloc: str) -> None:
    start = integer(address, "address")
    if start == 0:
        raise Refusal(state.INVALID_PARAM, "address: expected one that malloc returned, got 0")
    memory = STATE.memories.get(start)
    if memory is None or memory.host is not host:
        raise Refusal(state.RT_MEMORY_FREE, f"{start:#x}: freed before, or not from acl.rt.{malloc}")
    STATE.remove(start)


@valued(0)
def malloc(size: int, policy: int = MallocPolicy.ACL_MEM_MALLOC_HUGE_FIRST) -> int:
    """Returns (address of `size` new bytes on the device, error code); `policy` has no effect."""
    _current()
    return _allocate(size, STATE.device, host=False)


@coded
def free(address: int) -> None:
    """Frees the device memory at an address of malloc(); returns an error code."""
    _release(address, False, "malloc")


@valued(0)
def malloc_host(size: int) -> int:
    """Allocates `size` bytes of host memory; returns (their address, error code)."""
    return _allocate(size, torch.device("cpu"), host=True)


@coded
def free_host(address: int) -> None:
    """Frees the host memory at an address of malloc_host(); returns an error code."""
    _release(address, True, "malloc_host")


def get_mem_info(attr: int = 1) -> tuple[int, int, int]:
    """Returns (free, total, error code) of the device memory, in bytes; free: total minus the allocations of
    acl.rt.malloc; `attr` has no effect."""
    if STATE.device is None:
        state.note("acl: get_mem_info: called before acl.init() or after acl.finalize()")
        return 0, 0, state.UNINITIALIZED
    if STATE.device.type == "cuda":
        total = torch.cuda.get_device_properties(STATE.device).total_memory
    else:
        total = of_machine()[1]
    allocated = sum(memory.bytes.numel() for memory in STATE.memories.values() if not memory.host)
    return total - allocated, total, state.SUCCESS


class Pointer(int):
    """The address of host data (an integer), from acl.util, with a reference that keeps the data alive."""

    owner: Any


def _host_bytes(value: Any, count: int, written: bool) -> torch.Tensor:
    """Returns the first `count` bytes of an array, a tensor or a bytes-like object as a uint8 tensor; written: True if
    the caller writes to them: read-only data raises Refusal."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or not value.is_contiguous():
            raise Refusal(RT, "a host tensor must be contiguous and lie on the CPU")
        if lost(value):
            raise Refusal(RT, "a host tensor must lie in a storage that holds it: this one was resized")
        memory = value.detach().reshape(-1).view(torch.uint8)
    else:
        try:
            view = memoryview(value)
            flat = view.cast("B") if view.nbytes else memoryview(bytearray())
        except (TypeError, ValueError) as error:
            text = f"{type(value).__name__} is no address and no contiguous host data: {error}"
            raise Refusal(state.INVALID_PARAM, text) from None
        if written and view.readonly:
            raise Refusal(RT, f"{type(value).__name__} is read-only")
        # torch warns about read-only memory, so it is copied.
        memory = torch.from_numpy(np.array(flat, np.uint8) if flat.readonly else np.frombuffer(flat, np.uint8))
    if memory.numel() < count:
        raise Refusal(RT, f"{count} bytes asked of {memory.numel()}")
    return memory[:count]


def bytes_at(place: Any, count: int, written: bool = False) -> tuple[torch.Tensor, bool]:
    """Returns (uint8 view of the first `count` bytes, True if they are host memory) of `place`, an address or host
    data.

    written: True if the caller writes to the bytes: read-only data raises Refusal.
    """
    if isinstance(place, Pointer):
        return _host_bytes(place.owner, count, written), True
    if not isinstance(place, (int, np.integer)) or isinstance(place, bool):
        return _host_bytes(place, count, written), True
    if place == 0:
        raise Refusal(state.INVALID_PARAM, "address: expected an allocation's, got 0")
    memory, start = STATE.find(int(place))
    if start + count > memory.bytes.numel():
        raise Refusal(RT, f"{count} bytes asked at byte {start} of an allocation of {memory.bytes.numel()}")
    return memory.bytes[start : start + count], memory.host


@coded
def memcpy(dst: Any, dest_max: int, src: Any, count: int, kind: int) -> None:
    """Copies bytes, or nothing if any byte is outside of its memory.

    Args:
        dst: an address, or host data to fill (numpy array, torch tensor, bytearray).
        dest_max: size of dst in bytes.
        src: an address, or host data (also bytes).
        count: bytes to copy.
        kind: ACL_MEMCPY_HOST_TO_DEVICE or another direction, which must match dst and src.

    Returns:
        ret: 0; 100000 for a wrong address or object, 107000 for wrong sizes or a wrong kind.
    """
    size, buffer = integer(count, "count"), integer(dest_max, "dest_max")
    if size < 0 or size > buffer:
        raise Refusal(RT, f"count: expected 0 to dest_max={buffer}, got {size}")
    kind = integer(kind, "kind")
    if kind not in tuple(MemcpyKind):
        raise Refusal(state.INVALID_PARAM, f"kind: expected 0 to 3, got {kind}")
    source, source_on_host = bytes_at(src, size)
    target, target_on_host = bytes_at(dst, size, written=True)
    given = MemcpyKind((not source_on_host) * 2 + (not target_on_host))
    if given != kind:
        raise Refusal(RT, f"kind: {MemcpyKind(kind).name} given, but this is {given.name}")
    # torch does not define a copy between overlapping parts of one allocation.
    target.copy_(source.clone() if source.untyped_storage()._cdata == target.untyped_storage()._cdata else source)


@coded
def memset(address: int, max_count: int, value: int, count: int) -> None:
    """Sets `count` bytes at an address to a value; max_count: size of the memory there; returns an error code."""
    size, buffer = integer(count, "count"), integer(max_count, "max_count")
    if size < 0 or size > buffer:
        raise Refusal(RT, f"count: expected 0 to max_count={buffer}, got {size}")
    bytes_at(address, size, written=True)[0].fill_(integer(value, "value") & 0xFF)
