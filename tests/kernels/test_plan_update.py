"""Updated plans, and graphs captured from them, give the bits of new plans, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.paged_decode_calls import Cache, operands_on
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fusion_attention.backends import triton as backend
from fusion_attention.backends.triton.common import launching, layout_table
from fusion_attention.backends.triton.common.shapes import Tile
from fusion_attention.backends.triton.indexer import launch_dense_kl_loss, shapes_loss
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.problem import Extents
from fusion_attention.ops.indexer.lowered_call import IndexerBackward
from fusion_attention.ops.sparse.lowered_call import SparseBackward
from fusion_attention.plan import plan
from fusion_attention.testing import Case, arguments, indexer_loss, lowered, sparse
from fusion_attention.testing import run as run_training
from fusion_attention.testing.indexer_loss import LossCase
from fusion_attention.testing.sparse import IndexerCase, SparseCase
from fusion_attention.torch_ops.eager import run


class Captured(TorchDispatchMode):
    """Replaces a CUDA graph: records the launches and torch operations that run in its context, and repeats them."""

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


CPU = torch.device("cpu")
LENGTHS: dict[str, Any] = {"layout": "TND", "q_len": (2, 3), "kv_len": (9, 20), "dtype": "float16"}


def of_training() -> None:
    case = Case("TND", "float16", (5, 20), (40, 33), heads_q=2, heads_kv=1, dim_v=8, sparse_mode=3, mask="compressed")
    args = arguments(case)
    run_training(lowered(case, args), args["dy"], "triton")


def of_decode(**more: Any) -> Callable[[], None]:
    def call() -> None:
        cache = Cache(kv_len=(40, 70), q_len=2, **more)
        p, e = cache.problem, cache.extents()
        backend.attention_forward(p, e, backend.schedule(p, e, "attention_forward"), operands_on(cache, "cpu"))

    return call


def of_lists() -> None:
    args = sparse.arguments(SparseCase(**LENGTHS, heads_q=3, count=9, lists="all", sink=True))
    call = sparse.lowered(args)
    run(SparseBackward(call, args["dy"], *run(call, "triton").values()), "triton")


def of_indexer() -> None:
    args = sparse.indexer_arguments(IndexerCase(**LENGTHS, heads=3, top_k=6))
    call = sparse.lowered_indexer(args)
    indices, _ = run(call, "triton").values()
    run(IndexerBackward(call, args["dy"], indices.clone()), "triton")  # what the choice writes anew stays apart


def of_loss(count: int, window: int = 0) -> Callable[[], None]:
    def call() -> None:
        case = LossCase(**LENGTHS, heads_q=3, count=count, lists="all", window=window)
        run(indexer_loss.lowered(case, indexer_loss.arguments(case)), "triton")

    return call


def written(given: Any) -> list[torch.Tensor]:
    """Returns copies of all tensors of operands and gradients."""
    if isinstance(given, torch.Tensor):
        return [given.clone()]
    if isinstance(given, RowView):
        return [t.clone() for t in given.keep]
    if is_dataclass(given):
        return [t for f in fields(given) for t in written(getattr(given, f.name))]
    return []


def same(results: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(results, want, strict=True))


SHORT = [0, 14]  # the first sequence becomes empty
CALLS = {
    "training": of_training, "lists": of_lists, "indexer": of_indexer, "warm-up": of_loss(0),
    "decode": of_decode(), "int8 decode": of_decode(dequant="token", dtype="float16"),
    "window": of_loss(0, 5), "loss": of_loss(8),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tiles so low that a few keys take several; an updated window spans more tiles than planned."""
    tiles = shapes_loss.Warm(*(Tile(16, 16, 4, 1),) * 5, 16)
    monkeypatch.setattr(shapes_loss, "warm_tiles", lambda *_: tiles)
    monkeypatch.setattr(launch_dense_kl_loss, "KEYS_PER_SPLIT", 16)


def made_by(call: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """Returns problem, extents and operands of each operation kind that a call runs."""
    captured_calls: dict[str, tuple[Any, ...]] = {}
    for op_kind in backend.LAUNCHES:
        real = getattr(backend, op_kind)

        def noting(p: Any, e: Any, s: Any, *given: Any, real: Any = real, op_kind: str = op_kind) -> None:
            captured_calls[op_kind] = (p, e, given)
            real(p, e, s, *given)

        monkeypatch.setattr(backend, op_kind, noting)
    call()
    assert captured_calls
    return captured_calls


@pytest.mark.parametrize("name", CALLS)
def test_updated_plans_and_captured_graphs_equal_fresh_plans(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured lengths are shorter than replayed ones: grids and lists need room for the plan's lengths."""
    # The backward first, because it reads the forward's results.
    for op_kind, (problem, extents, given) in reversed(made_by(CALLS[name], monkeypatch).items()):
        long = [t for each in given for t in written(each)]
        result, graph = plan(problem, extents, CPU, "triton", op_kind, updatable=True), Captured(monkeypatch)
        result.update(SHORT)
        result.run(*given)
        with graph:
            result.run(*given)
        result.update(extents.kv_len)
        graph.replay()
        assert same([t for each in given for t in written(each)], long), op_kind
        result.update(SHORT)
        graph.replay()
        short = [t for each in given for t in written(each)]
        assert not same(short, long), op_kind
        plan(problem, result.extents, CPU, "triton", op_kind).run(*given)
        assert same(short, [t for each in given for t in written(each)]), op_kind


def test_updated_device_table_keeps_memory_address() -> None:
    def extents(*kv_len: int) -> Extents:
        zero = np.zeros(3, np.int64)
        return Extents(zero, np.array(kv_len), zero, zero, zero, zero)

    device_tables = layout_table.DeviceTables(extents(20, 40, 33))
    device_tables.update(extents(4, 17, 1))
    make = lambda e: np.repeat(np.arange(3), e.kv_len)[:, None]  # noqa: E731
    memory = device_tables.on(CPU, "list", make).tensor
    assert memory.shape == (93, 1)
    assert memory.sum() == 17 + 2
    device_tables.update(extents(20, 40, 33))
    assert device_tables.on(CPU, "list", make).tensor.data_ptr() == memory.data_ptr()
    assert memory.sum() == 40 + 66


@pytest.mark.parametrize("window", [1, 5, 16, 33])
def test_dense_kl_loss_reads_at_most_the_planned_number_of_key_tiles(window: int) -> None:
    q, tile, most = np.array([1, 40]), Tile(16, 16, 4, 1), 90
    capacity = of_window(q, np.array([most, most]), window)
    buffer, turns = launch_dense_kl_loss.most_turns(capacity, tile), []
    for kv_len in range(most + 1):
        turns.append(launch_dense_kl_loss.turns_of(of_window(q, np.array([kv_len, most - kv_len]), window), tile)[2])
        assert (turns[-1] <= buffer).all()
    assert (np.max(turns, 0) == buffer).all()


def of_window(q_len: np.ndarray, kv_len: np.ndarray, window: int) -> Extents:
    """Returns extents: each row sees `window` keys up to the row's position, aligned to the last key."""
    hi = kv_len - q_len + 1
    return Extents(q_len, kv_len, hi - window, hi, 0 * hi, hi)
