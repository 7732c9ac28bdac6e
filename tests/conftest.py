"""Every test: one thread (thousands of tiny operations, for which waking others takes longer than the work), and
outputs and scratch memory that hold NaN before an operator writes them.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusion_attention import memory

# What allocates results: their fresh memory holds NaN, or -99 in integers.
ALLOCATING = ("memory", "ops.training", "ops.decode", "ops.sparse_lower", "ops.indexer_loss_lower")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def poisoned_scratch() -> None:
    """What the native core takes for a run is NaN; tests on a GPU run where it is not built."""
    with contextlib.suppress(ImportError):
        from fusion_attention import _native

        _native.poison_scratch(True)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What modules allocate for results is NaN, so that an element nobody writes cannot pass."""
    allocate = torch.Tensor.new_empty

    def new_empty(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        fresh = allocate(self, *args, **options)
        if sys._getframe(1).f_globals["__name__"] in {f"fusion_attention.{name}" for name in ALLOCATING}:
            fresh.fill_(torch.nan if fresh.is_floating_point() else -99)
        return fresh

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    allocate_like = torch.empty_like

    def empty_like(*args: Any, **options: Any) -> torch.Tensor:
        fresh = allocate_like(*args, **options)
        if sys._getframe(1).f_globals["__name__"] == "fusion_attention.memory":
            fresh.fill_(torch.nan if fresh.is_floating_point() else -99)
        return fresh

    monkeypatch.setattr(torch, "empty_like", empty_like)
    lend = memory._lent

    def lent(size: int) -> torch.UntypedStorage:
        storage = lend(size)
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (size,)).fill_(255)  # NaN, or -1
        return storage

    monkeypatch.setattr(memory, "_lent", lent)
