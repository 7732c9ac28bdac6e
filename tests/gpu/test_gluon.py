"""The Gluon forward on sm_90: the cases that Gluon computes, against golden and against the Triton kernels."""

import pytest
import torch
from support.aligned import aligned
from support.bits import same_bits
from support.cases import CAUSAL
from support.run_case_on_gpu import on_gpu

from fusion_attention.backends.triton.dense import select_gluon
from fusion_attention.testing import Case, arguments, check, expected

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.skipif(not HOPPER, reason="Gluon's forward is for sm_90"),
    pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning"),
]

TEN_TILES = {"q_len": (1300,), "kv_len": (1300,)}  # of 128 keys: every ring turns round several times
SHAPES = [
    TEN_TILES,
    TEN_TILES | CAUSAL,
    TEN_TILES | {"sparse_mode": 4, "mask": "compressed", "pre": 300, "next": 40},
    {"q_len": (1,), "kv_len": (1,)},
    {"q_len": (130,), "kv_len": (129,), "sink": True} | CAUSAL,
    {"layout": "TND", "q_len": (300, 0, 517, 3), "kv_len": (300, 40, 517, 0), "sink": True} | CAUSAL,
    {"layout": "TND", "q_len": (64, 65, 1), "kv_len": (700, 128, 127), "heads_q": 8, "heads_kv": 2},
    {"sparse_mode": 6, "mask": "compressed", "prefix": (200, 150), "q_len": (256, 256), "kv_len": (400, 400)},
]
CASES = [
    Case(**shape, dtype=dtype, dim_qk=128, dim_v=128, scale=0.088, inner_precise=precise)
    for shape in SHAPES
    for dtype, precise in (("bfloat16", 0), ("float16", 2))  # 2: rows that see no key are zeros, not means
]


@pytest.fixture(autouse=True)
def by_gluon(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records for every forward whether Gluon computes it."""
    served: list[bool] = []
    serves = select_gluon.serves
    monkeypatch.setattr(select_gluon, "serves", lambda *given: served.append(serves(*given)) or served[-1])
    return served


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gluon_forward_matches_float64_reference(case: Case, by_gluon: list[bool]) -> None:
    args = aligned(arguments(case))
    check(case.id, on_gpu(case, args), expected(case, args))
    assert by_gluon == [True]


def test_rows_of_minus_inf_scores_return_the_mean_of_values(by_gluon: list[bool]) -> None:
    case = Case(q_len=(200,), kv_len=(300,), dtype="bfloat16", dim_qk=128, dim_v=128, scale=0.088)
    args = aligned(arguments(case))
    args["key"].abs_()
    args["query"][:, [3, 150]] = -torch.inf
    result, want = on_gpu(case, args), expected(case, args)
    names = ("out", "max", "sum")
    check(case.id, {name: result[name] for name in names}, {name: want[name] for name in names})
    assert by_gluon == [True]


def test_repeated_runs_are_bitwise_equal(by_gluon: list[bool]) -> None:
    """Data races between phases of the kernel's barriers would make runs differ."""
    case = Case("BNSD", "bfloat16", (2000,), (2000,), heads_q=32, heads_kv=8, dim_qk=128, dim_v=128, **CAUSAL)
    args = aligned(arguments(case))
    first = on_gpu(case, args)
    for _ in range(20):
        same_bits(on_gpu(case, args), first)
    assert all(by_gluon)
