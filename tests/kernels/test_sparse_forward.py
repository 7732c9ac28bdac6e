"""Attention to lists of selected keys under Triton's interpreter, against golden."""

from __future__ import annotations

from typing import Any

import pytest

from fusion_attention.backends.triton import shapes, shapes_sparse
from fusion_attention.testing import compare
from fusion_attention.testing.cases import Results
from fusion_attention.testing.sparse import SparseCase, arguments, golden, lowered, plain
from fusion_attention.torch_ops.eager import run

RESULTS = ("out", "max", "sum")
pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")
TWO: dict[str, Any] = {"q_len": (3, 4), "kv_len": (7, 9)}
PAGED: dict[str, Any] = {"page": 16, "kv_len": (33, 7), "q_len": (3, 2)}
MLA: dict[str, Any] = {"dim_qk": 32, "dim_v": 32, "dim_rope": 8, "shares_kv": True}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a few heads and keys take several."""
    monkeypatch.setattr(shapes_sparse, "forward_tile", lambda *_: shapes.Tile(16, 16, 4, 1))


def forward(args: dict[str, Any], backend: str = "triton") -> Results:
    return dict(zip(RESULTS, run(lowered(args), backend).values(), strict=True))


def judge(case: SparseCase, args: dict[str, Any] | None = None) -> None:
    args = arguments(case) if args is None else args
    want, measure = golden(case, args), plain(case, args)
    for name, mine in forward(args).items():
        compare(f"{case.id}: {name}", mine, want[name], measure[name], max(case.kv_len))


CASES = [
    SparseCase(**TWO),
    SparseCase("TND", dtype="bfloat16", q_len=(0, 5, 1, 0), kv_len=(3, 9, 4, 0), q_rest=1, kv_rest=2, dim_rope=4),
    SparseCase("TND", dtype="float16", heads_q=6, heads_kv=3, dim_qk=7, dim_v=5, sink=True, **TWO),
    SparseCase("BSND", dtype="float16", dim_qk=24, dim_v=16, shares_kv=True, block=3, count=7, lists="all", **TWO),
    SparseCase("BSND", dtype="bfloat16", heads_q=33, count=20, lists="all", **MLA, q_len=(2,), kv_len=(40,)),
    SparseCase("BSND", lists="wild", count=9, block=4, q_len=(7, 3), kv_len=(40, 9)),
    SparseCase("TND", lists="repeated", count=20, mode=0, wide=True, **TWO),
    SparseCase(lists="none", sink=True, **TWO),
    SparseCase(lists="short", count=40, q_len=(1, 2), kv_len=(60, 3)),
    SparseCase(q_len=(9, 9), kv_len=(4, 4), lists="all", sink=True, dtype="bfloat16"),
    SparseCase(q_len=(0, 0), kv_len=(4, 4)),
    SparseCase(q_len=(4, 4), kv_len=(0, 0), sink=True),
    SparseCase(heads_q=1, dim_qk=80, dim_v=3, dim_rope=5, q_len=(2,), kv_len=(50,), layout="TND", count=60, scale=-0.1),
    SparseCase(heads_q=8, dim_qk=16, dim_v=16, block=64, count=3, lists="all", q_len=(2,), kv_len=(150,), mode=0),
    *(SparseCase(**PAGED, block=n, count=5, lists="all", dtype=d, **MLA) for n, d in ((1, "bfloat16"), (8, "float32"))),
    SparseCase("TND", **PAGED, count=7, lists="wild", heads_kv=2, sink=True, mode=0),
]
HEADS = [
    pytest.param(SparseCase(heads_q=heads, dtype="float16", count=20, lists="all", **MLA, q_len=(2,), kv_len=(30,)),
                 marks=[] if heads in (3, 64) else [pytest.mark.slow])
    for heads in (1, 3, 8, 16, 64, 128)
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *HEADS], ids=lambda case: case.id)
def test_cases(case: SparseCase) -> None:
    judge(case)
