"""The decode kernels under Triton's interpreter against golden: pages, quantised caches, lengths that change."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from caches import CACHES, Cache, judge, made, results

from fusion_attention.backends import triton as backend
from fusion_attention.backends.triton import paged, shapes
from fusion_attention.contract import BackendError
from fusion_attention.kv import RowView


def run(cache: Cache) -> None:
    p, e, operands = cache.problem, cache.extents(), made(cache, "cpu")
    assert backend.reasons_against(p, "cpu") == []
    backend.attention_forward(p, e, backend.schedule(p, e, "attention_forward"), operands)
    judge(cache, operands, e)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.id)
def test_caches(cache: Cache) -> None:
    run(cache)


def test_updated_lengths_are_computed_without_a_new_plan() -> None:
    cache = Cache(q_len=2)
    p, operands = cache.problem, made(cache, "cpu", capacity=70)
    schedule = backend.schedule(p, cache.extents(), "attention_forward")
    for kv_len in ((37, 70, 0), (64, 16, 3), (2, 70, 70)):
        e = cache.extents(kv_len)
        assert backend.reschedule(p, e, "attention_forward", schedule) is schedule
        # The plan's own lengths go on being given: what counts is on the device.
        backend.attention_forward(p, cache.extents(), schedule, operands)
        judge(dataclasses.replace(cache, kv_len=kv_len), operands, e)


def test_a_table_that_points_anywhere_stays_in_the_pool() -> None:
    cache = Cache(kv_len=(40,))
    p, e, operands = cache.problem, cache.extents(), made(cache, "cpu")
    operands.k.table[:] = torch.tensor([[-5, 1 << 30, 2]], dtype=torch.int32)[:, : operands.k.table.shape[1]]  # type: ignore[union-attr]
    operands.v = dataclasses.replace(operands.v, table=operands.k.table)  # type: ignore[type-var, union-attr]
    backend.attention_forward(p, e, backend.schedule(p, e, "attention_forward"), operands)
    assert results(operands)[0].shape == (1, 1, 4, 16)  # it came back: what it computed is anyone's


def test_a_pool_is_measured_by_its_memory() -> None:
    view = made(Cache(), "cpu").k
    pages = view.pool.shape[0]  # type: ignore[union-attr]
    assert paged.pool_of(view, 2) == pages - 1  # type: ignore[arg-type]
    assert paged.pool_of(view.over(view.pool[1:]), 2) == pages - 2  # type: ignore[arg-type, union-attr]
    assert paged.pool_of(view.over(view.pool[:0]), 2) == pages - 1  # type: ignore[arg-type, union-attr]


def test_rows_and_pages_do_not_mix() -> None:
    cache = Cache()
    p, e, operands = cache.problem, cache.extents(), made(cache, "cpu")
    schedule = backend.schedule(p, e, "attention_forward")
    axis = np.zeros(3, np.int64)
    odd = dataclasses.replace(operands, v=RowView((torch.zeros(9),), axis, 1, axis, 16))
    with pytest.raises(BackendError, match="expected pages for k and v, got rows for v"):
        backend.attention_forward(p, e, schedule, odd)
    two = dataclasses.replace(operands, v=dataclasses.replace(operands.v, table=operands.v.table.clone()))  # type: ignore[type-var, union-attr]
    with pytest.raises(BackendError, match="expected one page table, got another for v"):
        backend.attention_forward(p, e, schedule, two)


@pytest.mark.parametrize(("programs", "keys", "wanted"), [(1, 64, 2), (1, 32, 1), (1, 10_000, 12), (100, 10_000, 1)])
def test_shares_fill_the_chip_a_few_times(programs: int, keys: int, wanted: int) -> None:
    assert paged.splits_of(programs, keys, shapes.Tile(16, 16, 4, 1), torch.device("cpu")) == wanted
