"""The backward of attention to selected keys under Triton's interpreter, against golden."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.aligned import aligned
from support.bits import same_bits
from support.launches import fresh_plans

from fusion_attention.backends import triton as backend
from fusion_attention.backends.triton.common import launching
from fusion_attention.backends.triton.selected import launch_backward as launched
from fusion_attention.backends.triton.selected import launch_key_sum
from fusion_attention.memory import empty
from fusion_attention.ops.sparse.lowered_call import Sparse, SparseBackward
from fusion_attention.plan import compute
from fusion_attention.testing import check, compare
from fusion_attention.testing.cases import Results
from fusion_attention.testing.sparse import SparseCase, arguments, expected, golden, in_float64, lowered
from fusion_attention.torch_ops.eager import run

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")
TWO: dict[str, Any] = {"q_len": (3, 4), "kv_len": (7, 9)}
MLA: dict[str, Any] = {"dim_qk": 32, "dim_v": 32, "dim_rope": 8, "shares_kv": True}


def saved(call: Sparse) -> list[torch.Tensor]:
    """Returns golden's output, rounded once, and statistics in float32."""
    out, *stats = run(in_float64(call), "golden").values()
    return [out.to(call.problem.torch_dtype), *(t.float() for t in stats)]


def backward(args: Mapping[str, Any]) -> Results:
    call = lowered(args)
    return run(SparseBackward(call, args["dy"], *saved(call)), "triton")


def judge(case: SparseCase, args: dict[str, Any] | None = None) -> Results:
    args = arguments(case) if args is None else args
    result, want = backward(args), expected(lowered(args), args["dy"])
    check(case.id, result, {name: want[name] for name in result})
    return result


CASES = [
    SparseCase("TND", dtype="bfloat16", q_len=(0, 3, 1, 0), kv_len=(3, 9, 4, 0), q_rest=1, kv_rest=2, dim_rope=4),
    SparseCase(
        "TND", dtype="float16", heads_q=4, heads_kv=2, dim_qk=12, dim_v=20, sink=True, q_len=(1, 2), kv_len=(5, 6)
    ),
    SparseCase(dtype="float16", shares_kv=True, dim_qk=20, dim_v=18, block=3, count=2, q_len=(3,), kv_len=(9,)),
    SparseCase(dtype="bfloat16", heads_q=33, count=20, lists="all", **MLA, q_len=(2,), kv_len=(19,)),
    SparseCase("TND", shares_kv=True, dim_qk=37, dim_v=18, heads_q=3, lists="wild", count=6, sink=True, **TWO),
    SparseCase(lists="none", sink=True, **TWO),
    SparseCase(q_len=(4,), kv_len=(0,), sink=True),
    SparseCase(q_len=(0,), kv_len=(4,), sink=True),
    SparseCase(dtype="float16", lists="short", q_len=(1, 1), kv_len=(20, 3), count=7, wide=True, scale=-0.1),
    SparseCase(dtype="bfloat16", heads_q=1, lists="all", q_len=(6,), kv_len=(4,)),
]
REST = [
    SparseCase(**TWO),
    SparseCase(heads_q=2, heads_kv=2, block=4, count=5, lists="wild", mode=0, **TWO),
    SparseCase(dtype="bfloat16", dim_qk=96, dim_v=80, count=12, q_len=(2, 1), kv_len=(9, 12)),
    *(SparseCase(heads_q=heads, dtype=dtype, count=20, lists="all", **MLA, q_len=(2,), kv_len=(30,))
      for heads, dtype in ((8, "float16"), (16, "bfloat16"), (64, "bfloat16"), (128, "float16"))),
]  # fmt: skip
ALL = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_triton_sparse_backward_matches_reference(case: SparseCase) -> None:
    judge(case)


SUMMED = ("dkey", "dvalue")
LISTED = SparseCase("TND", dtype="bfloat16", lists="repeated", count=5, dim_rope=4, **TWO)


def test_triton_sparse_backward_is_bitwise_equal_in_chunks_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens select the same key, some of them more than once."""
    monkeypatch.setattr(launch_key_sum, "BLOCK", 1)  # of one token
    args = aligned(arguments(LISTED))
    together = judge(LISTED, args)
    taken: list[int] = []
    real = launched.launches
    monkeypatch.setattr(launched, "launches", lambda *given: taken.append(given[-1]) or real(*given))
    monkeypatch.setattr(launched, "BUDGET", 1)
    fresh_plans(monkeypatch)
    same_bits(backward(args), together)
    assert taken == [1] * sum(LISTED.q_len)


@pytest.mark.parametrize("block", [1, 3])
def test_triton_sparse_backward_ignores_list_entries_out_of_range(block: int) -> None:
    """Invalid entries: blocks behind the last key, the largest and the smallest int32, entries after it."""
    case = SparseCase(heads_q=2, count=6, block=block, mode=0, q_len=(3,), kv_len=(18,))
    args = arguments(case)
    call = lowered(args)
    largest, least = (1 << 31) - 1, -(1 << 31)
    wild = [[largest, 0, largest // 3, 1, 0, 1], [0, least, 1, 1, 1, 1], [18 // block + 1, 1, 0, 0, 0, 0]]
    args["sparse_indices"][0, :, 0] = torch.tensor(wild, dtype=torch.int32)  # behind the back of who checks it
    want = expected(call, args["dy"])
    for name, mine in run(SparseBackward(call, args["dy"], *saved(call)), "triton").items():
        compare(name, mine, want[name])
        assert mine.any()


def test_triton_sparse_backward_nan_and_infinity_match_reference() -> None:
    case = SparseCase(lists="random", count=2, mode=0, heads_q=2, q_len=(6,), kv_len=(20,))
    args = arguments(case)
    args["value"][0, int(args["sparse_indices"][0, 0, 0, 1]), 0, 1] = math.inf
    args["key"][0, int(args["sparse_indices"][0, 1, 0, 1]), 0, 1] = math.nan
    args["dy"][0, 2, 1, 0] = math.inf
    want, result = golden(case, args), backward(args)
    for name, mine in result.items():
        assert torch.equal(mine.isnan(), want[name].isnan()), name
        assert torch.equal(mine.isinf(), want[name].isinf()), name
        assert 0 < mine.isfinite().sum() < mine.numel(), name


def test_float16_sparse_gradients_of_scaled_loss_do_not_overflow() -> None:
    case = SparseCase("TND", dtype="float16", scale=1e-3, dim_qk=16, dim_v=16, **TWO)
    args = arguments(case)
    args["dy"][:3] *= 4096  # of one sequence: the other one's gradients keep their small parts
    args["value"] *= 64
    result = judge(case, args)
    assert result["dquery"].isfinite().all()
    assert args["dy"][:3].abs().max() > 10_000


def test_float32_sparse_key_gradients_are_not_rounded_to_bfloat16() -> None:
    case = SparseCase("TND", dtype="bfloat16", count=5, **TWO)
    args = arguments(case)
    call = lowered(args)
    step = SparseBackward(call, args["dy"], *saved(call))
    float32_sums = {n: empty(t, t.shape, torch.float32 if n in SUMMED else t.dtype) for n, t in step.results().items()}
    compute(step, float32_sums, "triton")
    want = expected(call, args["dy"])
    for name in SUMMED:
        rounded = float32_sums[name].bfloat16()
        compare(name, rounded, want[name])
        assert (float32_sums[name] != rounded)[: sum(case.kv_len)].any(), name


def test_triton_sparse_backward_allocates_at_most_workspace_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(LISTED, sink=True, dtype="float16")
    call = lowered(arguments(case))
    taken: list[int] = []

    def counted(*given: Any) -> torch.Tensor:
        fresh = empty(*given)
        taken.append(fresh.nbytes)
        return fresh

    monkeypatch.setattr(launching, "empty", counted)
    backward(arguments(case))
    workspace = backend.workspace_bytes(call.problem, call.extents, "attention_backward")
    assert 0 < sum(taken) <= workspace
    assert workspace < launched.BUDGET
