"""The indexer's loss and the warm-up pair under the interpreter: golden's results, and the same bits for any chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.selected import operands

from fusion_attention.backends.triton import launch_loss, shapes_loss
from fusion_attention.backends.triton.shapes import Tile
from fusion_attention.testing import compare
from fusion_attention.testing.indexer_loss import LossCase, golden, lowered, plain
from fusion_attention.torch_ops.eager import run

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")

PACKED = LossCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9))
HALF = {"dtype": "bfloat16", "weights": "bfloat16"}
WARM = [
    LossCase(count=0),
    LossCase(
        count=0, dtype="float16", weights="float16", q_len=(20,), kv_len=(40,), heads_q=6, heads_kv=3, dim_qk=7, dim=5
    ),
    replace(PACKED, count=0, sink=True, heads_kv=2, dim_rope=3),
    replace(PACKED, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, count=0, **HALF),
    LossCase(q_len=(5, 2, 0), kv_len=(3, 9, 4), q_rest=1, kv_rest=2, count=0, heads_q=1, heads=1, dim=1, dim_qk=20),
    LossCase(q_len=(40,), kv_len=(70,), count=0, window=21, dim_qk=24, dim_rope=8, heads_q=2, heads=5, dim=16, **HALF),
    LossCase(q_len=(0, 0), kv_len=(4, 4), count=0),
    replace(PACKED, q_len=(0,), kv_len=(0,), count=0),
]

LISTS = ("all", "repeated", "short", "none", "wild")
SELECTED = [
    LossCase(),
    *(LossCase(lists=lists, count=7, mode=mode) for lists, mode in zip(LISTS, (0, 3, 3, 0, 3), strict=True)),
    replace(PACKED, lists="wild", count=7, **HALF),
    LossCase(lists="all", count=9, dim_qk=32, dim_rope=8, heads_q=8, heads=4, dim=16, **HALF),
    LossCase(dtype="float16", weights="float16", lists="repeated", wide=True, heads_q=6, heads_kv=3, dim_qk=7, dim=5),
    replace(PACKED, sink=True, count=5, heads_kv=2, dim_rope=3),
    LossCase(q_len=(9, 9), kv_len=(4, 4), count=6, lists="all", sink=True),
    replace(PACKED, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, lists="all", count=6, **HALF),
    LossCase(q_len=(5, 2, 0), kv_len=(3, 9, 4), q_rest=1, kv_rest=2, count=6, heads_q=1, heads=1, dim=1),
    LossCase(q_len=(3,), kv_len=(90,), count=40, lists="all", heads_q=33, heads=33, mode=0, window=60),
    LossCase(q_len=(0, 0), kv_len=(4, 4), count=6),
    replace(PACKED, q_len=(0,), kv_len=(0,), count=6),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = shapes_loss.Warm(Tile(16, 16, 4, 1), *(Tile(16, 32, 4, 1),) * 2, Tile(16, 16, 4, 1), Tile(16, 32, 4, 1), 16)
    monkeypatch.setattr(shapes_loss, "warm_tiles", lambda *_: tiles)
    lists = shapes_loss.Selected(*(Tile(16, 16, 4, 1),) * 3, 16)
    monkeypatch.setattr(shapes_loss, "selected_tiles", lambda *_: lists)
    monkeypatch.setattr(launch_loss, "SLOTS", 16)


def judge(case: LossCase) -> None:
    args = operands(case)
    want, measure, got = golden(case, args), plain(case, args), run(lowered(case, args), "triton")
    assert got.keys() == want.keys()
    for name in want:
        longest = sum(case.q_len) * max(case.kv_len) if name == "loss" else max(case.kv_len)
        compare(f"{case.id}: {name}", got[name], want[name].double(), measure[name], longest)


@pytest.mark.parametrize("case", [*WARM, *SELECTED], ids=lambda case: case.id)
def test_cases(case: LossCase) -> None:
    judge(case)
