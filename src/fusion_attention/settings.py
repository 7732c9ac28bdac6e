"""Settings: strict mode, content checks and back end, for a block of code or the whole process."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any


@dataclass(slots=True)
class Settings:
    """Settings of strict mode, content checks and back end for all operators of this library.

    Attributes:
        strict: calls beyond the Ascend chip's limits are errors, and so are warnings about probable mistakes.
        check_content: the rules that read the values in tensors are checked too.
        backend: the back end of calls that leave theirs at "auto".
    """

    strict: bool = False
    check_content: bool = False
    backend: str = "auto"


# The settings of every thread and task outside a block; npu.install(strict=True) changes them.
PROCESS = Settings()
_SET: ContextVar[Settings] = ContextVar("fusion_attention", default=PROCESS)
# The bound method itself, because every call uses it.
current = _SET.get


def chosen(backend: str) -> str:
    """Returns the name of the back end to use: `backend` itself, or for "auto" the one in the current settings.

    Raises:
        ValueError: the argument is not a string.
    """
    if not isinstance(backend, str):
        raise ValueError(f"fusion_attention: backend: expected a name, got {backend!r}")
    return current().backend if backend == "auto" else backend


@contextmanager
def override(**changes: Any) -> Iterator[None]:
    """Changes settings (strict mode, content checks, back end) within a block, for this thread or asyncio task."""
    before = current()
    _SET.set(replace(before, **changes))
    try:
        yield
    finally:
        _SET.set(before)


@contextmanager
def strict(on: bool = True, *, check_content: bool = False) -> Iterator[None]:
    """Turns strict mode on for calls of operators inside a block, or inside the function that it decorates.

    Calls beyond the Ascend chip's limits are then errors, and so are warnings about calls that are probably mistakes.
    This applies to all interfaces but CANN's C functions aclnnXxxGetWorkspaceSize, which have an argument `strict`.
    The block applies to this thread and asyncio task; for the whole process: npu.install(strict=True). A graph that
    torch.compile or torch.export traces inside stays strict; one that was traced outside is strict where it runs
    inside.

    Args:
        on: False turns strict mode off, inside a strict block or process.
        check_content: also check the rules that read the values in tensors: that a compressed mask is causal, that a
            mask agrees with its window, that lists of selected keys (or blocks of keys) contain only visible ones and
            are not too long, that the rows of a compressed bias (`pse`) are shifted copies of each other. Numbers of
            pages and indices on the CPU are checked without it.

    Example:
        >>> from fusion_attention import npu
        >>> q, cache = torch.randn(1, 3, 64).half(), torch.randn(1, 9, 64).half()
        >>> with strict():
        ...     npu.npu_incre_flash_attention(q, cache, cache, scale_value=0.125)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        fusion_attention.contract.record.ContractError: npu_incre_flash_attention: query: expected S1 == 1, got S1=3 ...
    """
    with override(strict=on, check_content=check_content):
        yield
