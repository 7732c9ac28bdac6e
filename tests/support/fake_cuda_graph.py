"""Replaces a CUDA graph on machines without a GPU: records launches and torch operations, and repeats them.

graph = Captured(monkeypatch)
with graph:
    plan.run(...)
plan.update(...)
graph.replay()          # the same operations with the same arguments and memory
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fusion_attention.backends.triton.common import launching


class Captured(TorchDispatchMode):
    """Records the operations that run within its context."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self._launch = launching.launch
        self._open = False
        monkeypatch.setattr(launching, "launch", self._record)

    def __enter__(self) -> Captured:
        self._open = True
        super().__enter__()
        return self

    def __exit__(self, *given: Any) -> None:
        self._open = False
        super().__exit__(*given)

    def _record(self, *given: Any) -> None:
        with _disable_current_modes():  # the interpreter's torch operations are not part of a graph
            self._launch(*given)
        if self._open:
            self.steps.append(lambda: self._launch(*given))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        if "empty" not in str(op):  # a replay reuses the memory
            self.steps.append(lambda: _again(op, args, kwargs, out))
        return out

    def replay(self) -> None:
        """Repeats all recorded operations."""
        assert self.steps
        for step in self.steps:
            step()


def _again(op: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Repeats an operation and copies its results to the old results."""
    for old, new in zip(_tensors(out), _tensors(op(*args, **kwargs)), strict=True):
        if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.copy_(new)


def _tensors(results: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor))
