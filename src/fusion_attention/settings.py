"""How strictly calls are checked and what computes them where a call itself says nothing: in a block, or a process.

The one state of its kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any


@dataclass(slots=True)
class Settings:
    """What a call takes where it does not say otherwise.

    Attributes:
        strict: the chip's limits, and what a legal call probably does not mean, are errors.
        check_content: rules that read tensor data on request are asked.
        backend: what "auto" means.
    """

    strict: bool = False
    check_content: bool = False
    backend: str = "auto"


# Of every thread and task outside a block; npu.install(strict=True) changes it.
PROCESS = Settings()
_SET: ContextVar[Settings] = ContextVar("fusion_attention", default=PROCESS)
# The bare method, with no function around it: every call asks.
current = _SET.get


def chosen(backend: str) -> str:
    """The back end that a call asks for; where that is "auto", the one that is set.

    Raises:
        ValueError: it is no name.
    """
    if not isinstance(backend, str):
        raise ValueError(f"fusion_attention: backend: expected a name, got {backend!r}")
    return current().backend if backend == "auto" else backend


@contextmanager
def override(**changes: Any) -> Iterator[None]:
    """Other settings inside a block, in this thread or task."""
    before = current()
    _SET.set(replace(before, **changes))
    try:
        yield
    finally:
        _SET.set(before)


@contextmanager
def strict(on: bool = True, *, check_content: bool = False) -> Iterator[None]:
    """Inside the block, or the function that it decorates, calls of every interface but the two-phase one are strict.

    What the chip would refuse is then an error, and so is what a legal call probably does not mean. The block counts in
    this thread (and asyncio task); for the whole process: npu.install(strict=True). A graph that torch.compile or
    torch.export traces inside stays strict; one that was traced outside is strict where it runs inside.

    Args:
        on: False takes strictness back, inside a stricter block or process.
        check_content: also asks the rules that read tensor data: masks, lists, compressed biases.

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
