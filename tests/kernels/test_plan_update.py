"""Plan.update under Triton's interpreter: repeated launches with the same arguments compute the new lengths."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.paged_decode_calls import Cache, judge, operands_on, rows

from fusion_attention.backends.triton.common import launching, layout_table
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem, Stats
from fusion_attention.plan import Plan, plan

CPU = torch.device("cpu")


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns a function that repeats all launches so far, with the same kernels, grids and arguments."""
    recorded: list[tuple[Any, ...]] = []
    real = launching.launch

    def recording(*given: Any) -> None:
        recorded.append(given)
        real(*given)

    monkeypatch.setattr(launching, "launch", recording)
    return lambda: [real(*given) for given in recorded] and None  # type: ignore[return-value]


def updatable(problem: Problem, extents: Extents, op_kind: str = "attention_forward") -> Plan:
    return plan(problem, extents, CPU, "triton", op_kind, updatable=True)


@pytest.mark.parametrize("cache", [Cache(q_len=2), Cache(dequant="token", dtype="float16")], ids=lambda cache: cache.id)
def test_replayed_decode_after_plan_update_uses_new_lengths(cache: Cache, replay: Callable[[], None]) -> None:
    capacity = (40, 70, 33)
    cache = dataclasses.replace(cache, kv_len=capacity)
    operands, result = operands_on(cache, "cpu"), updatable(cache.problem, cache.extents())
    result.run(operands)
    for kv_len in ((37, 70, 0), (2, 16, 33), capacity):
        result.update(kv_len)
        operands.out.keep[0].fill_(math.nan)
        replay()
        judge(dataclasses.replace(cache, kv_len=kv_len), operands, cache.extents(kv_len))


def extents(kv_len: tuple[int, ...]) -> Extents:
    """Returns extents of three causal sequences, aligned to the last key."""
    q, keys = np.array([5, 20, 3]), np.array(kv_len)
    return Extents(q, keys, q * 0 - INFINITE, keys - q + 1, q * 0, keys - q)


def dense(problem: Problem) -> tuple[Operands, Grads]:
    """Returns random operands for up to 40 keys per sequence, and gradients; statistics hold NaN."""
    torch.manual_seed(3)
    queries, keys, p = (3, 20, problem.heads_q), (3, 40, problem.heads_kv), problem

    def of(shape: tuple[int, ...], dim: int, value: float | None = None) -> Any:
        return rows(torch.randn(*shape, dim) if value is None else torch.full((*shape, dim), value))

    stats = Stats(of(queries, 1, math.nan), of(queries, 1, math.nan))
    operands = Operands(of(queries, p.dim_qk), of(keys, p.dim_qk), of(keys, p.dim_v), of(queries, p.dim_v, 0.0), stats)
    grads = Grads(of(queries, p.dim_v), of(queries, p.dim_qk, 0.0), of(keys, p.dim_qk, 0.0), of(keys, p.dim_v, 0.0))
    return operands, grads


def written(operands: Operands, grads: Grads) -> list[torch.Tensor]:
    views = (operands.out, operands.stats.max, operands.stats.sum, grads.dq, grads.dk, grads.dv)
    return [view.keep[0] for view in views if view is not None]


def test_replayed_dense_plans_after_update_are_bitwise_equal_to_fresh_plans(replay: Callable[[], None]) -> None:
    """Captured lengths are shorter than replayed ones: grids and lists need room for the plan's lengths."""
    problem, capacity = Problem(2, 1, 16, 8, scale=0.3), (20, 40, 33)
    operands, grads = dense(problem)
    forward, backward = (
        updatable(problem, extents(capacity), f"attention_{op_kind}") for op_kind in ("forward", "backward")
    )
    for kv_len in ((4, 17, 1), (0, 40, 33)):
        for result in (forward, backward):
            result.update(kv_len)
        for tensor in written(operands, grads):
            tensor.zero_()
        if kv_len == (4, 17, 1):
            forward.run(operands), backward.run(operands, grads)
        else:
            replay()
        again, others = dense(problem)
        for tensor in written(again, others):
            tensor.zero_()
        plan(problem, extents(kv_len), CPU, "triton").run(again)
        plan(problem, extents(kv_len), CPU, "triton", "attention_backward").run(again, others)
        same_bits(written(operands, grads), written(again, others))
        assert written(operands, grads)[-1].any()


def test_updated_device_table_keeps_memory_address() -> None:
    device_tables = layout_table.DeviceTables(extents((20, 40, 33)))
    device_tables.update(extents((4, 17, 1)))
    make = lambda e: np.repeat(np.arange(3), e.kv_len)[:, None]  # noqa: E731
    memory = device_tables.on(CPU, "list", make).tensor
    assert memory.shape == (93, 1)
    assert memory.sum() == 17 + 2
    device_tables.update(extents((20, 40, 33)))
    assert device_tables.on(CPU, "list", make).tensor.data_ptr() == memory.data_ptr()
    assert memory.sum() == 40 + 66
