"""The native core's backward: each instruction-set variant that runs here, forced, against the float64 reference.

The forward's saved results are inputs, so only rounding errors of the backward are allowed.
"""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.native_dense import (
    CAPPED,
    VARIANTS,
    converted,
    draw_call,
    gradient_sizes,
    gradients,
    invalid,
    native,
    unit_views,
    wanted,
    with_cap,
)
from support.oracle import Call, Results, make

import fusion_attention as fa
from fusion_attention.backends import cpu
from fusion_attention.ir.mask import Band
from fusion_attention.ir.memory_views import MatrixView, RowView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.testing import compare

# The reference accumulates into a broadcast bias table, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Use of index_put_")


def judge(call: Call, saved: Results, want: Results, got: dict[Any, Results]) -> None:
    """Compares every gradient of several runs within rounding errors; empty sequences have zeros."""
    size = gradient_sizes(call, saved)
    for at, result in got.items():
        for name, sequences in result.items():
            for b, ours in enumerate(sequences):
                if name != "dsink" and not (call.extents.q_len[b] and call.extents.kv_len[b]):
                    assert not ours.any(), (at, name, b)
                    continue
                # The gradient of a bias has the dtype of the bias, as for every input.
                rounded = ours.to(call.problem.torch_dtype) if name == "dbias" else ours
                compare(f"{call.problem}, {at}, {name}", rounded, Expected(want[name][b], size[name][b]))


@pytest.mark.parametrize(("seed", "softcap"), [*((n, 0.0) for n in range(60)), *CAPPED])
def test_backward_of_random_calls_matches_float64_reference(seed: int, softcap: float) -> None:
    call = with_cap(draw_call(seed), softcap)
    saved = native(call)
    want = wanted(call, saved)
    judge(call, saved, want, {v: gradients(call, saved, v, packed=seed % 2 == 0) for v in VARIANTS})


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_backward_nan_and_infinity_appear_exactly_as_in_reference(seed: int) -> None:
    call, rng = with_cap(draw_call(seed), 0.0 if seed < 2030 else 0.9), random.Random(seed)
    invalid(call, seed)
    if (tensors := [t for t in call.dout if t.numel()]) and rng.random() < 0.5:
        tensor = rng.choice(tensors)
        tensor[tuple(rng.randrange(n) for n in tensor.shape)] = rng.choice([math.nan, math.inf])
    saved = native(call)
    want = wanted(call, saved)
    for variant in VARIANTS:
        got = gradients(call, saved, variant)
        for name in got:
            for a, b in zip(got[name], want[name], strict=True):
                assert torch.equal(a.isfinite(), b.isfinite()), (variant, name, call.problem)


# ----------------------------------------------------------------------------------------------------------- same bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_backward_is_bitwise_equal_for_any_layout_and_thread_count(variant: str, dtype: str) -> None:
    problem = Problem(4, 2, 40, 24, 8, dtype, 0.2, "slopes", has_sink=True, dropout="philox", keep_prob=0.7)
    call = converted(make(problem, (200, 0, 3, 411), (311, 4, 0, 530), Band.window(350, 3)), problem.torch_dtype)
    saved = native(call)
    want = gradients(call, saved, variant, packed=True, threads=1)
    assert not any(t.isnan().any() for t in want["dq"] + want["dk"] + want["dv"])
    for packed, threads in ((False, 1), (True, 2), (False, 2), (True, 3), (True, 5), (True, 8), (True, 16), (True, 64)):
        same_bits(gradients(call, saved, variant, packed, threads), want)


@pytest.mark.parametrize(
    ("axes", "shared"),
    [("hij", False), ("hij", True), ("ij", True), ("hj", False), ("j", True), ("hi", False), ("i", True), ("", True)],
)
def test_dbias_of_every_broadcast_shape_is_bitwise_equal_for_any_thread_count(axes: str, shared: bool) -> None:
    problem = Problem(6, 3, 16, 16, dtype="float32", scale=0.25, bias="matrix", bias_scaled=True)
    call = converted(make(problem, (400, 400, 400), (300, 300, 300), Band.causal(), axes, shared), torch.float32)
    saved = native(call)
    want = gradients(call, saved, threads=1, shared=True)
    for threads in (2, 3, 3, 3, 5, 8, 16, 64):
        same_bits(gradients(call, saved, threads=threads, shared=True), want)


@pytest.mark.parametrize("shared", [False, True])
def test_bias_table_gradient_is_bitwise_equal_for_any_thread_count(shared: bool) -> None:
    # Rows a thousand apart add to the same elements; so do sequences of other lengths if the table is shared.
    problem = Problem(2, 1, 8, 8, dtype="float32", scale=0.3, bias="table")
    call = converted(make(problem, (1200, 1100), (1200, 1100), Band.causal(), "hij", shared), torch.float32)
    saved = native(call)
    want = gradients(call, saved, threads=1, shared=True)
    for threads in (2, 3, 5, 16):
        same_bits(gradients(call, saved, threads=threads, shared=True), want)


def test_dbias_shared_by_unequal_sequences_is_equal_for_any_thread_count() -> None:
    # A tile of the bias gradient waits only for earlier sequences that are long enough to reach it.
    q_len, kv_len = [700, 100, 700, 390], [600, 300, 0, 600]
    q, dout = (torch.randn(sum(q_len), 2, 16) for _ in range(2))
    k, v = (torch.randn(sum(kv_len), 1, 16) for _ in range(2))
    bias = torch.randn(1, 1, 700, 600, requires_grad=True)

    def bias_gradient(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        band = fa.Band.window(250, 10)
        out = fa.attention(q, k, v, bias=bias, layout="TND", q_len=q_len, kv_len=kv_len, band=band)
        return torch.autograd.grad(out, bias, dout)[0]

    want = bias_gradient(1)
    for threads in (2, 3, 5, 16):
        same_bits(bias_gradient(threads), want)


BANDS = {
    "full": Band.full(),
    "causal": Band.causal(),
    "window": Band.window(40, 5),
    "behind the keys": Band.window(-200, 400),
    "prefix": Band.prefix_causal([90, 0, 30]),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("band", BANDS)
def test_unshared_dbias_is_written_with_zeros_for_hidden_pairs(band: str, dtype: str, scaled: bool) -> None:
    problem = Problem(2, 1, 24, 16, dtype=dtype, scale=0.2, bias="matrix", bias_scaled=scaled, has_blocked=scaled)
    call = converted(make(problem, (210, 0, 31), (330, 9, 288), BANDS[band]), problem.torch_dtype)
    saved = native(call)
    results: dict[Any, Results] = {}
    for variant in VARIANTS:
        got = gradients(call, saved, variant, owned=True)
        assert got["dbias"][0].dtype == problem.torch_dtype
        for b, result in enumerate(got["dbias"]):
            first, end = (
                torch.from_numpy(n)[:, None] for n in call.extents.row_interval(b, np.arange(result.shape[1]))
            )
            key = torch.arange(result.shape[2])
            hidden = (key < first) | (key >= end) | (call.blocked[b] if scaled else torch.tensor(False))
            assert not result[hidden.expand_as(result)].any()
        results[variant] = got
        full = gradients(call, saved, variant, owned=True, shared=True)
        memory = full["dbias"][0]
        assert memory.isnan().sum() == memory.numel() - sum(t.numel() for t in call.bias)
        same_bits(gradients(call, saved, variant, threads=5, owned=True, shared=True), full)
    judge(call, saved, wanted(call, saved), results)


@pytest.mark.parametrize("size", [256, 96, 288])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dbias_bits_do_not_depend_on_cache_line_alignment_of_rows(dtype: torch.dtype, size: int) -> None:
    # Rows of the first call start at boundaries of cache lines, rows of the second do not.
    q, k, v, dout = (torch.randn(1, 2, size, 16, dtype=dtype) for _ in range(4))
    bias = torch.randn(1, 2, size, size, dtype=dtype, requires_grad=True)
    out = fa.attention(q, k, v, bias=bias, layout="BNSD", band=fa.Band.causal())
    (one,) = torch.autograd.grad(out, bias, dout)
    k, v = (torch.nn.functional.pad(t, (0, 0, 0, 3)) for t in (k, v))
    bias = torch.nn.functional.pad(bias.detach(), (0, 3)).requires_grad_()
    out = fa.attention(q, k, v, bias=bias, layout="BNSD", band=fa.Band.causal(), kv_len=[size])
    (other,) = torch.autograd.grad(out, bias, dout)
    same_bits(one, other[..., :size])
    assert not other[..., size:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_of_large_batch_are_bitwise_equal_to_single_sequences(dtype: torch.dtype) -> None:
    # All results together are written past the caches in complete cache lines; one sequence's results are not.
    lengths, heads = [300, 333, 7], 32 if dtype == torch.float32 else 64
    sizes = (heads, 72), (heads // 2, 72), (heads // 2, 64), (heads, 64)
    q, k, v, dout = (torch.randn(sum(lengths), *size, dtype=dtype) for size in sizes)

    def gradients_of(q_len: list[int], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [t.clone().requires_grad_() for t in tensors[:3]]
        return torch.autograd.grad(fa.attention(*inputs, layout="TND", q_len=q_len), inputs, tensors[3])

    full = [t.split(lengths) for t in gradients_of(lengths, q, k, v, dout)]
    pieces = (t.split(lengths) for t in (q, k, v, dout))
    for b, alone in enumerate(zip(*pieces, strict=True)):
        for got, want in zip(gradients_of(lengths[b : b + 1], *alone), (t[b] for t in full), strict=True):
            same_bits(got, want)


@pytest.mark.parametrize("bias", ["none", "matrix", "slopes", "slopes_sqrt"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_backward_of_row_with_single_key_uses_probability_exactly_one(variant: str, dtype: str, bias: str) -> None:
    # Scores are like 1000 / 3: an error of an ulp would show. dv must have the bits of dout.
    problem = Problem(2, 2, 33, 9, 5, dtype, 37.3, bias, bias_scaled=bias == "matrix")
    call = converted(make(problem, (1, 1), (1, 1), shift=7), problem.torch_dtype)
    saved = native(call, variant)
    got = gradients(call, saved, variant)
    for a, b in zip(got["dv"], call.dout, strict=True):
        same_bits(a, b.to(a.dtype))


def test_backward_of_bfloat16_rows_with_large_scores_matches_reference() -> None:
    # exp of such scores has rounding errors beyond bfloat16's precision; exp of neighbouring rows' scores has not.
    problem = Problem(2, 1, 24, 16, dtype="bfloat16", scale=0.2)
    call = converted(make(problem, (70,), (90,), Band.causal()), problem.torch_dtype)
    for row in (0, 13, 40, 41, 69):
        call.q[0][:, row] *= 2000
    saved = native(call)
    assert saved["max"][0].max() > 1024
    judge(call, saved, wanted(call, saved), {variant: gradients(call, saved, variant) for variant in VARIANTS})


def test_backward_with_rowless_sequence_between_others_is_equal_on_two_threads() -> None:
    # One sequence's rows fill the buffer; a tile of keys uses them while another thread may pack the next rows.
    problem = Problem(1, 1, 128, 128, dtype="float32", scale=0.09)
    call = converted(make(problem, (9000, 0, 9000), (20, 10, 20), Band.full()), torch.float32)
    saved = native(call)
    want = gradients(call, saved, "base", threads=1)
    for _ in range(3):
        same_bits(gradients(call, saved, "base", threads=2), want)


def test_backward_matches_reference_if_last_sequence_has_no_keys() -> None:
    problem = Problem(12, 3, 128, 128, dtype="float32", scale=0.09)
    call = converted(make(problem, (1, 200), (33, 0), Band.full()), torch.float32)
    saved = native(call)
    got = {(v, threads): gradients(call, saved, v, threads=threads) for v in VARIANTS for threads in (1, 2)}
    judge(call, saved, wanted(call, saved), got)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("dtype", "size", "band"),
    [
        ("float32", 1500, Band.window(60, 8)),
        ("float32", 1500, Band.window(-300, 500)),
        ("float32", 1500, Band.window(5, 0, "end")),
        ("float32", 1500, Band.prefix_causal([500, 0, 1])),
        ("bfloat16", 2100, Band.window(60, 8)),
    ],
)
def test_backward_reuses_workspace_of_finished_rows_without_wrong_gradients(dtype: str, size: int, band: Band) -> None:
    # Includes rows behind the last key, which see no key.
    problem = Problem(2, 1, 8, 8, dtype=dtype, scale=0.3)
    call = converted(make(problem, (size, 1100, 400), (size, 300, 900), band), problem.torch_dtype)
    saved = native(call)
    want = gradients(call, saved, threads=1)
    judge(call, saved, wanted(call, saved), {dtype: want})
    for threads in (2, 7):
        same_bits(gradients(call, saved, threads=threads), want)


# ------------------------------------------------------------------------------------------------- memory and bad calls


def small() -> tuple[Problem, Extents, Operands, Grads]:
    problem = Problem(1, 1, 4, 30, bias="matrix")
    extents, operands = unit_views(problem, 5, 30)
    zero = np.zeros(1, np.int64)
    operands = replace(operands, bias=MatrixView(torch.zeros(150), zero, zero, zero + 30, 1))
    cpu.attention_forward(problem, extents, cpu.schedule(problem, extents, "attention_forward"), operands)
    views = (operands.out, operands.q, operands.k, operands.v)
    return problem, extents, operands, Grads(*(v.over(torch.zeros_like(v.keep[0])) for v in views))


def bad_gradients() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    two, one = np.zeros(2, np.int64), np.zeros(1, np.int64)
    memory = torch.zeros(900)
    return {
        "too many addresses": ({"dq": RowView((memory,), two, 4, two, 4)}, ValueError, "dq has 2 elements, expected 1"),
        "another dim": ({"dk": RowView((memory,), one, 4, one, 3)}, ValueError, "dk has rows of another length"),
        "another dtype": ({"dv": RowView((memory.double(),), one, 30, one, 30)}, TypeError, "float64"),
        "narrow dbias": ({"dbias": MatrixView(memory.half(), one, one, one, 1)}, TypeError, "dbias in float32"),
        "keys apart": ({"dbias": MatrixView(memory, one, one, one, 2)}, ValueError, "dbias has keys that are not"),
    }


@pytest.mark.parametrize("name", bad_gradients())
def test_backward_refuses_gradient_tensors_of_wrong_size_or_dtype(name: str) -> None:
    problem, extents, operands, grads = small()
    plan = cpu.schedule(problem, extents, "attention_backward")
    changes, kind, message = bad_gradients()[name]
    with pytest.raises(kind, match=message):
        cpu.attention_backward(problem, extents, plan, operands, replace(grads, **changes))
    assert not grads.dq.keep[0].any()
    cpu.attention_backward(problem, extents, plan, operands, grads)


@pytest.mark.slow
def test_backward_of_long_sequences_in_several_waves_matches_reference() -> None:
    problem = Problem(2, 1, 128, 128, dtype="float32", scale=0.09)
    call = converted(make(problem, (9000, 40, 3000), (300, 70, 10), Band.full()), torch.float32)
    saved = native(call)
    judge(call, saved, wanted(call, saved), {"long": gradients(call, saved)})


def test_backward_refuses_to_write_bias_table_gradient_without_adding() -> None:
    call = converted(make(Problem(1, 1, 4, 4, bias="table"), (1030,), (1030,), Band.causal()), torch.float32)
    with pytest.raises(ValueError, match="dbias cannot be written once"):
        gradients(call, native(call), owned=True)
