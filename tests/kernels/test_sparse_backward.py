"""The backward over selected keys under Triton's interpreter, against golden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bits import same_bits

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
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cases(case: SparseCase) -> None:
    judge(case)
