"""The state of the emulated CANN runtime (device, allocations, contexts, last error text), and its error codes.

STATE is global because CANN's runtime is process-wide. Importing does not initialize it; acl.init() does.
"""

from __future__ import annotations

import functools
import operator
import threading
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from fusion_attention.contract import show

P = ParamSpec("P")
T = TypeVar("T")

SUCCESS = 0
# Codes of the runtime (aclError). contract/record.py has the codes of operators (aclnnStatus).
INVALID_PARAM, UNINITIALIZED, REPEAT_INITIALIZE, REPEAT_FINALIZE = 100000, 100001, 100002, 100037
RT_INVALID_PARAM, RT_INVALID_DEVICE, RT_CONTEXT_NULL, RT_INVALID_HANDLE = 107000, 107001, 107002, 107017
RT_MEMORY_ALLOCATION, RT_MEMORY_FREE, RT_NO_DEVICE = 207001, 207002, 207004
DEVICE_COUNT = 8


class Refusal(Exception):
    """The exception for an invalid call of the emulated CANN runtime, with error code and text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


@dataclass(eq=False)
class Memory:
    """One allocation of device memory, or of host memory if `host`; alive: False after it is freed."""

    bytes: torch.Tensor
    host: bool
    alive: bool = True

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.bytes.data_ptr()


@dataclass(eq=False)
class Context:
    """A context of the emulated runtime on a device id; closing it closes its streams."""

    device_id: int
    open: bool = True

    @property
    def usable(self) -> bool:
        """True if this context was not destroyed and its device was not reset."""
        return self.open


@dataclass(eq=False)
class Stream:
    """A stream of the emulated runtime; work is complete when the call that submits it returns."""

    context: Context
    open: bool = True

    @property
    def usable(self) -> bool:
        """True if neither the stream nor its context was destroyed."""
        return self.open and self.context.open


@dataclass(eq=False)
class State:
    """The state of the emulated CANN runtime: device, contexts, allocations; device None: not initialized."""

    device: torch.device | None = None
    backend: str = "auto"
    finalized: bool = False
    context: Context | None = None
    contexts: dict[int, list[Context]] = field(default_factory=dict)  # by device id in use, the default context first
    memories: dict[int, Memory] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # sorted keys of memories
    local: threading.local = field(default_factory=threading.local)

    def add(self, memory: Memory) -> int:
        """Registers an allocation, and returns its address."""
        self.memories[memory.address] = memory
        insort(self.starts, memory.address)
        return memory.address

    def remove(self, address: int) -> None:
        """Unregisters the allocation at an address, and marks it as freed for tensors that use it."""
        memory = self.memories.pop(address)
        self.starts.remove(address)
        memory.alive = False

    def find(self, address: int) -> tuple[Memory, int]:
        """Returns (the allocation that contains an address, offset of the address in it in bytes); raises Refusal if no
        allocation contains it."""
        at = bisect_right(self.starts, address) - 1
        memory = self.memories[self.starts[at]] if at >= 0 else None
        if memory is None or address >= memory.address + memory.bytes.numel():
            raise Refusal(RT_INVALID_PARAM, f"{address:#x} lies in no allocation (freed, or not from acl.rt.malloc)")
        return memory, address - memory.address


STATE = State()


def note(text: str) -> None:
    """Stores an error text for this thread, which get_recent_err_msg() returns."""
    STATE.local.text = text


def take_note() -> str:
    """Returns the text of this thread's last error, which note() stored, and clears it."""
    text: str = getattr(STATE.local, "text", "")
    STATE.local.text = ""
    return text


def integer(value: Any, name: str, code: int = INVALID_PARAM) -> int:
    """Converts a Python or numpy integer, but no bool, to an int; other values raise Refusal with `code` and `name`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise Refusal(code, f"{name}: expected an int, got {type(value).__name__}") from None
    if number.bit_length() > 128:  # Too long for an error text; callers check the range of smaller numbers.
        raise Refusal(code, f"{name}: expected an int of 64 bits, got {show(number)}")
    return number


def valued(nothing: Any = None) -> Callable[[Callable[P, T]], Callable[P, tuple[T, int]]]:
    """Returns a decorator; the decorated function returns (the value, 0), or (`nothing`, error code) if it raises
    Refusal or acl.init() was not called."""

    def decorate(function: Callable[P, T]) -> Callable[P, tuple[T, int]]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> tuple[T, int]:
            try:
                if STATE.device is None:
                    text = f"acl: {function.__name__}: called before acl.init() or after acl.finalize()"
                    raise Refusal(UNINITIALIZED, text)
                return function(*args, **kwargs), SUCCESS
            except Refusal as error:
                note(error.text)
                return nothing, error.code

        return call

    return decorate


def coded(function: Callable[P, None]) -> Callable[P, int]:
    """Decorates a function to return 0, or the error code if it raises Refusal or acl.init() was not called."""
    both = valued()(function)
    return functools.wraps(function)(lambda *args, **kwargs: both(*args, **kwargs)[1])


def checked(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorates a function to return its value, or None if it raises Refusal or acl.init() was not called."""
    both = valued()(function)
    return functools.wraps(function)(lambda *args, **kwargs: both(*args, **kwargs)[0])
