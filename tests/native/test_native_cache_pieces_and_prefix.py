"""The native core's decode over other cache layouts: rows in pieces, keys shared by all sequences, scales of rows and
tokens in other tensors, masks that begin at a later key; against the float64 reference, or bit by bit.
"""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.native_decode import (
    Case,
    Stored,
    alike,
    draw_case,
    native,
    pieces_of,
    plain_case,
    prepare,
    stored_case,
)
from support.native_dense import DECODE_VARIANTS as VARIANTS
from support.native_dense import converted, judge
from support.oracle import Results, alone, forward, make, results, rows

from fusion_attention.backends import cpu
from fusion_attention.ir.mask import Band
from fusion_attention.ir.memory_views import Dequant, MatrixView, PagedView, RowView
from fusion_attention.ir.problem import Operands, Problem

THREADS = (1, 2, 3, 5, 8)


def ran(case: Case, problem: Problem, operands: Operands, variant: str | None = None, threads: int = 2) -> Results:
    schedule = cpu.schedule(problem, case.call.extents, "attention_forward", variant)
    torch.set_num_threads(threads)
    cpu.attention_forward(problem, case.call.extents, schedule, operands)
    return results(case.call, operands)


# ----------------------------------------------------------------------------------------------------- rows in pieces


def in_pieces(case: Case) -> dict[str, Any]:
    """Returns the views of keys and values as rows in pieces."""
    operands, heads = case.operands(), case.problem.heads_kv
    names = ("k", "v") if case.problem.dim_rope == 0 else ("k", "v", "k_rope")
    views: dict[str, Any] = {}
    for name in names:
        view = getattr(operands, name)
        assert isinstance(view, PagedView)
        views[name] = pieces_of(view, heads, 32 // view.pool.itemsize)
    if case.problem.shares_kv:
        views["v"] = replace(views["k"], dim=case.problem.dim_v)
    return views


PIECES = [
    Problem(8, 2, 128, 128, dtype="bfloat16", scale=0.09, page_size=16),
    Problem(6, 2, 64, 32, dtype="float16", scale=0.1, page_size=128),
    Problem(8, 1, 512, 512, 64, dtype="bfloat16", scale=0.05, page_size=32, shares_kv=True),
    Problem(32, 1, 64, 64, 32, dtype="bfloat16", scale=0.1, page_size=16, shares_kv=True),
    Problem(8, 2, 128, 128, dtype="bfloat16", scale=0.09, page_size=128, kv_dtype="int8", dequant_k="channel",
            dequant_v="channel"),
    Problem(4, 2, 96, 64, dtype="float16", scale=0.02, page_size=16, kv_dtype="int8", dequant_k="token",
            dequant_v="token"),
    Problem(16, 1, 512, 512, 64, dtype="bfloat16", scale=0.05, page_size=128, kv_dtype="int8", shares_kv=True,
            dequant_k="channel", dequant_v="channel"),
    Problem(4, 2, 72, 40, dtype="bfloat16", scale=0.1, page_size=16),
]  # fmt: skip


@pytest.mark.parametrize("problem", PIECES, ids=str)
def test_decode_of_cache_rows_split_in_pieces_is_bitwise_equal_to_whole_rows(problem: Problem) -> None:
    case = plain_case(problem, (1, 2, 9, 0), (600, 77, 300, 4))
    case.form = "pages"
    specified, pieces = forward(case.call), in_pieces(case)
    for variant in VARIANTS:
        want = ran(case, problem, case.operands(), variant)
        same_bits(ran(case, problem, replace(case.operands(), **pieces), variant), want)
        judge(case.remade, want, specified, variant)


def test_nan_and_infinity_in_split_cache_rows_give_same_bits_as_in_whole_rows() -> None:
    problem = PIECES[0]
    case = plain_case(problem, (2, 1), (200, 77))
    case.form = "pages"
    case.v.numbers[0][1, 5, 100] = math.inf
    case.k.numbers[1][0, 3, 17] = math.nan
    pieces = replace(case.operands(), **in_pieces(case))
    same_bits(ran(case, problem, pieces), ran(case, problem, case.operands()))


# ---------------------------------------------------------------------------------------------------------- shared keys


def with_common(case: Case, common: int, paged: int = 0) -> tuple[Problem, Operands]:
    """Returns the call with the first `common` keys, equal in all sequences, in separate memory."""
    operands, form = case.operands(), "pages" if paged else case.form
    views: dict[str, Any] = {}
    for name, stored in (("k", case.k), ("v", case.v)):
        dim = stored.numbers[0].shape[2]
        views[name] = prepare([t[:, common:] for t in stored.numbers], dim, form, paged, case.seed)
        views[f"{name}_common"] = rows([stored.numbers[0][:, :common]])
    return replace(case.problem, common_keys=common, page_size=paged), replace(operands, **views)


def draw_common(seed: int) -> tuple[Case, int]:
    rng = random.Random(seed)
    kind = rng.choice(["", "", "int8"])
    dim = rng.choice([8, 33, 64, 96, 128])
    bias = rng.choice(["none", "none", "matrix", "slopes"])
    dequant = "channel" if kind else "none"
    heads_kv = rng.choice([1, 2, 3])
    problem = Problem(
        heads_kv * rng.choice([1, 2, 4, 7, 16]), heads_kv, dim, rng.choice([dim, 48]),
        dtype=rng.choice(["float32", "float16", "bfloat16", "bfloat16"]), scale=rng.choice([1, 1, -1]) / math.sqrt(dim),
        bias=bias, has_blocked=rng.random() < 0.3, has_sink=rng.random() < 0.3,
        empty_rows=rng.choice(["zero", "mean_in_band"]), kv_dtype=kind, dequant_k=dequant, dequant_v=dequant,
        softcap=(0.0, 0.0, 2.0)[seed % 3],
    )  # fmt: skip
    common = rng.choice([1, 16, 77, 128, 600, 1100])
    count = rng.randint(1, 9)
    q_len = tuple(rng.choice([0, 1, 1, 1, 2, 5]) for _ in range(count))
    kv_len = tuple(common + rng.choice([0, 1, 16, 60, 520]) for _ in range(count))
    band = rng.choice([None, None, Band.causal("end"), Band.window(rng.randint(0, 300), rng.randint(-3, 3), "end")])
    simple = replace(problem, kv_dtype="", dequant_k="none", dequant_v="none")
    call = alike(make(simple, q_len, kv_len, band, seed=seed), common)
    torch.manual_seed(seed)
    case = stored_case(call, problem, ["rows"], rng, seed)
    if kind:
        for stored in (case.k, case.v):
            stored.scale[:], stored.offset[:] = stored.scale[:1] * count, stored.offset[:1] * len(stored.offset)
    return case, common


@pytest.mark.parametrize("seed", range(60))
def test_decode_with_prefix_shared_by_sequences_matches_float64_reference(seed: int) -> None:
    case, common = draw_common(seed)
    want = forward(case.call)
    problem, operands = with_common(case, common, 16 if seed % 2 else 0)
    for variant in VARIANTS:
        judge(case.remade, ran(case, problem, operands, variant), want, (variant, problem))


COMMON = [
    Problem(8, 2, 128, 128, dtype="bfloat16", scale=0.09),
    Problem(2, 2, 64, 64, dtype="float16", scale=0.1, has_sink=True),
    Problem(8, 2, 128, 128, dtype="bfloat16", scale=0.09, kv_dtype="int8", dequant_k="channel", dequant_v="channel"),
]


def common_case(problem: Problem, q_len: tuple[int, ...], kv_len: tuple[int, ...], common: int) -> Case:
    simple = replace(problem, kv_dtype="", dequant_k="none", dequant_v="none")
    call = alike(make(simple, q_len, kv_len, Band.causal("end"), seed=3), common)
    return stored_case(call, problem, ["rows"], random.Random(3), 3)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        pytest.param(problem, variant, marks=[] if variant in everyday else pytest.mark.slow)
        for problem, everyday in zip(COMMON, (VARIANTS[-1:], (VARIANTS[0], VARIANTS[-1]), VARIANTS[-1:]), strict=True)
        for variant in VARIANTS
    ],
    ids=str,
)
def test_shared_prefix_decode_is_bitwise_equal_for_any_batch_and_thread_count(problem: Problem, variant: str) -> None:
    common = 4200  # two runs of leaves; with four heads per key head, rows of two blocks and a sequence in both
    q_len = (1, 1, 2, 0, 1, 5, 1, 1, 2, 5, 1)
    case = common_case(problem, q_len, tuple(common + 7 * b for b in range(len(q_len))), common)
    case.call.q[4][0, 0, 3] = math.nan
    given = with_common(case, common)
    want = ran(case, *given, variant, threads=1)
    for threads in THREADS[1:]:
        same_bits(ran(case, *given, variant, threads), want, f"{threads} threads")
    for b in (0, 5, 9):
        stored = (Stored([s.numbers[b]], s.scale[b : b + 1], s.offset[b : b + 1]) for s in (case.k, case.v))
        single = Case(alone(case.call, b), problem, *stored, "rows", 1)
        got = ran(single, *with_common(single, common), variant)
        same_bits(got, {name: [result[b]] for name, result in want.items()})


def test_window_that_cuts_shared_prefix_matches_reference_and_sequence_alone() -> None:
    problem, common = COMMON[0], 1000
    lengths = tuple(common + n for n in (3, 300, 700))
    simple = make(problem, (1, 2, 1), lengths, Band.window(400, 0, "end"), seed=1)
    case = stored_case(alike(simple, common), problem, ["rows"], random.Random(3), 3)
    want = ran(case, *with_common(case, common))
    judge(case.remade, want, forward(case.call), "windows")
    for b in range(3):
        stored = (Stored([s.numbers[b]]) for s in (case.k, case.v))
        single = Case(alone(case.call, b), problem, *stored, "rows", 1)
        same_bits(ran(single, *with_common(single, common)), {name: [result[b]] for name, result in want.items()})


# -------------------------------------------------------------------------------------------------------- scales, masks


@pytest.mark.parametrize("seed", range(40))
def test_decode_with_scale_per_query_row_matches_float64_reference(seed: int) -> None:
    case = draw_case(seed)
    generator = torch.Generator().manual_seed(seed)
    scale = [(torch.randn(*t.shape[:2], 1, generator=generator)).float() for t in case.call.q]
    problem = replace(case.problem, has_row_scale=True)
    operands = replace(case.operands(), row_scale=rows(scale))
    q_rope = [t * s for t, s in zip(case.call.q_rope, scale, strict=False)]
    scaled = replace(case.call, q=[t.double() * s for t, s in zip(case.call.q, scale, strict=True)], q_rope=q_rope)
    sized = replace(scaled, problem=case.remade.problem)
    want = forward(scaled)
    for variant in VARIANTS:
        judge(sized, ran(case, problem, operands, variant), want, (variant, problem))


def test_decode_reads_per_token_scales_from_rows_tensor_lists_and_pages() -> None:
    problem = Problem(8, 2, 64, 64, dtype="bfloat16", scale=0.1, page_size=16, kv_dtype="int8", dequant_k="token",
                      dequant_v="token")  # fmt: skip
    case = plain_case(problem, (1, 3), (300, 40))
    case.form = "pages"
    for stored in (case.k, case.v):
        stored.offset[:] = [t[:1].expand(2, -1, 1) + 1 for t in stored.scale]
        stored.scale[:] = [t[:1].expand(2, -1, 1) for t in stored.scale]  # shared by heads
    want = native(case)
    by_position = case.operands()

    def shared(form: str, size: int) -> dict[str, Any]:
        def view(tensors: list[torch.Tensor]) -> RowView | PagedView:
            one = prepare([t[:1].contiguous() for t in tensors], 1, form, size, 5)
            if isinstance(one, PagedView):
                return replace(one, stride_head=0)
            return replace(one, stride_head=np.zeros_like(one.stride_head))

        stored_sides = (("dequant_k", case.k), ("dequant_v", case.v))
        return {name: Dequant(view(s.scale), view(s.offset)) for name, s in stored_sides}

    for form, size in (("rows", 0), ("list", 0), ("pages", 16), ("pages", 128)):
        same_bits(ran(case, problem, replace(case.operands(), **shared(form, size))), want, f"{form} {size}")
    assert by_position.dequant_k is not None


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_mask_stored_for_last_keys_only_equals_full_mask(variant: str) -> None:
    problem = Problem(8, 2, 64, 64, dtype="bfloat16", scale=0.1, page_size=16, has_blocked=True)
    case = plain_case(problem, (5, 1, 3), (300, 64, 3))
    case.form = "pages"
    first = [295, 10, 0]
    for t, n in zip(case.call.blocked, first, strict=True):
        t[..., :n] = False
    want = native(case, variant)
    judge(case.remade, want, forward(case.call), variant)
    memory, address, stride_head, stride_row = [torch.ones(3, dtype=torch.bool)], [], [], []
    for t, n in zip(case.call.blocked, first, strict=True):
        stored_mask = t[..., n:]
        address.append(sum(m.numel() for m in memory) - n)
        stride_head.append(stored_mask.shape[1] * stored_mask.shape[2])
        stride_row.append(stored_mask.shape[2])
        memory += [stored_mask.flatten(), torch.ones(3, dtype=torch.bool)]
    strides = np.array(stride_head), np.array(stride_row)
    mask = MatrixView(torch.cat(memory), np.array(address), *strides, 1, np.array(first))
    same_bits(ran(case, problem, replace(case.operands(), blocked=mask), variant), want)


def test_shared_prefix_with_rope_or_wrong_dtype_is_refused() -> None:
    case = common_case(COMMON[0], (1, 1), (50, 40), 20)
    problem, operands = with_common(case, 20)
    rope = converted(make(Problem(8, 2, 128, 128, 16, dtype="bfloat16"), (1, 1), (50, 40)), torch.bfloat16)
    assert rope.q_rope
    reasons = cpu.reasons_against(replace(problem, dim_rope=16), "cpu")
    assert any("common_keys" in reason for reason in reasons)
    with pytest.raises(TypeError, match=r"expected torch\.bfloat16"):
        ran(case, problem, replace(operands, k_common=rows([torch.zeros(2, 20, 128)])))
