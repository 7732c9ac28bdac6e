"""The native core's decode: each variant that runs here, forced, over rows, tensor lists and pages of floats or
integers, against the float64 reference. Unused pages and slots hold NaN; unused table entries are invalid.
"""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits, same_where_not_finite
from support.native_decode import Case, Stored, draw_case, native, plain_case
from support.native_dense import CAPPED, converted, invalid, judge, with_cap
from support.native_dense import DECODE_VARIANTS as VARIANTS
from support.oracle import alone, forward, load, make, results

from fusion_attention import _native
from fusion_attention import plan as planning
from fusion_attention.backends import cpu
from fusion_attention.backends.cpu import decode
from fusion_attention.ir.mask import Band
from fusion_attention.ir.memory_views import PagedView, RowView
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.ir.replace_tensors import operand_tensors


def beneath(case: Case, softcap: float) -> Case:
    """Returns the case with a softcap."""
    return replace(case, call=with_cap(case.call, softcap), problem=replace(case.problem, softcap=softcap))


@pytest.mark.parametrize(("seed", "softcap"), [*((n, 0.0) for n in range(80)), *CAPPED[::2]])
def test_decode_of_random_calls_matches_float64_reference(seed: int, softcap: float) -> None:
    case = beneath(draw_case(seed), softcap)
    want = forward(case.call)
    for variant in VARIANTS:
        judge(case.remade, native(case, variant), want, (variant, case.problem, case.form))


@pytest.mark.parametrize("seed", range(1000, 1050))
def test_decode_nan_and_infinity_appear_exactly_as_in_reference(seed: int) -> None:
    case = beneath(draw_case(seed), 0.0 if seed < 1040 else 0.9)
    shares = case.problem.shares_kv
    if case.problem.kv_dtype:
        scale = case.v.scale if seed % 2 else case.k.scale
        if scale and scale[0].numel():
            scale[0].view(-1)[seed % scale[0].numel()] = (math.nan, math.inf)[seed // 2 % 2]
    else:
        invalid(replace(case.call, k=case.k.numbers, v=case.v.numbers), seed)
    k, v = case.k.meaning(), case.v.meaning()
    case = replace(case, call=replace(case.call, k=k, v=[t[..., : v[0].shape[2]] for t in k] if shares else v))
    want = forward(case.call)
    for variant in VARIANTS:
        same_where_not_finite(native(case, variant), want, f"{variant} {case.problem}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_decode_of_tiny_and_huge_queries_matches_reference(kind: str, dtype: str) -> None:
    form = {"kv_dtype": kind, "dequant_k": "channel", "dequant_v": "channel"}
    problem = Problem(8, 2, 64, 64, dtype=dtype, scale=0.02, **form)
    case = plain_case(problem, (1, 1), (200, 129), seed=1)
    for q in case.call.q:
        q[0] *= 1e-30  # a row of tiny numbers
        q[1, :, 5] = 300.0  # one far above the others
        q[2] = 0
    spread = torch.logspace(-6, 1, 64).float()
    for stored in (case.k, case.v):
        stored.scale[:] = [t / t.mean() * spread for t in stored.scale]
        stored.offset[:] = [torch.full_like(t, 1000.0) for t in stored.scale]
    case = replace(case, call=replace(case.call, k=case.k.meaning(), v=case.v.meaning()))
    want = forward(case.call)
    for variant in VARIANTS:
        judge(case.remade, native(case, variant), want, variant)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dim", [40, 256, 257])
@pytest.mark.parametrize("group", [1, 4, 6, 16])
def test_float32_decode_over_int8_and_int4_cache_keeps_float32_accuracy(kind: str, dim: int, group: int) -> None:
    form = {"kv_dtype": kind, "dequant_k": "token", "dequant_v": "token" if dim % 2 else "channel"}
    problem = Problem(2 * group, 2, dim, dim, dtype="float32", scale=dim**-0.5, **form)
    case = plain_case(problem, (1, 2), (140, 129), seed=dim)
    for stored in (case.k, case.v):
        for numbers in stored.numbers:
            numbers[:, :40] = -8 if kind == "int4" else -128
    for q in case.call.q:
        q[0] = 1.5  # meets them in the largest sums there are
    case = replace(case, call=replace(case.call, k=case.k.meaning(), v=case.v.meaning()))
    want = forward(case.call)
    for variant in VARIANTS:
        judge(case.remade, native(case, variant), want, variant)


def test_decode_with_negative_value_scales_matches_reference() -> None:
    form = {"kv_dtype": "int8", "dequant_k": "token", "dequant_v": "token"}
    case = plain_case(Problem(4, 2, 64, 64, dtype="float32", scale=0.1, **form), (1, 1), (300, 129))
    for scale in case.v.scale:
        scale.view(-1)[::3] *= -1
    case = replace(case, call=replace(case.call, v=case.v.meaning()))
    want = forward(case.call)
    for variant in VARIANTS:
        judge(case.remade, native(case, variant), want, variant)


# ------------------------------------------------------------------------------------------------------------ same bits


BASES = [
    Problem(8, 2, 128, 128, dtype="bfloat16", scale=0.09),
    Problem(8, 2, 96, 64, dtype="float16", scale=0.1, has_sink=True),
    Problem(6, 2, 40, 24, dtype="float32", scale=0.2, has_blocked=True),
    Problem(8, 2, 128, 128, dtype="bfloat16", scale=0.09, kv_dtype="int8", dequant_k="channel", dequant_v="token"),
    Problem(4, 2, 64, 64, dtype="float16", scale=0.02, kv_dtype="int4", dequant_k="token", dequant_v="channel"),
    Problem(8, 2, 128, 96, dtype="float32", scale=0.09, kv_dtype="int8", dequant_k="channel", dequant_v="token"),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("problem", BASES, ids=str)
def test_decode_is_bitwise_equal_for_any_threads_batch_and_page_size(variant: str, problem: Problem) -> None:
    q_len, kv_len = (1, 1, 0, 2), (1300, 77, 5, 520)
    case = plain_case(problem, q_len, kv_len)
    want = native(case, variant, threads=1)
    same_bits(native(case, variant, threads=2), want)
    for size in (16, 128, 512):
        paged = replace(case, problem=replace(problem, page_size=size), form="pages")
        same_bits(native(paged, variant, threads=3), want, f"pages of {size}")
    for b in (0, 3):
        stored = (Stored([s.numbers[b]], s.scale[b : b + 1], s.offset[b : b + 1]) for s in (case.k, case.v))
        single = Case(alone(case.call, b), problem, *stored, "rows", 1)
        same_bits(native(single, variant), {name: [result[b]] for name, result in want.items()})


@pytest.mark.parametrize("problem", BASES[::3], ids=str)  # of floats and of integers: threads share any work alike
def test_decode_of_long_sequence_is_bitwise_equal_on_up_to_64_threads(problem: Problem) -> None:
    case = plain_case(problem, (1, 2), (9000, 600))  # three runs of leaves, two leaves
    scored = (case.k.scale or case.k.numbers)[0].view(-1)
    scored[-1] = math.inf  # some of the last run is computed again with care
    want = native(case, None, threads=1)
    for threads in (2, 3, 5, 8, 16, 64):
        same_bits(native(case, None, threads=threads), want, f"{threads} threads")


@pytest.mark.parametrize("kind", ["", "int8"])
def test_decode_infinity_in_one_kv_head_does_not_change_other_heads(kind: str) -> None:
    dequant = "channel" if kind else "none"
    form = {"page_size": 64, "kv_dtype": kind, "dequant_k": dequant, "dequant_v": dequant}
    case = plain_case(Problem(12, 6, 32, 32, dtype="bfloat16", scale=0.2, **form), (1, 2), (4200, 77))
    specified, want = forward(case.call), {variant: native(case, variant, threads=1) for variant in VARIANTS}
    for variant in VARIANTS:
        judge(case.remade, want[variant], specified, variant)
    (case.v.scale or case.v.numbers)[0][3, 0] = math.inf
    others = [head for head in range(12) if head not in (6, 7)]
    for variant, threads in itertools.product(VARIANTS, (1, 2)):
        got = native(case, variant, threads=threads)
        for name in got:
            for value, clean in zip(got[name], want[variant][name], strict=True):
                assert torch.equal(value[others], clean[others]), (variant, name, threads)
        assert not got["out"][0][6:8].isfinite().any()


def test_sequences_with_many_rows_or_few_keys_use_the_dense_kernel() -> None:
    problem = Problem(4, 2, 64, 64, dtype="bfloat16", scale=0.1, empty_rows="mean")
    call = converted(make(problem, (1, 200, 0, 2, 3, 3), (300, 200, 4, 0, 33, 32), Band.causal()), torch.bfloat16)
    operands = load(call, torch.bfloat16, torch.float32)
    schedule = cpu.schedule(problem, call.extents, "attention_forward")
    assert isinstance(schedule, decode.Schedule)
    assert schedule.decoded.tolist() == [True, False, False, True, True, False]
    cpu.attention_forward(problem, call.extents, schedule, operands)
    judge(call, results(call, operands), forward(call), "mixed")


# -------------------------------------------------------------------------- rows of a group that are computed together

# Variants with integer dot products: sums are exact in any order.
EXACT = [name for name in VARIANTS if {"avx512_vnni", "asimddp"} & {*_native.cpu_features()["needs"][name]}]


@pytest.mark.parametrize("group", [16, 32, 48, 80])
def test_decode_with_half_filled_last_block_of_rows_matches_reference(group: int) -> None:
    """Blocks in tile registers have 32 rows; the last one has 16 if they are enough."""
    problem = Problem(2 * group, 2, 64, 64, dim_rope=32, dtype="bfloat16", scale=0.1, page_size=16)
    case = plain_case(problem, (1, 1, 1), (145, 7, 300), seed=group)
    want = forward(case.call)
    for variant in VARIANTS:
        judge(case.call, native(case, variant), want, variant)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dim", [8, 40, 72, 136])
@pytest.mark.parametrize("group", [3, 4])
def test_decode_of_3_or_4_query_heads_per_kv_head_matches_reference(group: int, dim: int, dtype: str) -> None:
    problem = Problem(2 * group, 2, dim, 24, dim_rope=16, dtype=dtype, scale=0.1, page_size=16)
    case = plain_case(problem, (1, 1, 1), (145, 7, 300), seed=dim)
    want = forward(case.call)
    for variant in VARIANTS:
        judge(case.call, native(case, variant), want, variant)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dim", [16, 32, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("group", [3, 4])
def test_quantised_decode_of_grouped_heads_equals_each_head_alone(group: int, dim: int, kind: str) -> None:
    form = {"kv_dtype": kind, "dequant_k": "channel", "dequant_v": "channel", "page_size": 48}
    problem = Problem(2 * group, 2, dim, dim, dtype="bfloat16", scale=0.02, **form)
    case = plain_case(problem, (1, 1, 1, 1), (145, 7, 300, 128), seed=dim)
    want = forward(case.call)
    for variant in VARIANTS:
        together = native(case, variant)
        judge(case.remade, together, want, (variant, problem))
        if variant not in EXACT:
            continue
        for row in range(group):
            one = replace(case.call.problem, heads_q=2)
            row_call = replace(case.call, problem=one, q=[q[row::group] for q in case.call.q])
            alone = native(replace(case, call=row_call, problem=replace(problem, heads_q=2)), variant)
            for name, result in together.items():
                for t, wanted in zip(result, alone[name], strict=True):
                    assert torch.equal(t[row::group], wanted), (name, row)


# ---------------------------------------------------------------------------------------------------------- int8 result


@pytest.mark.parametrize("rounding", ["tensor", "channel"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_int8_result_is_rounded_and_saturated(variant: str, rounding: str) -> None:
    problem = Problem(4, 2, 32, 20, dtype="float32", scale=0.2, page_size=16, out_quant=rounding, empty_rows="mean")
    case = plain_case(problem, (1, 1, 2), (40, 0, 700))
    scale = (torch.rand(4, 20) + 0.5) * 200 if rounding == "channel" else torch.full((1, 1), 150.0)
    offset = torch.randn(scale.shape) * 5
    out = RowView((torch.full((400,), 99, dtype=torch.int8),), np.array([0, 80, 160]), 80, np.array([20] * 3), 20)
    operands = replace(case.operands(), out=out, out_scale=scale.expand(4, 20), out_offset=offset.expand(4, 20))
    schedule = cpu.schedule(problem, case.call.extents, "attention_forward", variant)
    cpu.attention_forward(problem, case.call.extents, schedule, operands)
    for b, want in enumerate(forward(case.call)["out"]):
        exact = (want * scale.double()[:, None] + offset.double()[:, None]).clamp(-128, 127)
        got = out.sequence(b, *want.shape[:2]).double()
        # Half a quantisation step, and rounding errors of a sum over 700 keys, relative to the largest value.
        most = max(float(v.abs().max()) for v in case.call.v if v.numel()) * float(scale.max())
        assert (got - exact).abs().max() <= 0.5 + 700 * 2.0**-24 * most
    assert int(out.keep[0][320:].sum()) == 80 * 99  # nothing behind the rows


@pytest.mark.parametrize(("rounding", "want"), [("tensor", [0, 2, 2, -2, 0, 127]), ("channel", [1, 2, 3, -3, -1, 127])])
def test_int8_output_rounds_halves_to_even_per_tensor_and_away_per_channel(rounding: str, want: list[int]) -> None:
    problem = Problem(1, 1, 6, 6, dtype="float32", out_quant=rounding)
    value = torch.tensor([0.5, 1.5, 2.5, -2.5, -0.5, 400.0]).view(1, 1, 6)
    call = replace(make(problem, (1,), (1,)), k=[torch.zeros(1, 1, 6)], v=[value])
    call = converted(call, torch.float32)
    out = RowView((torch.zeros(6, dtype=torch.int8),), np.array([0]), 6, np.array([6]), 6)
    operands = replace(load(call, torch.float32, torch.float32), out=out, out_scale=torch.ones(1, 6))
    cpu.attention_forward(problem, call.extents, cpu.schedule(problem, call.extents, "attention_forward"), operands)
    assert out.keep[0].tolist() == want


# --------------------------------------------------------------------------------------------------------------- update


@pytest.mark.parametrize("backend", ["cpu", "golden"])
@pytest.mark.parametrize("band", [None, Band.causal(), Band.window(100, 0)], ids=str)
def test_updated_plan_is_bitwise_equal_to_fresh_plan(band: Band | None, backend: str) -> None:
    problem = Problem(4, 2, 64, 64, dtype="bfloat16", scale=0.1)
    call = converted(make(problem, (1, 2), (900, 640), band), torch.bfloat16)
    device = torch.device("cpu")
    capacity = replace(call.extents, kv_len=call.extents.kv_len)
    plan = planning.plan(problem, capacity, device, backend, updatable=True)
    for lengths in ([900, 640], [513, 3], [0, 640], [1, 600]):
        plan.update(lengths)
        edges = (band or Band.full()).resolve(call.extents.q_len, np.array(lengths))
        fresh = Extents(call.extents.q_len, np.array(lengths), *edges, call.extents.shift)
        assert all(np.array_equal(getattr(plan.extents, n), getattr(fresh, n)) for n in ("kv_len", "lo", "hi"))
        result = []
        for each in (plan, planning.plan(problem, fresh, device, backend)):
            operands = load(call, torch.bfloat16, torch.float32)
            each.run(operands)
            result.append(results(call, operands))
        same_bits(*result, f"{lengths}")


def test_plan_update_switches_to_dense_kernel_for_few_keys() -> None:
    problem = Problem(4, 2, 64, 64, dtype="bfloat16", scale=0.1)
    call = converted(make(problem, (0, 4), (64, 64)), torch.bfloat16)
    plan = planning.plan(problem, call.extents, torch.device("cpu"), updatable=True)
    result = []
    for keys in (64, 32, 64, 33):
        plan.update([64, keys])
        result.append(isinstance(plan.schedule, decode.Schedule))
    assert result == [True, False, True, True]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([901, 1], r"kv_len\[0\]: expected 0 to 900, got 901 \(plan with more capacity\)"),
        ([1, -1], r"kv_len\[1\]: expected 0 to 640, got -1"),
        ([1], r"kv_len: expected 2 lengths"),
    ],
)
def test_plan_update_beyond_capacity_raises_and_leaves_plan_unchanged(lengths: list[int], message: str) -> None:
    problem = Problem(4, 2, 64, 64)
    extents = make(problem, (1, 1), (900, 640)).extents
    plan = planning.plan(problem, extents, torch.device("cpu"), updatable=True)
    with pytest.raises(ValueError, match=message):
        plan.update(lengths)
    assert plan.extents is extents
    with pytest.raises(ValueError, match="updatable=True"):
        planning.plan(problem, extents, torch.device("cpu")).update([1, 1])


# ------------------------------------------------------------------------------------------------------------ bad input


def test_cpu_back_end_refuses_dropout_over_paged_cache() -> None:
    problem = Problem(2, 2, 8, 8, page_size=16, dropout="philox", keep_prob=0.5)
    assert any("dropout" in reason for reason in cpu.reasons_against(problem, torch.device("cpu")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=None), "expected a view of contiguous rows"),
        (dict(dequant_k=None), "scale of k is missing"),
        (dict(out=None), "expected a view of contiguous rows"),
    ],
)
def test_decode_refuses_missing_operand_before_writing_output(change: dict[str, Any], message: str) -> None:
    problem = Problem(2, 1, 8, 8, dtype="bfloat16", page_size=16, kv_dtype="int8")
    problem = replace(problem, dequant_k="channel", dequant_v="channel")
    case = plain_case(problem, (1,), (20,))
    operands = case.operands()
    schedule = cpu.schedule(problem, case.call.extents, "attention_forward")
    with pytest.raises((TypeError, ValueError), match=message):
        cpu.attention_forward(problem, case.call.extents, schedule, replace(operands, **change))
    assert operands.out.sequence(0, 2, 1).isnan().all()


def test_prepared_decode_refuses_missing_extra_or_non_tensor_arguments() -> None:
    for page in (0, 16):
        problem = Problem(2, 1, 8, 8, dtype="bfloat16", page_size=page)
        case = plain_case(problem, (1,), (20,))
        operands = case.operands()
        schedule = cpu.schedule(problem, case.call.extents, "attention_forward")
        cpu.attention_forward(problem, case.call.extents, schedule, operands)
        assert isinstance(schedule, decode.Schedule)
        if isinstance(operands.k, PagedView) and isinstance(operands.v, PagedView):
            operands.v.table = operands.k.table
        given: dict[str, Any] = dict(operand_tensors(operands))
        prepared = decode.prepare(schedule, problem, operands, tuple(given))
        out, wanted = given["out"], given["out"].clone()
        given |= {"max": None, "sum": None}
        out.fill_(torch.nan)
        assert prepared.run(1, *given.values()) == 0
        same_bits([out], [wanted])
        out.fill_(torch.nan)
        for change, message in (
            ({"table": None} if page else {"k": None}, f"{'table' if page else 'k'} has no memory"),
            ({"table again": torch.zeros(1, 2, dtype=torch.int32)}, f"a prepared call takes {len(given)} tensors"),
            ({"q": 3}, "data_ptr"),
        ):
            with pytest.raises((ValueError, AttributeError), match=message):
                prepared.run(1, *{**given, **change}.values())
        with pytest.raises(ValueError, match="threads: expected at least 1, got 0"):
            prepared.run(0, *given.values())
        assert out.isnan().all()


def test_decode_prepare_refuses_operand_missing_in_tensor_names() -> None:
    problem = Problem(2, 1, 8, 8, dtype="bfloat16", has_sink=True)
    case = plain_case(problem, (1,), (20,))
    operands = case.operands()
    schedule = cpu.schedule(problem, case.call.extents, "attention_forward")
    assert isinstance(schedule, decode.Schedule)
    names = tuple(name for name in operand_tensors(operands) if name != "sink")
    with pytest.raises(ValueError, match="sink is read, and no tensor of the call is named so"):
        decode.prepare(schedule, problem, operands, names)
