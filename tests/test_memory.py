"""Large results ask for huge pages, inside their own memory alone."""

import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_attention as fa
from fusion_attention import memory

PAGE = 2 << 20
granted = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without transparent huge pages"
)


def asked_for(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The parts [begin, end) of a tensor's memory for which huge pages were asked, in bytes from its first one."""
    found: list[tuple[int, int]] = []
    first, begin, end = tensor.data_ptr(), 0, 0
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        if borders := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(border, 16) - first for border in borders.groups())
        elif line.startswith("VmFlags:") and "hg" in line.split() and begin < tensor.nbytes and end > 0:
            found.append((max(begin, 0), min(end, tensor.nbytes)))
    return found


def whole_pages(tensor: torch.Tensor) -> tuple[int, int]:
    """The huge pages that lie in a tensor's memory altogether, in bytes from its first one."""
    first = tensor.data_ptr()
    return -first % PAGE, (first + tensor.nbytes) // PAGE * PAGE - first


@granted
def test_large_memory_asks_for_its_whole_pages() -> None:
    tensor = memory.empty(torch.empty(0), (4, 5 << 20), torch.bfloat16)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((4, 5 << 20), torch.bfloat16, True)
    assert asked_for(tensor) == [whole_pages(tensor)]


def test_only_large_memory_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(memory, "_advise", lambda *given: asked.append(given))
    memory.empty(torch.empty(0), (memory.LARGE - 1,), torch.uint8)
    assert not asked
    tensor = memory.empty(torch.empty(0), (memory.LARGE,), torch.uint8)
    ((first, size, _),) = asked
    assert (first - tensor.data_ptr(), first + size - tensor.data_ptr()) == whole_pages(tensor)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (7, 5)])
def test_small_memory_is_torchs_own(shape: tuple[int, ...]) -> None:
    tensor = memory.empty(torch.empty(0, dtype=torch.float16), shape)
    assert (tensor.shape, tensor.dtype) == (shape, torch.float16)


def test_tensors_without_memory_ask_for_nothing() -> None:
    with FakeTensorMode():
        assert memory.empty(torch.empty(2), (64 << 20,)).shape == (64 << 20,)
    assert memory.empty(torch.empty(2, device="meta"), (64 << 20,)).is_meta


@pytest.mark.parametrize("shape", [(0, 3), (2, 3, 5), (1, 1, 1), (3, 1, 40 << 20)])
def test_memory_from_a_template(shape: tuple[int, ...]) -> None:
    template = memory.template(torch.empty(0), shape, torch.uint8)
    assert template.untyped_storage().nbytes() == 1
    for tensor in (memory.another(template), memory.another(template)):
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, torch.uint8, True)
        assert tensor.untyped_storage().nbytes() == tensor.numel()


@granted
def test_results_and_gradients_ask() -> None:
    size, heads = 49152, 3  # results of 36 MiB
    q, k, v = (torch.randn(1, heads, size, 64, requires_grad=True) for _ in range(3))
    out = fa.attention(q, k, v, layout="BNSD", band=fa.Band.window(0, 0))
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    for result in (out, *gradients):
        assert asked_for(result) == [whole_pages(result)]
    torch.testing.assert_close(out, v)  # a row sees its own key alone
    torch.testing.assert_close(gradients[2], torch.ones_like(v))
