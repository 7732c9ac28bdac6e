"""What a process has of the two-phase interface: device, memory, streams, the last error's text; and how calls fail.

STATE is the module state that this interface cannot do without (its C original is a process-wide runtime too);
importing changes nothing, acl.init() does.
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
# Codes of the runtime (aclError). Those of operators (aclnnStatus) stand in contract/record.py.
INVALID_PARAM, UNINITIALIZED, REPEAT_INITIALIZE, REPEAT_FINALIZE = 100000, 100001, 100002, 100037
RT_INVALID_PARAM, RT_INVALID_DEVICE, RT_CONTEXT_NULL, RT_INVALID_HANDLE = 107000, 107001, 107002, 107017
RT_MEMORY_ALLOCATION, RT_MEMORY_FREE, RT_NO_DEVICE = 207001, 207002, 207004
DEVICE_COUNT = 8


class Refusal(Exception):
    """A call that fails: its code and its text. Never leaves this package."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


@dataclass(eq=False)
class Memory:
    """One allocation: its bytes, where they start, and whether they are still the caller's."""

    bytes: torch.Tensor
    host: bool
    alive: bool = True

    @property
    def address(self) -> int:
        """The first byte's address."""
        return self.bytes.data_ptr()


@dataclass(eq=False)
class Context:
    """A device id in use; closing one closes its streams."""

    device_id: int
    open: bool = True

    @property
    def usable(self) -> bool:
        """Not destroyed, and its device not reset."""
        return self.open


@dataclass(eq=False)
class Stream:
    """A queue whose work is done when the call that queues it returns."""

    context: Context
    open: bool = True

    @property
    def usable(self) -> bool:
        """Neither it nor its context was destroyed."""
        return self.open and self.context.open


@dataclass(eq=False)
class State:
    """The runtime of this process; device None: not initialised."""

    device: torch.device | None = None
    backend: str = "auto"
    finalized: bool = False
    context: Context | None = None
    contexts: dict[int, list[Context]] = field(default_factory=dict)  # of every device id in use, its default one first
    memories: dict[int, Memory] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # addresses in memories, in order
    local: threading.local = field(default_factory=threading.local)

    def add(self, memory: Memory) -> int:
        """Keeps an allocation; its address."""
        self.memories[memory.address] = memory
        insort(self.starts, memory.address)
        return memory.address

    def remove(self, address: int) -> None:
        """Ends an allocation; what was built on it finds it dead."""
        memory = self.memories.pop(address)
        self.starts.remove(address)
        memory.alive = False

    def find(self, address: int) -> tuple[Memory, int]:
        """The allocation that an address lies in, and the bytes before it."""
        at = bisect_right(self.starts, address) - 1
        memory = self.memories[self.starts[at]] if at >= 0 else None
        if memory is None or address >= memory.address + memory.bytes.numel():
            raise Refusal(RT_INVALID_PARAM, f"{address:#x} lies in no allocation (freed, or not from acl.rt.malloc)")
        return memory, address - memory.address


STATE = State()


def note(text: str) -> None:
    """Keeps the text that get_recent_err_msg() returns on this thread."""
    STATE.local.text = text


def take_note() -> str:
    """The kept text, once."""
    text: str = getattr(STATE.local, "text", "")
    STATE.local.text = ""
    return text


def integer(value: Any, name: str, code: int = INVALID_PARAM) -> int:
    """A value that must be an integer (a Python or numpy one, no bool)."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise Refusal(code, f"{name}: expected an int, got {type(value).__name__}") from None
    if number.bit_length() > 128:  # Others are refused where they mean too much; these have no text, or no end.
        raise Refusal(code, f"{name}: expected an int of 64 bits, got {show(number)}")
    return number


def valued(nothing: Any = None) -> Callable[[Callable[P, T]], Callable[P, tuple[T, int]]]:
    """A call that returns (value, code), after acl.init(); (nothing, code) where it fails."""

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
    """A call that returns its code, after acl.init()."""
    both = valued()(function)
    return functools.wraps(function)(lambda *args, **kwargs: both(*args, **kwargs)[1])


def checked(function: Callable[P, T]) -> Callable[P, T | None]:
    """A call that returns what it makes, after acl.init(); None where it fails."""
    both = valued()(function)
    return functools.wraps(function)(lambda *args, **kwargs: both(*args, **kwargs)[0])
