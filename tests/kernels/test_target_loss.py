"""The indexer's loss against a given target under the interpreter: golden's results, the same bits for any chunks."""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
from support.bits import same_bits

from fusion_attention import plan as plans
from fusion_attention.backends.triton.common.shapes import Tile
from fusion_attention.backends.triton.indexer import launch_dense_kl_loss, launch_loss, shapes_loss
from fusion_attention.backends.triton.selected import launch_key_sum
from fusion_attention.ops.indexer_loss.lowered_call import RESULTS, TARGET_RESULTS
from fusion_attention.testing.expected_indexer import check_index
from fusion_attention.testing.target_loss import TargetCase, arguments, lowered
from fusion_attention.torch_ops.eager import run

PACKED = TargetCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9))
HALF = {"dtype": "bfloat16", "weights": "bfloat16"}
CASES = [
    *(TargetCase(count=count) for count in (0, 6)),
    *(replace(PACKED, count=count, **HALF) for count in (0, 4)),
    *(TargetCase(dtype="float16", weights="float16", q_len=(20,), kv_len=(40,), count=count) for count in (0, 18)),
    *(TargetCase(lists=lists, count=7, mode=mode) for lists, mode in (("repeated", 3), ("short", 0), ("wild", 3))),
    *(TargetCase(target=target, count=count) for target in ("zero", "nan") for count in (0, 6)),
    *(replace(PACKED, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, count=n) for n in (0, 6)),
    *(TargetCase(q_len=(0, 0), kv_len=(4, 4), count=count) for count in (0, 6)),
    *(TargetCase(q_len=(70, 20), kv_len=(17, 17), ratio=4, residual=(2, 0), count=count) for count in (0, 5)),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    # Statistics have the tiles of differences: numpy's products round scores of both alike then, as a GPU's always do.
    tiles = shapes_loss.Warm(*(Tile(16, 32, 4, 1),) * 3, Tile(16, 16, 4, 1), Tile(16, 32, 4, 1), 16)
    monkeypatch.setattr(shapes_loss, "warm_tiles", lambda *_: tiles)
    lists = shapes_loss.Selected(*(Tile(16, 16, 4, 1),) * 2, 16)
    monkeypatch.setattr(shapes_loss, "selected_tiles", lambda *_: lists)
    monkeypatch.setattr(launch_loss, "SLOTS", 16)


def judge(call: Any) -> None:
    check_index(call, {"triton": run(call, "triton")})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases(case: TargetCase) -> None:
    args = arguments(case)
    judge(lowered(case, args, RESULTS))
    judge(lowered(case, args, TARGET_RESULTS))


def test_a_target_that_counts_as_one() -> None:
    call = lowered(CASES[0], arguments(CASES[0]), TARGET_RESULTS)
    judge(replace(call, problem=replace(call.problem, unit_target=True)))


@pytest.mark.parametrize("case", CASES[2:4], ids=lambda case: case.id)
def test_chunks_change_no_bit(case: TargetCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_key_sum, "BLOCK", 1)
    call, results = lowered(case, arguments(case)), []
    for size in (1 << 25, 1):
        monkeypatch.setattr(plans, "_PLANS", OrderedDict())
        monkeypatch.setattr(launch_loss, "BUFFER", size)
        monkeypatch.setattr(launch_dense_kl_loss, "BUFFER", size)
        results.append(run(call, "triton"))
    same_bits(results[1], results[0])
