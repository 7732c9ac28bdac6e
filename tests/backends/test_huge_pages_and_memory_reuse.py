"""Memory of large results: only this memory requests huge pages, and memory of earlier results is used again."""

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bits import same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_attention as fa
from fusion_attention import memory

PAGE = 2 << 20
granted = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without transparent huge pages"
)


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Empties the list of idle memory before and after each test."""
    memory._idle.clear()
    yield
    memory._idle.clear()


def large(size: int = memory.LARGE) -> torch.Tensor:
    return memory.empty(torch.empty(0), (size,), torch.uint8)


def whole_pages(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns [begin, end) in bytes from the tensor's start: the huge pages completely in its memory."""
    first = tensor.data_ptr()
    return -first % PAGE, (first + tensor.nbytes) // PAGE * PAGE - first


def asked_for(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Returns the ranges [begin, end) of a tensor's complete pages that were requested as huge pages.

    The tensor's first and last pages may still be marked for memory that lay there before; the system may list
    adjacent ranges separately.
    """
    results: list[tuple[int, int]] = []
    first, begin, end = tensor.data_ptr(), 0, 0
    least, most = whole_pages(tensor)
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        if borders := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(border, 16) - first for border in borders.groups())
        elif line.startswith("VmFlags:") and "hg" in line.split() and begin < most and end > least:
            marked = max(begin, least), min(end, most)
            if results and results[-1][1] == marked[0]:
                marked = results.pop()[0], marked[1]
            results.append(marked)
    return results


@granted
def test_large_tensor_requests_huge_pages_inside_the_tensor_only() -> None:
    tensor = memory.empty(torch.empty(0), (4, 5 << 20), torch.bfloat16)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((4, 5 << 20), torch.bfloat16, True)
    assert asked_for(tensor) == [whole_pages(tensor)]


def test_only_tensors_of_minimum_size_request_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int, int]] = []
    monkeypatch.setattr(memory, "_advise", lambda *given: advised.append(given))
    memory.empty(torch.empty(0), (memory.LARGE - 1,), torch.uint8)
    assert not advised
    tensor = memory.empty(torch.empty(0), (memory.LARGE,), torch.uint8)
    ((first, size, _),) = advised
    assert (first - tensor.data_ptr(), first + size - tensor.data_ptr()) == whole_pages(tensor)


def test_fake_and_meta_tensors_are_created_without_memory() -> None:
    with FakeTensorMode():
        assert memory.empty(torch.empty(2), (64 << 20,)).shape == (64 << 20,)
    assert memory.empty(torch.empty(2, device="meta"), (64 << 20,)).is_meta


@pytest.mark.parametrize("shape", [(0, 3), (2, 3, 5), (1, 1, 1), (3, 1, 40 << 20)])
def test_memory_template_creates_contiguous_tensors_of_template_shape(shape: tuple[int, ...]) -> None:
    template = memory.template(torch.empty(0), shape, torch.uint8)
    assert template.untyped_storage().nbytes() == 1
    for tensor in (memory.another(template), memory.another(template)):
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, torch.uint8, True)
        assert tensor.untyped_storage().nbytes() == tensor.numel()


@granted
def test_large_attention_results_and_gradients_request_huge_pages() -> None:
    size, heads = 49152, 3  # results of 36 MiB
    q, k, v = (torch.randn(1, heads, size, 64, requires_grad=True) for _ in range(3))
    out = fa.attention(q, k, v, layout="BNSD", band=fa.Band.window(0, 0))
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    for result in (out, *gradients):
        assert asked_for(result) == [whole_pages(result)]
    assert torch.equal(out, v)  # a row sees its own key alone
    assert bool((gradients[2] == 1).all())


@granted
def test_paged_kv_cache_pools_request_huge_pages() -> None:
    cache = fa.PagedKVCache(8, 64, 40, page_size=128)  # pools of 10 MiB
    for pool in (cache._pools[0], cache._pools[1]):
        assert asked_for(pool) == [whole_pages(pool)]
        assert not pool.any()


def test_memory_of_freed_result_is_reused_for_result_of_same_size() -> None:
    first = large()
    place = first.data_ptr()
    del first
    other_size = large(memory.LARGE + 4)
    second = memory.empty(torch.empty(0), (2, memory.LARGE // 8), torch.float32)
    assert second.data_ptr() == place != other_size.data_ptr()
    assert second.isnan().all()  # what conftest.py leaves in results, in these too
    assert second.untyped_storage().nbytes() == second.nbytes
    template = memory.template(second, second.shape, second.dtype)
    del second
    assert memory.another(template).data_ptr() == place


def saved_for_a_derivative(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.float32).mul(torch.ones((), requires_grad=True))


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t[5:9],
        lambda t: t.detach(),
        lambda t: t.numpy(),
        lambda t: memoryview(t.numpy()),
        lambda t: t.untyped_storage(),
        lambda t: t.__dlpack__(),
        saved_for_a_derivative,
    ],
)
def test_memory_is_not_reused_while_a_view_or_storage_is_alive(hold: Callable[[torch.Tensor], Any]) -> None:
    tensor = large()
    place = tensor.data_ptr()
    holder = hold(tensor)
    del tensor
    assert large().data_ptr() != place
    del holder
    assert place in (large().data_ptr(), large().data_ptr())  # one of the two that are left


def test_memory_shared_with_another_process_is_not_reused() -> None:
    shared = large().share_memory_()
    place = shared.data_ptr()
    first, second = large(), large()
    assert place not in (first.data_ptr(), second.data_ptr())
    first.fill_(1)
    assert shared.fill_(2).eq(2).all()
    assert first.eq(1).all()


def test_storage_of_large_tensor_refuses_resize() -> None:
    tensor = large()
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
    assert tensor.fill_(1).eq(1).all()


def idle() -> int:
    return sum(block.nbytes for block in memory._idle.values())


def test_idle_memory_kept_for_reuse_is_bounded() -> None:
    half = memory.IDLE // 2
    first, second, third = large(half), large(half), large(half)
    assert idle() == 0
    place = third.data_ptr()
    del first, second
    assert idle() == memory.IDLE
    del third
    assert idle() == memory.IDLE  # what was given back first is gone
    assert place in memory._idle
    large()
    assert idle() == half + memory.LARGE


@pytest.mark.skipif(memory._advise is None, reason="a system that cannot take back what waits")
def test_large_idle_memory_is_marked_reclaimable_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "IDLE", 8 << 20)
    monkeypatch.setattr(memory, "LENDABLE", 32 << 20)
    advice: list[tuple[int, int, int]] = []
    monkeypatch.setattr(memory, "_advise", lambda *given: advice.append(given))
    small, first, second = large(8 << 20), large(16 << 20), large(16 << 20)
    full = [
        (tensor.data_ptr() + begin, end - begin) for tensor in (first, second) for begin, end in [whole_pages(tensor)]
    ]
    strides = first.data_ptr(), second.data_ptr()
    advice.clear()
    del small
    assert not advice
    del first, second
    assert advice == [(*pages, memory._MADV_FREE) for pages in full]
    assert idle() == 40 << 20  # neither kind takes the other's buffer
    assert large(16 << 20).data_ptr() in strides
    large(24 << 20)
    assert idle() == 32 << 20  # what was given back first is gone
    advice.clear()
    large((32 << 20) + 1)  # is not lent
    assert [given for *_, given in advice] == [memory._MADV_HUGEPAGE]


def test_large_idle_memory_is_released_if_madvise_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_advise", None)
    monkeypatch.setattr(memory, "IDLE", 8 << 20)
    large(8 << 20)
    large(16 << 20)
    assert idle() == 8 << 20


def test_threads_never_get_the_same_memory() -> None:
    def work(mine: int) -> None:
        for _ in range(8):
            tensors = [large().fill_(mine), large().fill_(mine)]
            assert all(tensor.eq(mine).all() for tensor in tensors)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert idle() <= memory.IDLE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork()")
def test_forked_process_does_not_write_into_memory_of_the_parent() -> None:
    living, dead = large().fill_(1), large().fill_(2)
    place = dead.data_ptr()
    del dead
    child = os.fork()
    if child == 0:
        tensor = large().fill_(3)
        os._exit(0 if tensor.data_ptr() == place and tensor.eq(3).all() and living.eq(1).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert memory._idle[place].eq(2).all()


def test_attention_results_and_gradients_reuse_memory_of_deleted_results() -> None:
    def step() -> tuple[torch.Tensor, ...]:
        q, k, v = (torch.randn(1, 8, 2048, 64, generator=random, requires_grad=True) for _ in range(3))
        out = fa.attention(q, k, v, layout="BNSD", band=fa.Band.window(16, 0))
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    random = torch.Generator().manual_seed(0)
    first = step()
    expected = [tensor.clone() for tensor in first]
    strides = {tensor.data_ptr() for tensor in first}
    random.manual_seed(0)
    second = step()
    assert strides.isdisjoint(tensor.data_ptr() for tensor in second)
    del first
    random.manual_seed(0)
    third = step()
    assert strides == {tensor.data_ptr() for tensor in third}
    for results in (second, third):
        same_bits(results, expected)


def test_machine_memory_is_read_on_linux_macos_and_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    free, total = memory.of_machine()
    assert 0 < free <= total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    monkeypatch.setattr(os, "sysconf_names", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 2})  # macOS's Python
    assert memory.of_machine() == (total, total)

    def status(out: Any) -> int:
        assert out[0] == 64  # Windows refuses another size.
        out[1], out[2] = 16 << 30, 5 << 30
        return 1

    monkeypatch.setattr(sys, "platform", "win32")
    windll = SimpleNamespace(kernel32=SimpleNamespace(GlobalMemoryStatusEx=status))
    monkeypatch.setattr(ctypes, "windll", windll, raising=False)
    assert memory.of_machine() == (5 << 30, 16 << 30)
