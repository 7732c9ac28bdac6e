"""The native core's attention to selected keys: every variant, forced, against golden.

Keys and pages that are not selected and gaps hold NaN; lists lie between invalid indices; results are poisoned.
"""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.native_dense import VARIANTS
from support.native_lowered import Args, Results, extents_of, far, hostile, in_pages, run

from fusion_attention.backends import cpu
from fusion_attention.ir.problem import IndexerLossProblem, IndexerProblem, Problem
from fusion_attention.ops.sparse.lowered_call import SparseBackward
from fusion_attention.testing import check
from fusion_attention.testing.sparse import SparseCase, arguments, expected, lowered, selected, sequence_of

DTYPES = ("float32", "float16", "bfloat16")
RESULTS = ("out", "max", "sum")


def drawn(case: SparseCase) -> Args:
    args = arguments(case)

    def weighed(b: int, row: int, head: int) -> list[int]:
        return selected(case, sequence_of(case, args["sparse_indices"], "q", b)[row, head].tolist(), b, row)

    return hostile(case, args, weighed, case.heads_kv)


def forward(args: Args, *how: Any, **more: Any) -> Results:
    return dict(zip(RESULTS, run(lowered(args), *how, **more).values(), strict=True))


def backward(args: Args, saved: Results, *how: Any, **more: Any) -> Results:
    return run(SparseBackward(lowered(args), args["dy"], *(saved[name] for name in RESULTS)), *how, **more)


class Judge:
    """Golden's results and error bounds of a call; gradients start from golden's results in the stored dtypes."""

    def __init__(self, case: SparseCase, args: Args) -> None:
        self.name, self.want = case.id, expected(lowered(args), args["dy"])
        dtypes = (args["dy"].dtype, torch.float32, torch.float32)
        self.saved = {name: self.want[name].value.to(dtype) for name, dtype in zip(RESULTS, dtypes, strict=True)}

    def __call__(self, got: Results) -> None:
        check(self.name, got, {name: self.want[name] for name in got})


def draw(seed: int) -> SparseCase:
    rng = random.Random(seed)
    heads_kv, dim = rng.choice([1, 1, 1, 2, 3]), rng.choice([1, 7, 16, 33, 48, 64, 96])
    shares, count = rng.random() < 0.4, rng.choice([1, 2, 3])
    part_of_keys = shares and rng.random() < 0.5
    return SparseCase(
        layout="TND",
        dtype=rng.choice(DTYPES),
        q_len=tuple(rng.choice([0, 1, 2, 5, 11]) for _ in range(count)),
        kv_len=tuple(rng.choice([0, 1, 9, 60, 260]) for _ in range(count)),
        mode=rng.choice([0, 3]),
        heads_q=heads_kv * rng.choice([1, 2, 5, 8, 13, 17, 40]),
        heads_kv=heads_kv,
        dim_qk=dim,
        dim_v=rng.randint(1, dim) if part_of_keys else dim if shares else rng.choice([1, 9, 32, 40, dim]),
        dim_rope=rng.choice([0, 0, 3, 16, 20]),
        scale=rng.choice([dim**-0.5, dim**-0.5, -0.2, 0.0, 0.05]),
        shares_kv=shares,
        block=rng.choice([1, 1, 2, 5, 16, 64]),
        count=rng.choice([1, 3, 12, 40, 150, 300]),
        lists=rng.choice(["random", "random", "short", "repeated", "wild", "wild"]),
        sink=rng.random() < 0.3,
    )


@pytest.mark.parametrize("seed", range(30))
def test_sparse_attention_of_random_calls_matches_reference(seed: int) -> None:
    case = draw(seed)
    args = drawn(case)
    judge = Judge(case, args)
    for variant in VARIANTS:
        judge(forward(args, variant, apart=seed % 2 == 1))
        judge(backward(args, judge.saved, variant, apart=seed % 2 == 1))


@pytest.mark.parametrize("size", [1, 16, 48])
@pytest.mark.parametrize("seed", range(100, 106))
def test_sparse_attention_is_bitwise_equal_for_any_page_size(seed: int, size: int) -> None:
    case = draw(seed)
    args = drawn(case)
    for variant in VARIANTS:
        same_bits(forward(in_pages(case, args, size), variant), forward(args, variant))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_sparse_attention_is_bitwise_equal_for_any_thread_count_and_layout(variant: str, dtype: str) -> None:
    sizes = {"heads_q": 36, "dim_qk": 40, "dim_v": 24, "dim_rope": 8, "scale": 0.2, "block": 3, "count": 60}
    args = drawn(SparseCase("TND", 0, dtype, (40, 0, 3, 1), (311, 4, 0, 530), lists="wild", sink=True, **sizes))
    saved = forward(args, variant, 1)
    want = backward(args, saved, variant, 1)
    assert not any(want[name].isnan().any() for name in ("dquery", "dvalue"))
    for threads, apart in ((2, False), (3, True), (5, False), (8, True), (16, False), (64, True)):
        same_bits(forward(args, variant, threads, apart), saved)
        same_bits(backward(args, saved, variant, threads, apart), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_repeated_selected_keys_are_equal_for_any_thread_count(dtype: str) -> None:
    """Keys are values too: a key that is listed twice adds dk, dv, dk, dv or dk, dk, dv, dv."""
    sizes = {"heads_q": 8, "dim_qk": 32, "dim_v": 32, "scale": 0.2, "count": 300}
    case = SparseCase("TND", 0, dtype, (150,), (1500,), mode=0, shares_kv=True, lists="repeated", **sizes)
    args = drawn(case)
    saved = forward(args)
    want = backward(args, saved, threads=1)
    for threads in (2, 3, 7, 16, 64):  # other ranges of keys each
        same_bits(backward(args, saved, threads=threads), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sparse_attention_of_one_row_is_bitwise_equal_for_any_thread_count(dtype: str) -> None:
    sizes = {"heads_q": 128, "dim_qk": 64, "dim_v": 48, "dim_rope": 16, "scale": 0.1, "count": 400}
    case = SparseCase("TND", 0, dtype, (1,), (1000,), mode=0, **sizes)
    args = drawn(case)
    want = forward(args, threads=1)
    gradients = backward(args, want, threads=1)
    for threads in (2, 3, 7):
        same_bits(forward(args, threads=threads), want)
        same_bits(backward(args, want, threads=threads), gradients)
    Judge(case, args)(want)


@pytest.mark.parametrize("heads", [5, 40, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_of_lengths_around_block_and_chunk_sizes_match_reference(dtype: str, heads: int) -> None:
    """Rows of complete vectors are gathered during products; remainders and separate values are not."""
    lengths = [0, 1, 11, 12, 13, 23, 24, 25, 36, 47, 48, 49, 95, 96, 97, 108, 192, 205]
    sizes = {"heads_q": heads, "dim_qk": 96, "dim_v": 64, "dim_rope": 32, "scale": 0.08, "sink": heads == 5}
    case = SparseCase("TND", 0, dtype, (len(lengths),), (600,), mode=0, shares_kv=True, count=256, lists="all", **sizes)
    args = arguments(case)
    for row, length in enumerate(lengths):
        args["sparse_indices"][row, 0, length:] = -1
    args["sparse_indices"] = far(args["sparse_indices"])
    judge, apart = Judge(case, args), {**args, "value": args["key"][..., :64].clone(), "dim_v": 0}
    for variant in VARIANTS:
        ours = forward(args, variant)
        judge(ours)
        same_bits(forward(apart, variant), ours)
        same_bits(forward(in_pages(case, args, 16), variant), ours)
        judge(backward(args, judge.saved, variant))


@pytest.mark.parametrize("dim_v", [25, 63, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_backward_with_odd_value_dims_matches_reference(dtype: str, dim_v: int) -> None:
    """Two bfloat16 elements are a word: a value row of odd length is gathered separately, into another buffer."""
    sizes = {"heads_q": 8, "dim_qk": 64, "dim_v": dim_v, "dim_rope": 8, "scale": 0.1, "sink": True}
    case = SparseCase("TND", 0, dtype, (9,), (40,), shares_kv=True, **sizes)
    args = drawn(case)
    judge = Judge(case, args)
    for variant in VARIANTS:
        judge(backward(args, judge.saved, variant))


@pytest.mark.parametrize("dim_v", [4, 8, 16, 20, 32, 48, 64, 80, 96, 112])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_forward_with_key_prefix_of_any_size_as_value_matches_reference(dtype: str, dim_v: int) -> None:
    sizes = {"heads_q": 8, "dim_qk": 128, "dim_v": dim_v, "dim_rope": 32, "scale": 0.1, "count": 40}
    case = SparseCase("TND", 0, dtype, (9,), (40,), mode=0, shares_kv=True, **sizes)
    args = drawn(case)
    judge = Judge(case, args)
    for variant in VARIANTS:
        judge(forward(args, variant))


def test_order_of_selected_keys_changes_only_rounding_of_output() -> None:
    case = SparseCase(
        "TND", q_len=(6,), kv_len=(96,), mode=0, heads_q=16, dim_qk=64, dim_v=64, scale=0.125, count=96, lists="all"
    )
    args = drawn(case)
    args["sparse_indices"][:] = torch.arange(96, dtype=torch.int32)
    judge, ascending = Judge(case, args), forward(args)
    saved = backward(args, ascending)
    args["sparse_indices"] = args["sparse_indices"].flip(-1).contiguous()
    for ours in (ascending, forward(args)):
        judge(ours)
    same_bits(backward(args, ascending), saved)  # keys are added in their own order there


def test_nan_key_reaches_exactly_the_rows_that_select_the_key() -> None:
    sizes = {"heads_q": 8, "dim_qk": 32, "dim_v": 32, "scale": 0.2, "count": 20}
    args = drawn(SparseCase("TND", 0, "bfloat16", (12,), (64,), mode=0, **sizes))
    named = int(args["sparse_indices"][3, 0, 0])
    args["key"][named, 0, 5] = math.nan
    sees = [named in row.tolist() for row in args["sparse_indices"][:, 0]]
    for variant in VARIANTS:
        out = forward(args, variant)["out"]
        assert [bool(row.isnan().all()) for row in out] == sees
        assert [bool(row.isnan().any()) for row in out] == sees


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_infinite_values_stay_infinite_if_their_weights_underflow(variant: str, dtype: str) -> None:
    sizes = {"heads_q": 3, "dim_qk": 16, "dim_v": 5, "scale": 1.0, "sink": True, "count": 700, "lists": "all"}
    args = drawn(SparseCase("TND", 0, dtype, (5,), (700,), mode=0, **sizes))
    k, v = args["key"][:, 0], args["value"][:, 0]
    args["query"].fill_(1.0), k.zero_(), v.fill_(1.0)
    args["sparse_indices"][:] = torch.arange(700, dtype=torch.int32)
    args["sinks"][2] = 300.0  # head 2's softmax leaves nothing for keys
    k[300] = 200 / 16  # every other key's weight underflows: those before it, when its score fades them
    v[5, 0], v[650, 1] = math.inf, -math.inf
    v[6, 2], v[600, 2] = math.inf, -math.inf
    k[7, 3] = -math.inf  # a weight that is 0, not merely small: the key is not seen
    v[7, 3:] = math.inf
    out = forward(args, variant)["out"].double()
    assert (out[..., 0] == math.inf).all()
    assert (out[..., 1] == -math.inf).all()
    assert out[..., 2].isnan().all()
    assert (out[:, :2, 3:] == 1.0).all()
    # Head 2's weights of 1 shrink to exp(200 - 300) = 2**-144, or to 0 without subnormal floats.
    assert (out[:, 2, 3:].abs() <= 2.0**-144).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("power", [14, 15, 20, 45])
def test_sparse_forward_returns_value_of_best_key_if_scores_are_huge(variant: str, power: int, sign: int) -> None:
    sizes = {"heads_q": 3, "dim_qk": 16, "dim_v": 16, "scale": 1.0, "count": 700, "lists": "all"}
    args = drawn(SparseCase("TND", 0, "bfloat16", (5,), (700,), mode=0, **sizes))
    k, number = args["key"][:, 0], 100 + torch.randperm(700, generator=torch.Generator().manual_seed(power))
    args["query"].fill_(2.0**power), k.zero_()
    k[:, 0], k[:, 1] = (summand * sign * 2.0**power for summand in (number // 256 * 256, number % 256))
    args["sparse_indices"][:] = torch.arange(700, dtype=torch.int32)
    args["value"][7, 0, 3] = math.inf  # a weight of nothing is still more than 0
    out, best = forward(args, variant)["out"], (sign * number).argmax()
    want = args["value"][best, 0].expand_as(out).clone()
    want[..., 3] = math.inf
    same_bits(out, want)


# ------------------------------------------------------------------------------------------------- memory and bad calls


# Limits in megabytes for 32768 rows and keys.
WORKSPACES: list[tuple[Problem | IndexerProblem | IndexerLossProblem, tuple[str, ...], int]] = [
    (Problem(64, 1, 576, 512, select_count=2048), ("attention_forward", "attention_backward"), 1000),
    (IndexerProblem(64, 128, top_k=2048), ("indexer_topk", "indexer_backward"), 200),
    (IndexerProblem(64, 128, top_k=0), ("indexer_lse",), 100),
    (IndexerLossProblem(128, 128, 128, 64, 128, 64), ("indexer_loss",), 100),
    (IndexerLossProblem(128, 1, 512, 64, 128, 64, select_count=2048), ("indexer_loss",), 100),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("problem", "op_kinds", "most"), WORKSPACES, ids=str)
def test_workspace_of_sparse_attention_and_indexer_is_bounded(
    problem: Any, op_kinds: tuple[str, ...], most: int, dtype: str
) -> None:
    dtypes = {"dtype": dtype} if isinstance(problem, Problem) else {"dtype": dtype, "weights_dtype": dtype}
    for op_kind in op_kinds:
        wanted = cpu.workspace_bytes(replace(problem, **dtypes), extents_of((32768,), (32768,)), op_kind)
        assert wanted < most * 1_000_000


def test_cpu_back_end_lists_reasons_against_unsupported_sparse_problems() -> None:
    double: Any = {"dtype": "float64", "weights_dtype": "float64"}
    low: Any = {"dtype": "bfloat16"}
    for reasons, problem in [
        (4, Problem(1, 1, 8, 8, select_count=4, bias="matrix", dropout="bits", has_blocked=True, empty_rows="mean")),
        (0, Problem(1, 1, 8, 8, select_count=4, page_size=16, shares_kv=True)),
        (2, IndexerProblem(1, 8, **double)),
        (0, IndexerProblem(1, 8, **low, page_size=16)),
        (2, IndexerLossProblem(1, 1, 8, 1, 8, **double)),
        (0, IndexerLossProblem(1, 1, 8, 1, 8, **low)),
    ]:
        assert len(cpu.reasons_against(problem, "cpu")) == reasons, problem


def test_sparse_forward_refuses_index_lists_of_wrong_size_or_dtype() -> None:
    call = lowered(drawn(SparseCase("TND", q_len=(3,), kv_len=(5,), heads_q=2, mode=0)))
    results = call.results()
    (operands,), plan = call.fill(results).operands, cpu.schedule(call.problem, call.extents, call.op_kind)
    narrow, long = replace(operands.indices, dim=3), replace(operands.indices, address=np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="indices has rows of another length"):
        cpu.attention_forward(call.problem, call.extents, plan, replace(operands, indices=narrow))
    with pytest.raises(ValueError, match="indices has 2 elements, expected 1"):
        cpu.attention_forward(call.problem, call.extents, plan, replace(operands, indices=long))
    with pytest.raises(TypeError, match="int32"):
        cpu.attention_forward(call.problem, call.extents, plan, replace(operands, indices=operands.q))
    assert results["attention_out"].isnan().all()
