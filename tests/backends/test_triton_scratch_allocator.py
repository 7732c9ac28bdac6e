"""launch() sets Triton's allocator, which descriptors need, in any thread, and restores the caller's; kernel keys."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.runtime import _allocation

from fusion_attention.backends.triton.common import kernels, launching, shapes


class Asking:
    """A kernel that requests scratch memory, as a compiled kernel with descriptors does."""

    arg_names = ("strides",)

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Asking:
        return self

    def __call__(self, *given: Any, **options: Any) -> None:
        self.given.append(_allocation._allocator.get()(1 << 10, 128, None))


def launch(kernel: Asking) -> None:
    tile = shapes.Tile(16, 16, 4, 1, shapes.TMA)
    one = launching.Family(kernel).launch(kernel, (1,), {"strides": torch.zeros(4)}, (), {}, tile)
    launching.Ready([one], ()).run({"q": torch.zeros(4)})


def test_launch_provides_scratch_in_thread_without_triton_allocator() -> None:
    kernel = Asking()
    thread = threading.Thread(target=launch, args=(kernel,))
    thread.start()
    thread.join()
    assert [(t.numel(), t.dtype) for t in kernel.given] == [(1 << 10, torch.uint8)]


@pytest.mark.parametrize("fails", [False, True])
def test_launch_restores_the_triton_allocator_of_the_caller(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def callers(size: int, alignment: int, stream: int | None) -> None:
        raise AssertionError("the caller's allocator served our launch")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    before = _allocation._allocator.get()
    triton.set_allocator(callers)
    try:
        if fails:
            monkeypatch.setattr(Asking, "__call__", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                launch(Asking())
        else:
            launch(Asking())
        assert _allocation._allocator.get() is callers
    finally:
        triton.set_allocator(before)


def test_triton_kernel_cache_key_includes_order_of_views() -> None:
    for function in (kernels.heads_at, kernels.matrix_at):
        assert function.cache_key  # collects the names on which the key depends
        assert "ORDER" in {name for name, _ in function.used_global_vals}
