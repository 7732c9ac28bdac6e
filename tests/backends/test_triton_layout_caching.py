"""Tables and strides that the Triton back end computes once and caches, and the device that it queries."""

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from support.launches import constants, watch
from support.paged_decode_calls import Cache, operands_on, rows

from fusion_attention.backends import triton as backend
from fusion_attention.backends.triton.common import launching, layout_table, shapes
from fusion_attention.backends.triton.decode import launch as launch_decode
from fusion_attention.backends.triton.dense import launch as launch_dense
from fusion_attention.contract import BackendError
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem, Stats

Launch = tuple[str, dict[str, Any]]
PROBLEM = Problem(2, 1, 16, 16, dtype="float16", scale=0.3)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Records the name and constants of every launch; no kernel runs."""
    results: list[Launch] = []
    watch(monkeypatch, lambda kernel, named: results.append((kernel.__name__, constants(named))), computes=False)
    return results


def extents(q_len: tuple[int, ...], kv_len: tuple[int, ...]) -> Extents:
    """Returns causal extents, aligned to the last key: rows before the first key see none."""
    q, kv = np.array(q_len), np.array(kv_len)
    return Extents(q, kv, q * 0 - INFINITE, kv - q + 1, q * 0, kv - q)


def memory_of(count: int, length: int, width: int = 16) -> tuple[Operands, Grads]:
    """Returns operands and gradients of zeros; rows lie `width` elements apart."""

    def of(heads: int, dim: int = 16) -> RowView:
        return rows(torch.zeros(count, length, heads, width, dtype=torch.float16)[..., :dim])

    stats = Stats(of(2, 1), of(2, 1))
    return Operands(of(2), of(1), of(1), of(2), stats), Grads(of(2), of(2), of(1), of(1))


def run(problem: Problem, e: Extents, operands: Operands, grads: Grads) -> None:
    backend.attention_forward(problem, e, backend.schedule(problem, e, "attention_forward"), operands)
    backend.attention_backward(problem, e, backend.schedule(problem, e, "attention_backward"), operands, grads)


@pytest.mark.parametrize("empty_rows", ["zero", "mean", "mean_in_band"])
def test_batch_with_empty_row_launches_the_same_kernels(empty_rows: Any, launches: list[Launch]) -> None:
    """Compiling takes seconds; a batch with an empty row must not trigger it in the middle of training."""
    problem = dataclasses.replace(PROBLEM, empty_rows=empty_rows)
    operands, grads = memory_of(2, 40)
    run(problem, extents((20, 30), (40, 40)), operands, grads)
    before = launches.copy()
    launches.clear()
    run(problem, extents((20, 30), (40, 10)), operands, grads)
    assert launches == before
    assert before


@pytest.mark.parametrize(("width", "align"), [(16, 8), (24, 8), (20, 4), (18, 2), (17, 1)], ids=str)
def test_load_width_follows_alignment_of_row_strides(width: int, align: int, launches: list[Launch]) -> None:
    run(PROBLEM, extents((20, 30), (40, 40)), *memory_of(2, 40, width))
    assert {constexprs["ALIGN"] for _, constexprs in launches} == {align}
    for name, constexprs in launches:
        assert not constexprs.get("TMA") or align == 8, (name, constexprs)


def test_misaligned_key_tensor_is_read_element_by_element(launches: list[Launch]) -> None:
    operands, grads = memory_of(1, 40)
    moved = torch.zeros(1 + operands.k.keep[0].numel(), dtype=torch.float16)[1:].view(1, 40, 1, 16)
    run(PROBLEM, extents((20,), (40,)), dataclasses.replace(operands, k=rows(moved)), grads)
    assert {constexprs["ALIGN"] for _, constexprs in launches} == {1}


def test_int8_cache_alignment_is_counted_in_int8_elements() -> None:
    problem = dataclasses.replace(PROBLEM, page_size=64, kv_dtype="int8", dequant_k="channel", dequant_v="channel")
    tile = shapes.Tile(16, 16, 4, 1)
    results = {align: launch_dense.constants(problem, tile, align)["ALIGN_KV"] for align in (1, 2, 4, 8)}
    assert results == {1: 1, 2: 4, 4: 8, 8: 16}


def test_scratch_memory_between_kernels_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch passes data to the next kernel: row data of the backward, partial results of decode."""
    scratch: list[tuple[str, torch.Tensor]] = []

    def noting(kernel: Any, named: dict[str, Any]) -> None:
        scratch.extend((kernel.__name__, named[n]) for n in ("flat", "partials") if named.get(n) is not None)

    watch(monkeypatch, noting, computes=False)
    run(PROBLEM, extents((20, 30), (40, 40)), *memory_of(2, 40))
    cache = Cache(kv_len=(400, 33))
    schedule = backend.schedule(cache.problem, cache.extents(), "attention_forward")
    backend.attention_forward(cache.problem, cache.extents(), schedule, operands_on(cache, "cpu"))
    assert {"prepare", "backward_key", "decode"} <= {name for name, _ in scratch}
    assert all(tensor.isnan().all() for _, tensor in scratch)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Records the current devices, the innermost context last."""
    inside: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    monkeypatch.setattr(layout_table, "on", on)
    return inside


def test_layout_tables_and_kernels_use_the_device_of_the_tensors(
    entered: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA reports graph capture for the current device, which must be the device of the tensors."""
    devices_asked: list[str] = []

    def asking(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any) -> Any:
            assert entered == [torch.device("cpu")], what
            devices_asked.append(what)
            return real(*given)

        return watched

    monkeypatch.setattr(layout_table.Copied, "write", asking("write", layout_table.Copied.write))
    monkeypatch.setattr(layout_table.Copied, "read", asking("read", layout_table.Copied.read))
    monkeypatch.setattr(launching, "launch", asking("launch", lambda *_: None))
    e = extents((20, 30), (40, 40))
    run(PROBLEM, e, *memory_of(2, 40))
    cache = Cache(kv_len=(40, 33))
    schedule = backend.schedule(cache.problem, cache.extents(), "attention_forward")
    backend.attention_forward(cache.problem, cache.extents(), schedule, operands_on(cache, "cpu"))
    devices_asked.clear()
    backend.reschedule(cache.problem, cache.extents((20, 10)), "attention_forward", schedule)
    assert set(devices_asked) == {"write"}
    assert launch_decode.serves(cache.problem, cache.extents())
    assert entered == []


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Records the stride tables that are made; no kernel runs."""
    results: list[np.ndarray] = []
    real = layout_table.strides

    def made_table(*given: Any) -> np.ndarray:
        results.append(real(*given))
        return results[-1]

    monkeypatch.setattr(layout_table, "strides", made_table)
    return results


@pytest.mark.parametrize("op_kind", ["attention_forward", "attention_backward"])
def test_repeated_run_reuses_layout_table_and_launches_on_new_tensors(
    op_kind: str, tables: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[dict[str, Any]] = []
    watch(monkeypatch, lambda _, named: launched.append(named), computes=False)
    e, compute = extents((20, 30), (40, 40)), getattr(backend, op_kind)
    schedule = backend.schedule(PROBLEM, e, op_kind)
    for turn in range(2):
        operands, grads = memory_of(2, 40)
        launched.clear()
        compute(PROBLEM, e, schedule, operands, *([grads] if op_kind == "attention_backward" else []))
        assert len(tables) == 1, turn
        addresses = {view.keep[0].data_ptr() for view in (operands.q, operands.k, operands.v, grads.dq)}
        assert all(each["q"].data_ptr() in addresses for each in launched if "q" in each)
        assert any("q" in each for each in launched)
    dead = weakref.ref(operands.q.keep[0])
    launched.clear()
    del operands, grads
    assert dead() is None  # the cached tables do not own the tensors' memory


def other_layouts() -> dict[str, Operands]:
    """Returns operands with the shapes of memory_of(2, 40), by name of the changed layout."""
    operands, _ = memory_of(2, 40)
    k = operands.k.keep[0]
    pair = (k[0], torch.zeros_like(k[1]))
    moved = torch.zeros(1 + k.numel(), dtype=k.dtype)[1:].view(k.shape)
    swapped, heads = operands.k.address[::-1].copy(), operands.k.stride_head + 8
    return {
        "another start": dataclasses.replace(operands, k=rows(moved)),
        "other strides": dataclasses.replace(operands, k=memory_of(2, 40, 24)[0].k),
        "other sequences": dataclasses.replace(operands, k=dataclasses.replace(operands.k, address=swapped)),
        "other heads": dataclasses.replace(operands, k=dataclasses.replace(operands.k, stride_head=heads)),
        "a tensor each": dataclasses.replace(operands, k=dataclasses.replace(operands.k, keep=pair)),
    }


@pytest.mark.parametrize("what", other_layouts())
def test_changed_tensor_layout_creates_another_layout_table(
    what: str, tables: list[np.ndarray], launches: list[Launch]
) -> None:
    e = extents((20, 30), (40, 40))
    schedule = backend.schedule(PROBLEM, e, "attention_forward")
    for operands in (memory_of(2, 40)[0], other_layouts()[what]):
        backend.attention_forward(PROBLEM, e, schedule, operands)
    assert len(tables) == 2
    aligned, other = (constexprs["ALIGN"] for name, constexprs in launches if name == "forward")
    assert (aligned, other) == (8, 1 if what == "another start" else 8)
    assert (tables[0] == tables[1]).all() == (what == "another start")


def test_smaller_page_pool_lowers_the_last_page_passed_to_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached number of the last page would let the kernel read behind the memory of a smaller pool."""
    last: list[int] = []

    def noting(kernel: Any, named: dict[str, Any]) -> None:
        if kernel is launch_decode.decode:
            last.append(named["last"])

    watch(monkeypatch, noting, computes=False)
    cache = Cache(kv_len=(40, 33))
    operands, e = operands_on(cache, "cpu"), cache.extents()
    schedule = backend.schedule(cache.problem, e, "attention_forward")
    pool = operands.k.pool
    for pages in (len(pool), len(pool) - 1):
        operands.k = operands.k.over(pool[:pages].clone())
        backend.attention_forward(cache.problem, e, schedule, operands)
    assert last == [len(pool) - 1, len(pool) - 2]


def test_separate_value_page_table_is_refused_after_run_with_shared_table(launches: list[Launch]) -> None:
    cache = Cache(kv_len=(40, 33))
    operands, e = operands_on(cache, "cpu"), cache.extents()
    schedule = backend.schedule(cache.problem, e, "attention_forward")
    operands.v = dataclasses.replace(operands.v, table=operands.k.table)
    backend.attention_forward(cache.problem, e, schedule, operands)
    operands.v = dataclasses.replace(operands.v, table=operands.k.table.clone())
    with pytest.raises(BackendError, match="expected one page table, got another for v"):
        backend.attention_forward(cache.problem, e, schedule, operands)


def test_schedule_keeps_only_the_most_recent_layouts(launches: list[Launch]) -> None:
    e = extents((20, 30), (40, 40))
    schedule = backend.schedule(PROBLEM, e, "attention_forward")
    for width in range(16, 16 + 2 * launching.LAYOUTS):
        backend.attention_forward(PROBLEM, e, schedule, memory_of(2, 40, width)[0])
    assert len(schedule.by_layout) == launching.LAYOUTS
