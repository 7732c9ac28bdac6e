"""The native core's dense forward over caches (pages, rows in pieces, keys that are values or are shared by sequences)
gives the bits of the forward over contiguous tensors."""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.native_decode import alike, pieces_of, plain_case, prepare
from support.native_dense import VARIANTS, converted, judge
from support.oracle import Call, Results, forward, load, make, results, rows

from fusion_attention import _native
from fusion_attention.backends import cpu
from fusion_attention.backends.cpu import decode
from fusion_attention.backends.cpu.native import plan_forward, run_forward
from fusion_attention.ir.mask import Band
from fusion_attention.ir.memory_views import PagedView
from fusion_attention.ir.problem import Operands, Problem

DTYPE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _all_by_the_dense_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_ROWS_OF_CACHE", -1)
    monkeypatch.setattr(decode, "_TOKENS_OF_CACHE", -1)


def plainly(call: Call, variant: str, threads: int = 2) -> Results:
    p = call.problem
    operands = load(call, DTYPE[p.dtype], torch.float32)
    torch.set_num_threads(threads)
    run_forward(plan_forward(p, call.extents, variant), p, operands)
    return results(call, operands)


def over_cache(call: Call, problem: Problem, views: dict[str, Any], variant: str, threads: int = 2) -> Results:
    operands = replace(load(call, DTYPE[problem.dtype], torch.float32), **views)
    schedule = cpu.schedule(problem, call.extents, "attention_forward", variant)
    assert isinstance(schedule, decode.Schedule)
    assert schedule.dense is not None
    torch.set_num_threads(threads)
    cpu.attention_forward(problem, call.extents, schedule, operands)
    return results(call, operands)


def draw(seed: int) -> Call:
    rng = random.Random(seed)
    dim, heads_kv = rng.choice([3, 16, 40, 64, 72, 128, 192]), rng.choice([1, 2])
    problem = Problem(
        heads_kv * rng.choice([1, 3]), heads_kv, dim, rng.choice([dim, dim, 100, 7]), rng.choice([0, 0, 16, 64]),
        dtype=rng.choice(["float32", "float16", "bfloat16"]), scale=1 / math.sqrt(dim),
        bias=rng.choice(["none", "matrix", "slopes"]), has_blocked=rng.random() < 0.3, has_sink=rng.random() < 0.3,
        softcap=(0.0, 0.0, 2.0)[seed % 3],
    )  # fmt: skip
    count = rng.choice([1, 2, 3])
    q_len = tuple(rng.choice([0, 1, rng.randint(1, 150)]) for _ in range(count))
    kv_len = tuple(n + rng.choice([0, 1, rng.randint(1, 600)]) for n in q_len)
    band = rng.choice([None, Band.causal("end"), Band.causal("end"), Band.window(rng.randint(0, 200), 3, "end")])
    call = converted(make(problem, q_len, kv_len, band, seed=seed), problem.torch_dtype)
    if seed % 3 == 0:
        values = [t for t in call.v if t.numel()]
        for t in values[:1]:
            t.view(-1)[rng.randrange(t.numel())] = rng.choice([math.inf, math.nan])
    return call


@pytest.mark.parametrize("seed", range(40))
def test_forward_over_pages_and_split_rows_is_bitwise_equal_to_plain_rows(seed: int) -> None:
    call, rng = draw(seed), random.Random(seed)
    p, size = call.problem, rng.choice([16, 48, 128])
    views: dict[str, Any] = {}
    for i, name in enumerate(("k", "v") + (("k_rope",) if p.dim_rope else ())):
        tensors = getattr(call, name)
        views[name] = prepare(tensors, tensors[0].shape[2], "pages", size, seed + i)
    heads = p.heads_kv
    nz = {name: pieces_of(view, heads, rng.choice([8, 16])) for name, view in views.items()}
    paged = replace(p, page_size=size)
    for variant in VARIANTS:
        want = plainly(call, variant)
        same_bits(over_cache(call, paged, views, variant), want, f"{variant} {paged}")
        same_bits(over_cache(call, paged, nz, variant), want, f"{variant} {paged} in pieces")


@pytest.mark.parametrize("seed", range(100, 130))
def test_forward_over_shared_prefix_or_shared_kv_is_bitwise_equal_to_plain_rows(seed: int) -> None:
    call, rng = draw(seed), random.Random(seed)
    p = replace(call.problem, dim_rope=0)
    common = rng.randint(0, min(call.extents.kv_len.tolist()))
    call = alike(replace(call, problem=p, q_rope=[], k_rope=[]), common)
    size = rng.choice([0, 16])
    views: dict[str, Any] = {}
    for name in ("k", "v"):
        tensors, form = getattr(call, name), "pages" if size else "rows"
        views[name] = prepare([t[:, common:] for t in tensors], tensors[0].shape[2], form, size, seed)
        views[f"{name}_common"] = rows([tensors[0][:, :common]]) if common else None
    for variant in VARIANTS:
        if common or size:
            got = over_cache(call, replace(p, common_keys=common, page_size=size), views, variant)
            same_bits(got, plainly(call, variant), f"{variant} {p} {common}")
    dim_v = min(p.dim_v, p.dim_qk)
    shared = replace(p, dim_v=dim_v)
    call = replace(call, problem=shared, v=[t[..., :dim_v] for t in call.k])
    k = prepare(call.k, p.dim_qk, "pages", 16, seed)
    for variant in VARIANTS:
        form = replace(shared, shares_kv=True, page_size=16)
        got = over_cache(call, form, {"k": k, "v": replace(k, dim=dim_v)}, variant)
        same_bits(got, plainly(call, variant), f"{variant} {form}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_over_cache_with_scale_per_query_row_matches_reference(variant: str) -> None:
    problem = Problem(6, 2, 64, 64, 16, dtype="bfloat16", scale=0.1, bias="matrix")
    call = converted(make(problem, (130, 3), (150, 70), Band.causal("end")), torch.bfloat16)
    scale = [torch.randn(*t.shape[:2], 1).float() for t in call.q]
    scaled = replace(call, q=[t.double() * s for t, s in zip(call.q, scale, strict=True)],
                     q_rope=[t.double() * s for t, s in zip(call.q_rope, scale, strict=True)])  # fmt: skip
    got = over_cache(call, replace(problem, has_row_scale=True), {"row_scale": rows(scale)}, variant)
    judge(scaled, got, forward(scaled), variant)


def test_forward_over_pages_is_bitwise_equal_for_any_thread_count() -> None:
    problem = Problem(8, 2, 128, 128, dtype="bfloat16", scale=0.09)
    call = converted(make(problem, (700, 1, 130), (2500, 64, 131), Band.causal("end")), torch.bfloat16)
    views = {name: prepare(getattr(call, name), 128, "pages", 128, 7) for name in ("k", "v")}
    want = plainly(call, VARIANTS[-1], 1)
    for threads in (1, 2, 3, 5, 8):
        same_bits(over_cache(call, replace(problem, page_size=128), views, VARIANTS[-1], threads), want)


def test_decode_run_refuses_dense_plan_made_for_other_sequences() -> None:
    case = plain_case(Problem(4, 2, 64, 64, dtype="bfloat16", page_size=16), (200,), (200,))
    case.form = "pages"
    operands: Operands = case.operands()
    assert isinstance(operands.k, PagedView)
    schedule = cpu.schedule(case.problem, case.call.extents, "attention_forward")
    other = make(case.problem, (200, 3), (200, 3))
    assert isinstance(schedule, decode.Schedule)
    dense = plan_forward(case.problem, other.extents, None)
    assert isinstance(dense, _native.ForwardPlan)
    with pytest.raises(ValueError, match="other sequences"):
        decode.run(replace(schedule, dense=dense), case.problem, operands)
    assert np.isfinite(other.extents.kv_len).all()
