"""The native core's attention to selected keys: every variant, forced, against the formulas in float64.

Memory is hostile: keys that no list names, gaps, and pages that no table names hold NaN; lists lie between numbers that
would read far outside; results lie in poison. Errors are judged by those of a plain program (testing/compare.py).
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.native_dense import VARIANTS
from support.sparse_calls import (
    INPUTS,
    Results,
    SparseCall,
    entries,
    extents_of,
    formulas,
    load_sparse,
    make_sparse,
    room_for_gradients,
)
from support.witness import read, rows

from fusion_attention.backends import cpu
from fusion_attention.testing import compare
from fusion_attention.waist.problem import Problem, Stats


def forward(
    call: SparseCall, variant: str | None = None, threads: int = 2, packed: bool = True, page_size: int = 0
) -> Results:
    operands = load_sparse(call, packed, page_size)
    problem = replace(call.problem, page_size=page_size)
    torch.set_num_threads(threads)
    plan = cpu.schedule(problem, call.extents, "attention_forward", variant)
    cpu.attention_forward(problem, call.extents, plan, operands)
    views = {"out": operands.out, "max": operands.stats.max, "sum": operands.stats.sum}
    return {name: [t.clone() for t in read(view, call.q)] for name, view in views.items()}


def backward(
    call: SparseCall, saved: Results, variant: str | None = None, threads: int = 2, packed: bool = True
) -> Results:
    p, operands, grads = call.problem, load_sparse(call, packed), room_for_gradients(call)
    stats = Stats(*(rows([t.float() for t in saved[n]]) for n in ("max", "sum")))
    operands = replace(operands, out=rows([t.to(p.torch_dtype) for t in saved["out"]]), stats=stats)
    torch.set_num_threads(threads)
    plan = cpu.schedule(p, call.extents, "attention_backward", variant)
    cpu.attention_backward(p, call.extents, plan, operands, grads)
    views = {f"d{n}": (getattr(grads, f"d{n}"), getattr(call, n)) for n in INPUTS}
    results = {n: [t.clone() for t in read(view, like)] for n, (view, like) in views.items() if view is not None}
    return results if grads.dsink is None else results | {"dsink": [grads.dsink]}


def cancelling(call: SparseCall, name: str, b: int) -> float:
    """The absolute terms behind a number of dq or dk, at most: dP - D of rows that see one key is nothing."""
    p, group = call.problem, call.problem.heads_q // call.problem.heads_kv
    factor = getattr(call, ("k" if name[1] == "q" else "q") + name[2:])[b].double().nan_to_num(nan=0.0).abs()
    dout, v = call.dout[b].double().abs(), call.v[b].double().nan_to_num(nan=0.0).abs()
    products = dout @ v.repeat_interleave(group, 0).mT
    if not (factor.numel() and products.numel()):
        return 0.0
    added = 1 if name[1] == "q" else dout.shape[0] * dout.shape[1] / p.heads_kv  # a key's gradient adds up rows
    return float(abs(p.scale) * products.amax() * factor.amax() * added)


def judge(call: SparseCall, ours: Results, wanted: Results, plain: Results) -> None:
    count = max(int(call.extents.kv_len.max()) * 2, call.problem.dim_v)  # dP adds up over a value's elements
    for name, tensors in ours.items():
        for b, tensor in enumerate(tensors):
            three = tensor, wanted[name][b], plain[name][b]
            terms = cancelling(call, name, b) if name[:2] in ("dq", "dk") else 0.0
            compare(f"{call.problem} {name}[{b}]", *three, count, terms)


def draw(seed: int) -> SparseCall:
    rng = random.Random(seed)
    heads_kv, dim = rng.choice([1, 1, 1, 2, 3]), rng.choice([1, 7, 16, 33, 48, 64, 96])
    shares, block = rng.random() < 0.4, rng.choice([1, 1, 2, 5, 16, 64])
    problem = Problem(
        heads_q=heads_kv * rng.choice([1, 2, 5, 8, 13, 17, 40]),
        heads_kv=heads_kv,
        dim_qk=dim,
        dim_v=rng.randint(1, dim)
        if shares and rng.random() < 0.5
        else dim
        if shares
        else rng.choice([1, 9, 32, 40, dim]),
        dim_rope=rng.choice([0, 0, 3, 16, 20]),
        dtype=rng.choice(["float32", "float16", "bfloat16"]),
        scale=rng.choice([dim**-0.5, dim**-0.5, -0.2, 0.0, 0.05]),
        has_sink=rng.random() < 0.3,
        shares_kv=shares,
        select_count=rng.choice([1, 3, 12, 40, 150, 300]),
        select_block=block,
    )
    count = rng.choice([1, 2, 3])
    q_len = tuple(rng.choice([0, 1, 2, 5, 11]) for _ in range(count))
    kv_len = tuple(rng.choice([0, 1, 9, 60, 260]) for _ in range(count))
    return make_sparse(problem, q_len, kv_len, rng.random() < 0.5, seed, rng.random() < 0.4)


@pytest.mark.parametrize("seed", range(30))
def test_random_calls_against_the_formulas(seed: int) -> None:
    call = draw(seed)
    wanted, plain = formulas(call, torch.float64), formulas(call, torch.float32)
    for variant in VARIANTS:
        judge(call, forward(call, variant, packed=seed % 2 == 0), wanted, plain)
        # Gradients are judged for the same saved results: golden's, as far as they can be stored.
        saved = {n: [t.to(call.problem.torch_dtype) if n == "out" else t.float() for t in wanted[n]] for n in wanted}
        exact, measure = formulas(call, torch.float64, saved), formulas(call, torch.float32, saved)
        judge(call, backward(call, saved, variant, packed=seed % 2 == 0), exact, measure)


@pytest.mark.parametrize("size", [1, 16, 48])
@pytest.mark.parametrize("seed", range(100, 106))
def test_pages_change_no_bit(seed: int, size: int) -> None:
    call = draw(seed)
    for variant in VARIANTS:
        same_bits(forward(call, variant, page_size=size), forward(call, variant))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_and_layouts_change_no_bit(variant: str, dtype: str) -> None:
    problem = Problem(36, 1, 40, 24, 8, dtype, 0.2, has_sink=True, select_count=60, select_block=3)
    call = make_sparse(problem, (40, 0, 3, 1), (311, 4, 0, 530), True, 7, duplicates=True)
    saved = forward(call, variant, 1)
    want = backward(call, saved, variant, 1)
    assert not any(t.isnan().any() for name in ("dq", "dv") for t in want[name])
    for threads, packed in ((2, True), (3, False), (5, True)):
        same_bits(forward(call, variant, threads, packed), saved)
        same_bits(backward(call, saved, variant, threads, packed), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_alone_uses_all_threads_and_the_same_bits(dtype: str) -> None:
    problem = Problem(128, 1, 64, 48, 16, dtype, 0.1, select_count=400)
    call = make_sparse(problem, (1,), (1000,), False, 3)
    want = forward(call, threads=1)
    gradients = backward(call, want, threads=1)
    for threads in (2, 3, 7):
        same_bits(forward(call, threads=threads), want)
        same_bits(backward(call, want, threads=threads), gradients)
    judge(call, want, formulas(call, torch.float64), formulas(call, torch.float32))


@pytest.mark.parametrize("heads", [5, 40, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_lists_around_whole_blocks_and_chunks(dtype: str, heads: int) -> None:
    """Rows that are whole vectors are gathered while others are multiplied; the rest, and values apart, are not."""
    lengths = [0, 1, 11, 12, 13, 23, 24, 25, 36, 47, 48, 49, 95, 96, 97, 108, 192, 205]
    problem = Problem(heads, 1, 96, 64, 32, dtype, 0.08, has_sink=heads == 5, shares_kv=True, select_count=256)
    call = make_sparse(problem, (len(lengths),), (600,), False, heads)
    call.k[0], call.k_rope[0] = (torch.randn(1, 600, dim).to(problem.torch_dtype) for dim in (96, 32))
    for row, length in enumerate(lengths):
        call.indices[0][0, row] = torch.randperm(600)[:256]
        call.indices[0][0, row, length:] = -1
    call.v[0] = call.k[0][..., :64]
    wanted, plain = formulas(call, torch.float64), formulas(call, torch.float32)
    saved = {n: [t.to(problem.torch_dtype) if n == "out" else t.float() for t in wanted[n]] for n in wanted}
    exact, measure = formulas(call, torch.float64, saved), formulas(call, torch.float32, saved)
    apart = replace(call, problem=replace(problem, shares_kv=False), v=[call.v[0].clone()])
    for variant in VARIANTS:
        ours = forward(call, variant)
        judge(call, ours, wanted, plain)
        same_bits(forward(apart, variant), ours)
        same_bits(forward(call, variant, page_size=16), ours)
        judge(call, backward(call, saved, variant), exact, measure)


@pytest.mark.parametrize("dim_v", [25, 63, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_that_end_within_a_word_of_the_keys(dtype: str, dim_v: int) -> None:
    """Two bfloat16 elements are a word: an odd value row is gathered by itself, and wants room of its own."""
    problem = Problem(8, 1, 64, dim_v, 8, dtype, 0.1, has_sink=True, shares_kv=True, select_count=4)
    call = make_sparse(problem, (9,), (40,), True, 11)
    wanted = formulas(call, torch.float64)
    saved = {n: [t.to(problem.torch_dtype) if n == "out" else t.float() for t in wanted[n]] for n in wanted}
    exact, measure = formulas(call, torch.float64, saved), formulas(call, torch.float32, saved)
    for variant in VARIANTS:
        judge(call, backward(call, saved, variant), exact, measure)


@pytest.mark.parametrize("dim_v", [4, 8, 16, 20, 32, 48, 64, 80, 96, 112])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_that_are_any_part_of_the_keys(dtype: str, dim_v: int) -> None:
    problem = Problem(8, 1, 128, dim_v, 32, dtype, 0.1, shares_kv=True, select_count=40)
    call = make_sparse(problem, (9,), (40,), False, 12)
    wanted, plain = formulas(call, torch.float64), formulas(call, torch.float32)
    for variant in VARIANTS:
        judge(call, forward(call, variant), wanted, plain)


def test_the_order_of_a_list_and_other_rows_change_nothing_but_sums() -> None:
    problem = Problem(16, 1, 64, 64, dtype="float32", scale=0.125, select_count=96)
    call = make_sparse(problem, (6,), (96,), False, 5)
    call.k[0], call.v[0] = torch.randn(1, 96, 64), torch.randn(1, 96, 64)
    call.indices[0] = torch.arange(96, dtype=torch.int32).expand(1, 6, 96).contiguous()
    ascending = forward(call)
    saved = backward(call, ascending)
    call.indices[0] = call.indices[0].flip(-1).contiguous()
    wanted, plain = formulas(call, torch.float64), formulas(call, torch.float32)
    for ours in (ascending, forward(call)):
        judge(call, ours, wanted, plain)
    same_bits(backward(call, ascending), saved)  # keys are added in their own order there


def test_what_is_not_finite_reaches_exactly_the_rows_that_name_it() -> None:
    problem = Problem(8, 1, 32, 32, dtype="bfloat16", scale=0.2, select_count=20)
    call = make_sparse(problem, (12,), (64,), False, 9)
    named = int(call.indices[0][0, 3, 0])
    call.k[0][0, named, 5] = math.nan
    sees = [named in entries(call, 0, 0, i) for i in range(12)]
    for variant in VARIANTS:
        out = forward(call, variant)["out"][0]
        assert [bool(out[:, i].isnan().all()) for i in range(12)] == sees
        assert [bool(out[:, i].isnan().any()) for i in range(12)] == sees


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_infinite_values_outlast_weights_that_no_float_can_hold(variant: str, dtype: str) -> None:
    problem = Problem(3, 1, 16, 5, dtype=dtype, scale=1.0, has_sink=True, select_count=700)
    call = make_sparse(problem, (5,), (700,), False, 3)
    q, k, v = call.q[0], call.k[0], call.v[0]
    q.fill_(1.0), k.zero_(), v.fill_(1.0)
    call.indices[0][:] = torch.arange(700, dtype=torch.int32)
    assert call.sink is not None
    call.sink[2] = 300.0  # head 2's softmax leaves nothing for keys
    k[0, 300] = 200 / 16  # every other key's weight underflows: those before it, when its score fades them
    v[0, 5, 0], v[0, 650, 1] = math.inf, -math.inf
    v[0, 6, 2], v[0, 600, 2] = math.inf, -math.inf
    k[0, 7, 3] = -math.inf  # a weight that is 0, not merely small: the key is not seen
    v[0, 7, 3:] = math.inf
    out = forward(call, variant)["out"][0].double()
    assert (out[..., 0] == math.inf).all()
    assert (out[..., 1] == -math.inf).all()
    assert out[..., 2].isnan().all()
    assert (out[:2, :, 3:] == 1.0).all()
    # exp(200 - 300) = 2**-144 is left of head 2's weights of 1, where float32 still has it.
    assert (out[2, :, 3:].abs() <= 2.0**-144).all()


# ------------------------------------------------------------------------------------------------- memory and bad calls


@pytest.mark.parametrize("verb", ["attention_forward", "attention_backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_stays_under_a_gigabyte(verb: str, dtype: str) -> None:
    problem = Problem(64, 1, 576, 512, dtype=dtype, select_count=2048)
    extents = extents_of((32768,), (32768,), True)
    assert cpu.workspace_bytes(problem, extents, verb) < 1_000_000_000


def test_what_this_back_end_does_not_compute_is_said() -> None:
    problem = Problem(1, 1, 8, 8, select_count=4, bias="matrix", dropout="bits", has_blocked=True, empty_rows="mean")
    assert len(cpu.reasons_against(problem, "cpu")) == 4
    assert not cpu.reasons_against(Problem(1, 1, 8, 8, select_count=4, page_size=16, shares_kv=True), "cpu")


def test_sizes_that_disagree_are_an_error() -> None:
    problem = Problem(2, 1, 8, 8, select_count=4)
    call = make_sparse(problem, (3,), (5,), False, 0)
    plan = cpu.schedule(problem, call.extents, "attention_forward")
    operands = load_sparse(call)
    narrow, long = replace(operands.indices, dim=3), replace(operands.indices, address=np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="indices has rows of another length"):
        cpu.attention_forward(problem, call.extents, plan, replace(operands, indices=narrow))
    with pytest.raises(ValueError, match="indices has 2 elements, expected 1"):
        cpu.attention_forward(problem, call.extents, plan, replace(operands, indices=long))
    with pytest.raises(TypeError, match="int32"):
        cpu.attention_forward(problem, call.extents, plan, replace(operands, indices=operands.q))
    assert operands.out.sequence(0, 2, 3).isnan().all()
