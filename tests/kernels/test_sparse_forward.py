"""Attention to lists of selected keys under Triton's interpreter, against golden."""

import math
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.launches import fresh_plans

from fusion_attention.backends.triton.common import launching, shapes
from fusion_attention.backends.triton.decode import launch as launch_decode
from fusion_attention.backends.triton.selected import launch as launch_sparse
from fusion_attention.ir.problem import Problem
from fusion_attention.testing import check
from fusion_attention.testing.cases import Results
from fusion_attention.testing.sparse import SparseCase, arguments, expected, lowered
from fusion_attention.torch_ops.eager import run

RESULTS = ("out", "max", "sum")
pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")
TWO: dict[str, Any] = {"q_len": (3, 4), "kv_len": (7, 9)}
PAGED: dict[str, Any] = {"page": 16, "kv_len": (33, 7), "q_len": (3, 2)}
SIZES: dict[str, Any] = {"dim_qk": 32, "dim_v": 40}
MLA: dict[str, Any] = {"dim_qk": 32, "dim_v": 32, "dim_rope": 8, "shares_kv": True}


def forward(args: dict[str, Any], backend: str = "triton") -> Results:
    return dict(zip(RESULTS, run(lowered(args), backend).values(), strict=True))


def judge(case: SparseCase, args: dict[str, Any] | None = None) -> None:
    args = arguments(case) if args is None else args
    check(case.id, forward(args), expected(lowered(args)))


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
def test_triton_sparse_forward_matches_reference(case: SparseCase) -> None:
    judge(case)


# Lists of several tiles, some short or empty; pages, a negative scale, sinks, two key heads.
SPLIT = [
    *(CASES[n] for n in (4, 8, 12)),
    SparseCase(lists="none", sink=True, count=20, q_len=(2,), kv_len=(30,)),
    SparseCase("TND", **PAGED, count=20, lists="wild", heads_kv=2, sink=True, mode=0),
]


@pytest.fixture
def split_grids(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Simulates a chip so large that programs split every list; records the grids of launches."""
    grids: list[Any] = []
    real = launching.launch

    def noting(kernel: Any, grid: tuple[int, ...], *given: Any) -> None:
        grids.append(grid)
        real(kernel, grid, *given)

    monkeypatch.setattr(launch_decode, "processors", lambda _: 1 << 20)
    monkeypatch.setattr(launch_decode, "LEAST_TILES", 1)
    monkeypatch.setattr(launching, "launch", noting)
    fresh_plans(monkeypatch)
    return grids


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.id)
def test_triton_sparse_forward_splits_lists_of_few_tokens_among_programs(
    case: SparseCase, split_grids: list[Any]
) -> None:
    judge(case)
    assert next(grid for grid in split_grids if len(grid) == 2)[1] == -(-case.count // 16) > 1


def test_sparse_list_split_depends_only_on_problem_sizes() -> None:
    """The lists of few tokens are split, so that the programs fill the chip once."""
    p = Problem(128, 1, 512, 512, scale=0.1, dim_rope=64, shares_kv=True, select_count=2048)
    tile = shapes.Tile(64, 32, 8, 3)
    slots = {rows: launch_sparse.slots_per_program(p, 2048, rows, tile, 132) for rows in (0, 1, 4, 20, 34)}
    shares = {rows: -(-2048 // of_program) for rows, of_program in slots.items()}
    assert {rows: shares[rows] for rows in (1, 4, 20, 34)} == {1: 32, 4: 16, 20: 3, 34: 1}
    assert slots[0] > 0


def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes kernels compute offsets in int64."""
    monkeypatch.setattr(launch_sparse, "NEAR", 1)


@pytest.mark.parametrize("case", [CASES[0], CASES[-2]], ids=lambda case: case.id)
def test_triton_sparse_forward_with_64_bit_row_offsets_returns_same_bits(
    case: SparseCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(case)
    want = forward(args)
    far(monkeypatch)
    same_bits(forward(args), want)


@pytest.mark.parametrize("block", [1, 3])
def test_triton_sparse_forward_ignores_list_entries_out_of_range(block: int) -> None:
    """List entries are not checked: those beyond the last block name no key, a negative one ends the list."""
    case = SparseCase("TND", q_len=(3, 5), kv_len=(7, 20), count=18, block=block, mode=0, heads_kv=2, sink=True)
    args = arguments(case)
    call, lists = lowered(args), args["sparse_indices"]
    lists.copy_(torch.randint(0, 20 // block + 3, lists.shape, generator=torch.Generator().manual_seed(block)))
    lists[0, :, 1], lists[2] = 2**31 - 1, -1
    lists[1, :, 2] = min((2**32 + 2) // block, 2**31 - 1)  # times 3 it is 2 where 32 bits hold no more
    lists[3, 1, :4] = torch.tensor([1 << 30, 0, -(2**31), 0], dtype=torch.int32)
    check(case.id, dict(zip(RESULTS, run(call, "triton").values(), strict=True)), expected(call))


def test_triton_sparse_forward_clamps_page_table_entries_out_of_range() -> None:
    case = SparseCase("TND", page=16, q_len=(2, 2), kv_len=(33, 20), count=9, lists="all", mode=0)
    args = arguments(case)
    call, want = lowered(args), forward(args)["out"]
    for wild in (-7, 1 << 30, 2**31 - 1):
        args["block_table"][1, :2] = wild
        out = next(iter(run(call, "triton").values()))
        same_bits({"out": out[:2]}, {"out": want[:2]})


@pytest.mark.parametrize("int64", [False, True])
def test_triton_sparse_forward_accepts_int64_and_strided_page_tables(int64: bool) -> None:
    args = arguments(CASES[-1])
    want, table = forward(args), args["block_table"]
    args["block_table"] = table.long() if int64 else table.repeat_interleave(2, 1)[:, ::2]
    same_bits(forward(args), want)


@pytest.mark.parametrize("names", [("key",), ("key", "value")])
def test_triton_sparse_forward_accepts_expanded_page_pools(names: tuple[str, ...]) -> None:
    args = arguments(CASES[-1])
    for name in names:
        args[name] = args[name][:1].nan_to_num(0.5).expand(args[name].shape)
    copies = {name: args[name].clone(memory_format=torch.contiguous_format) for name in names}
    same_bits(forward(args), forward(args | copies))


# -------------------------------------------------------------------------------------------------- NaN and infinity


@pytest.mark.parametrize(("name", "fill"), [("key", math.nan), ("value", math.inf), ("query", -math.inf)])
def test_triton_sparse_forward_nan_and_infinity_match_reference(
    name: str, fill: float, request: pytest.FixtureRequest
) -> None:
    if name == "key":  # the statistics of one share are NaN
        request.getfixturevalue("split_grids")
    case = SparseCase("TND", dtype="bfloat16", heads_q=3, count=20, q_len=(6,), kv_len=(64,), mode=0, **SIZES)
    args = arguments(case)
    args[name][int(args["sparse_indices"][3, 0, 0]) if name != "query" else 3, 0, 5] = fill
    want = expected(lowered(args))
    assert not want["out"].value.isfinite().all()
    check(case.id, forward(args), want)


@pytest.mark.parametrize("paged", [False, True])
def test_triton_sparse_infinite_values_survive_underflowing_weights(
    paged: bool, request: pytest.FixtureRequest
) -> None:
    if paged:  # one share holds the largest weight, others infinities
        request.getfixturevalue("split_grids")
    page = {"page": 16} if paged else {}
    case = SparseCase("TND", heads_q=3, dim_qk=16, dim_v=5, scale=1.0, sink=True, count=90, lists="all", q_len=(2,),
                      kv_len=(90,), mode=0, **page)  # fmt: skip
    args = arguments(case)
    strides = [at(args, case, token) for token in range(90)]
    args["query"].fill_(1.0)
    for token, place in enumerate(strides):
        args["key"][place] = 200 / 16 if token == 30 else 0.0  # every other key's weight underflows
        args["value"][place] = 1.0
    args["sparse_indices"][:] = torch.arange(90, dtype=torch.int32)
    args["sinks"][2] = 300.0
    for token, element, fill in ((5, 0, math.inf), (65, 1, -math.inf), (6, 2, math.inf), (60, 2, -math.inf)):
        args["value"][(*strides[token], 0, element)] = fill
    args["key"][(*strides[7], 0, 3)] = -math.inf  # a weight of 0, not merely small: the key is not seen
    args["value"][(*strides[7], 0, slice(3, None))] = math.inf
    out = forward(args)["out"].double()
    assert (out[..., 0] == math.inf).all()
    assert (out[..., 1] == -math.inf).all()
    assert out[..., 2].isnan().all()
    assert (out[:, :2, 3:] == 1.0).all()


def at(args: dict[str, Any], case: SparseCase, token: int) -> tuple[int, ...]:
    """Returns the index of a token of the first sequence: (token,), or (page, slot)."""
    if not case.page:
        return (token,)
    return int(args["block_table"][0, token // case.page]), token % case.page
