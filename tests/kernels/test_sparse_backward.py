"""The backward over selected keys under Triton's interpreter, against golden."""

from __future__ import annotations

from typing import Any

import pytest

from fusion_attention.backends.triton import launch_sparse_backward as launched
from fusion_attention.backends.triton.shapes_sparse_backward import Cut
from fusion_attention.ops.sparse.call import Sparse, SparseBackward
from fusion_attention.testing import compare
from fusion_attention.testing.cases import Results
from fusion_attention.testing.sparse import SparseCase, arguments, golden, in_float64, lowered, plain
from fusion_attention.torch_ops.eager import run

SMALL = Cut(16, 16, 16, 4, 1)
TWO: dict[str, Any] = {"q_len": (3, 4), "kv_len": (7, 9)}


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a few slots, heads and columns take several."""
    monkeypatch.setattr(launched.cuts, "cut_of", lambda *_: SMALL)


def backward(case: SparseCase, args: dict[str, Any], backend: str = "triton") -> Results:
    """The gradients from golden's output and statistics."""
    call: Sparse = lowered(args)
    wide = [t.detach() for t in run(in_float64(call), "golden").values()]
    saved = (wide[0].to(call.problem.torch_dtype), *(t.float() for t in wide[1:]))
    return run(SparseBackward(call, args["dy"], *saved), backend)


def judge(case: SparseCase) -> None:
    args = arguments(case)
    want, measure, found = golden(case, args), plain(case, args), backward(case, args)
    assert found
    for name, mine in found.items():
        compare(f"{case.id}: {name}", mine, want[name], measure[name], max(case.kv_len))


CASES = [
    SparseCase(**TWO),
    SparseCase(
        "TND", dtype="bfloat16", q_len=(0, 5, 1, 0), kv_len=(3, 9, 4, 0), q_rest=1, kv_rest=2, dim_rope=4, dim_v=5
    ),
    SparseCase("TND", dtype="float16", heads_q=16, heads_kv=2, dim_qk=40, dim_v=24, lists="repeated", sink=True, **TWO),
    SparseCase("BSND", dtype="float16", shares_kv=True, dim_qk=12, dim_v=8, block=3, count=2, **TWO),
    SparseCase("BSND", dtype="bfloat16", shares_kv=True, dim_qk=32, dim_v=32, dim_rope=16, heads_q=8, count=20, **TWO),
    SparseCase("TND", shares_kv=True, dim_qk=37, dim_v=18, heads_q=3, lists="wild", count=6, sink=True, **TWO),
    SparseCase("BSND", heads_q=2, heads_kv=2, block=4, count=5, lists="wild", mode=0, **TWO),
    SparseCase(lists="none", sink=True, **TWO),
    SparseCase("BSND", dtype="float16", lists="short", q_len=(1, 1), kv_len=(20, 3), count=7, wide=True),
    SparseCase(
        "BSND", dtype="bfloat16", heads_q=33, dim_qk=16, dim_v=16, lists="all", q_len=(2,), kv_len=(19,), count=19
    ),
    SparseCase("BSND", dtype="bfloat16", heads_q=1, lists="all", q_len=(6,), kv_len=(4,)),
]
WIDE = [
    SparseCase("BSND", dtype="bfloat16", heads_q=128, dim_qk=64, dim_v=64, dim_rope=16, shares_kv=True, q_len=(3,),
               kv_len=(40,), count=40),
    SparseCase("TND", dtype="float16", heads_q=64, dim_qk=96, dim_v=80, q_len=(3, 2), kv_len=(9, 12), count=12,
               sink=True),
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *WIDE], ids=lambda case: case.id)
def test_cases(case: SparseCase) -> None:
    judge(case)
