"""The native core's backward: every instruction-set variant that runs here, forced, against the float64 specification.

Calls are support/native_dense.py's; what the forward saved is the input, so that only the backward is judged. The error
allowed is measured on the same call computed plainly in float32, never set by hand.
"""

from __future__ import annotations

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
    capped,
    converted,
    drawn,
    gradients,
    native,
    plain_keep,
    plain_products,
    plain_scores,
    spoil,
    unit_views,
    wanted,
    with_cap,
)
from support.witness import Call, Results, make

import fusion_attention as fa
from fusion_attention.backends import cpu
from fusion_attention.testing import beside_plain
from fusion_attention.waist import bias
from fusion_attention.waist.kv import MatrixView, RowView
from fusion_attention.waist.mask import Band
from fusion_attention.waist.problem import Extents, Grads, Operands, Problem

# The specification adds up a table that lies broadcast.
pytestmark = pytest.mark.filterwarnings("ignore:Use of index_put_")


def plain(call: Call, saved: Results, b: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The gradients of a sequence by whole float32 matrices, P, dS and results rounded where the core may.

    Beside each: the sums of the absolute terms behind it, since what cancels may be larger than what remains.
    """
    p, low = call.problem, call.problem.torch_dtype
    own, group = torch.arange(p.heads_q) // p.group, (p.heads_kv, p.group)
    q, k = ([t for t in (getattr(call, n), getattr(call, f"{n}_rope")) if t] for n in "qk")
    q, k = (torch.cat([t[b].float() for t in parts], -1) for parts in (q, k))
    k, v, dout = k[own], call.v[b].float()[own], call.dout[b].float()
    out, peak, total = (saved[n][b].float() for n in ("out", "max", "sum"))
    empty, kept = peak == -math.inf, plain_keep(call, b, q.shape[1], k.shape[1]) / p.keep_prob
    weights = (plain_scores(call, b) - peak.masked_fill(empty, 0)).exp() / total.masked_fill(total == 0, 1)
    weights = torch.where(empty, (total > 0) / total.clamp(min=1), weights)
    terms = (dout @ v.mT) * kept, (dout * out).sum(-1, keepdim=True)
    dscores = (weights * (terms[0] - terms[1])).masked_fill(empty, 0)
    sizes = weights * ((dout.abs() @ v.abs().mT) * kept + (dout * out).abs().sum(-1, keepdim=True))
    slopes = capped(p, plain_products(call, b))[1]

    def narrow(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float() if low == torch.bfloat16 else x

    def products(p_kept: torch.Tensor, ds: torch.Tensor, *x: torch.Tensor) -> dict[str, torch.Tensor]:
        dq, dk, dv = p.scale * (ds @ x[1]), p.scale * (ds.mT @ x[0]), p_kept.mT @ x[2]
        dk, dv = (t.unflatten(0, group).sum(1) for t in (dk, dv))
        found = {"dq": dq[..., : p.dim_qk], "dk": dk[..., : p.dim_qk], "dv": dv}
        return found | ({"dq_rope": dq[..., p.dim_qk :], "dk_rope": dk[..., p.dim_qk :]} if p.dim_rope else {})

    found = products(narrow(weights * (kept != 0)) / p.keep_prob, narrow(dscores * slopes), q, k, dout)
    absolute = products(weights * kept, sizes, q.abs(), k.abs(), dout.abs())
    pairs = {
        name: (found[name].to(low), absolute[name] * (1 if name == "dv" else math.copysign(1, p.scale)))
        for name in found
    }
    if call.bias:
        pairs["dbias"] = (plain_dbias(call, b, dscores) + 1) - 1, plain_dbias(call, b, sizes) + 1
    if call.sink is not None:
        share = (call.sink.float()[:, None, None] - peak.masked_fill(empty, math.inf)).exp() / total
        pairs["dsink"] = -(share * terms[1]).sum((1, 2)), (share * (dout * out).abs().sum(-1, keepdim=True)).sum((1, 2))
    return pairs


def plain_dbias(call: Call, b: int, dscores: torch.Tensor) -> torch.Tensor:
    """Added up where the bias of a sequence was read."""
    like = call.bias[b]
    dscores = dscores * call.problem.scale if call.problem.bias_scaled else dscores
    if call.problem.bias == "matrix":
        return dscores.sum_to_size(like.shape)
    row, key = (slice(0, n) for n in dscores.shape[1:])
    at, column = bias.table_position(row.stop, row, key)
    whole = torch.zeros(dscores.shape[0], 1024, key.stop)
    places = at.expand_as(column) * key.stop + column.clamp(max=key.stop - 1)
    whole.view(dscores.shape[0], -1).index_add_(1, places.flatten(), dscores.flatten(1))
    return whole.sum_to_size(like.shape)


def judge(call: Call, saved: Results, got: Results, want: Results, at: Any) -> None:
    """All sequences together, since one number's error is luck."""
    some = [b for b in range(len(call.extents)) if call.extents.q_len[b] and call.extents.kv_len[b]]
    plainly = {b: plain(call, saved, b) for b in some}
    for name in got:
        for b in set(range(len(got[name]))) - set(some):
            assert not got[name][b].any() or name == "dsink", (at, name, b)
        if not some:
            continue
        if name == "dsink":
            pairs = [plainly[b][name] for b in some]
            ours, by_plain, right = got[name][0], sum(pair[0] for pair in pairs), want[name][0]
            terms = float(sum(pair[1] for pair in pairs).max())
        else:
            width = got[name][0].shape[-1] if name != "dbias" else 1
            # A bias gets its gradient in its own dtype, as every input does.
            own = [t.to(call.problem.torch_dtype) for t in got[name]]
            values = own, {b: plainly[b][name][0].to(own[0].dtype) for b in some}, want[name]
            ours, by_plain, right = (torch.cat([t[b].reshape(-1, width) for b in some]) for t in values)
            terms = max(plainly[b][name][1].abs().max().item() for b in some)
        beside_plain(f"{at} {name}", ours, right, by_plain, int(call.extents.kv_len.max()), terms)


@pytest.mark.parametrize(("seed", "softcap"), [*((n, 0.0) for n in range(60)), *CAPPED])
def test_random_calls_against_the_specification(seed: int, softcap: float) -> None:
    call = with_cap(drawn(seed), softcap)
    saved = native(call)
    want = wanted(call, saved)
    for variant in VARIANTS:
        got = gradients(call, saved, variant, packed=seed % 2 == 0)
        judge(call, saved, got, want, (variant, call.problem))


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_what_is_not_finite_reaches_exactly_the_gradients_that_see_it(seed: int) -> None:
    call, rng = with_cap(drawn(seed), 0.0 if seed < 2030 else 0.9), random.Random(seed)
    spoil(call, seed)
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
def test_threads_and_layouts_do_not_change_a_bit(variant: str, dtype: str) -> None:
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
def test_every_form_of_dbias_is_the_same_for_any_threads(axes: str, shared: bool) -> None:
    problem = Problem(6, 3, 16, 16, dtype="float32", scale=0.25, bias="matrix", bias_scaled=True)
    call = converted(make(problem, (400, 400, 400), (300, 300, 300), Band.causal(), axes, shared), torch.float32)
    saved = native(call)
    want = gradients(call, saved, threads=1, shared=True)
    for threads in (2, 3, 3, 3, 5, 8, 16, 64):
        same_bits(gradients(call, saved, threads=threads, shared=True), want)


@pytest.mark.parametrize("shared", [False, True])
def test_the_gradient_of_a_table_is_the_same_for_any_threads(shared: bool) -> None:
    # Rows a thousand apart add to the same elements; sequences of other lengths to some of a shared table's.
    problem = Problem(4, 2, 8, 8, dtype="float32", scale=0.3, bias="table")
    call = converted(make(problem, (1300, 1300), (1300, 1300), Band.causal(), "hij", shared), torch.float32)
    saved = native(call)
    want = gradients(call, saved, threads=1, shared=True)
    for threads in (2, 3, 5, 16):
        same_bits(gradients(call, saved, threads=threads, shared=True), want)


def test_sequences_that_share_a_bias_may_differ_in_length() -> None:
    # A tile that an earlier sequence does not reach comes after the one that reaches it, or waits for nobody.
    q_len, kv_len = [700, 100, 700, 390], [600, 300, 0, 600]
    q, dout = (torch.randn(sum(q_len), 2, 16) for _ in range(2))
    k, v = (torch.randn(sum(kv_len), 1, 16) for _ in range(2))
    bias = torch.randn(1, 1, 700, 600, requires_grad=True)

    def found(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        band = fa.Band.window(250, 10)
        out = fa.attention(q, k, v, bias=bias, layout="TND", q_len=q_len, kv_len=kv_len, band=band)
        return torch.autograd.grad(out, bias, dout)[0]

    want = found(1)
    for threads in (2, 3, 5, 16):
        same_bits(found(threads), want)


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
def test_a_bias_of_one_pair_each_gets_its_gradient_written(band: str, dtype: str, scaled: bool) -> None:
    problem = Problem(2, 1, 24, 16, dtype=dtype, scale=0.2, bias="matrix", bias_scaled=scaled, has_blocked=scaled)
    call = converted(make(problem, (210, 0, 31), (330, 9, 288), BANDS[band]), problem.torch_dtype)
    saved = native(call)
    want = wanted(call, saved)
    for variant in VARIANTS:
        got = gradients(call, saved, variant, owned=True)
        assert got["dbias"][0].dtype == problem.torch_dtype
        for b, found in enumerate(got["dbias"]):
            first, end = (torch.from_numpy(n)[:, None] for n in call.extents.row_interval(b, np.arange(found.shape[1])))
            key = torch.arange(found.shape[2])
            hidden = (key < first) | (key >= end) | (call.blocked[b] if scaled else torch.tensor(False))
            assert not found[hidden.expand_as(found)].any()
        judge(call, saved, got, want, (variant, problem, band))
        whole = gradients(call, saved, variant, owned=True, shared=True)
        memory = whole["dbias"][0]
        assert memory.isnan().sum() == memory.numel() - sum(t.numel() for t in call.bias)
        same_bits(gradients(call, saved, variant, threads=5, owned=True, shared=True), whole)


@pytest.mark.parametrize("size", [256, 96, 288])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_whole_lines_of_a_bias_gradient_are_what_their_pieces_are(dtype: torch.dtype, size: int) -> None:
    # The first call's rows begin where lines of the cache do, the second's nowhere.
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
def test_large_results_have_the_bits_of_small_ones(dtype: torch.dtype) -> None:
    # Together they are written past the caches, where they fill whole lines; one sequence's alone are not.
    lengths, heads = [300, 333, 7], 32 if dtype == torch.float32 else 64
    sizes = (heads, 72), (heads // 2, 72), (heads // 2, 64), (heads, 64)
    q, k, v, dout = (torch.randn(sum(lengths), *size, dtype=dtype) for size in sizes)

    def found(q_len: list[int], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [t.clone().requires_grad_() for t in tensors[:3]]
        return torch.autograd.grad(fa.attention(*inputs, layout="TND", q_len=q_len), inputs, tensors[3])

    whole = [t.split(lengths) for t in found(lengths, q, k, v, dout)]
    pieces = (t.split(lengths) for t in (q, k, v, dout))
    for b, alone in enumerate(zip(*pieces, strict=True)):
        for got, want in zip(found(lengths[b : b + 1], *alone), (t[b] for t in whole), strict=True):
            same_bits(got, want)


@pytest.mark.parametrize("bias", ["none", "matrix", "slopes", "slopes_sqrt"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_probability_of_an_only_key_is_exactly_one(variant: str, dtype: str, bias: str) -> None:
    # Scores like 1000 / 3: an ulp of them shows. dv is then dout, to the last bit.
    problem = Problem(2, 2, 33, 9, 5, dtype, 37.3, bias, bias_scaled=bias == "matrix")
    call = converted(make(problem, (1, 1), (1, 1), shift=7), problem.torch_dtype)
    saved = native(call, variant)
    got = gradients(call, saved, variant)
    for a, b in zip(got["dv"], call.dout, strict=True):
        same_bits(a, b.to(a.dtype))


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_large_scores_beside_others(variant: str) -> None:
    # Exponents of scores like these are rounded by more than bfloat16 leaves, those of their neighbours' are not.
    problem = Problem(2, 1, 24, 16, dtype="bfloat16", scale=0.2)
    call = converted(make(problem, (70,), (90,), Band.causal()), problem.torch_dtype)
    for row in (0, 13, 40, 41, 69):
        call.q[0][:, row] *= 2000
    saved = native(call, variant)
    assert saved["max"][0].max() > 1024
    judge(call, saved, gradients(call, saved, variant), wanted(call, saved), variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_without_rows_do_not_let_others_into_memory_in_use(variant: str) -> None:
    # One sequence's rows fill the memory; a single tile of keys meets them while another thread may pack the next ones.
    problem = Problem(1, 1, 128, 128, dtype="float32", scale=0.09)
    call = converted(make(problem, (9000, 0, 9000), (100, 10, 100), Band.full()), torch.float32)
    saved = native(call)
    want = gradients(call, saved, variant, threads=1)
    for _ in range(3):
        same_bits(gradients(call, saved, variant, threads=2), want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_last_sequence_without_keys_ends_what_is_asked_for_ahead(variant: str) -> None:
    problem = Problem(12, 3, 128, 128, dtype="float32", scale=0.09)
    call = converted(make(problem, (1, 200), (33, 0), Band.full()), torch.float32)
    saved = native(call, variant)
    for threads in (1, 2):
        judge(call, saved, gradients(call, saved, variant, threads=threads), wanted(call, saved), variant)


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
def test_rows_take_the_places_of_rows_that_have_met_their_keys(dtype: str, size: int, band: Band) -> None:
    # Also rows behind the last key, which meet nothing.
    problem = Problem(2, 1, 8, 8, dtype=dtype, scale=0.3)
    call = converted(make(problem, (size, 1100, 400), (size, 300, 900), band), problem.torch_dtype)
    saved = native(call)
    want = gradients(call, saved, threads=1)
    judge(call, saved, want, wanted(call, saved), (band, dtype))
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
def test_sizes_that_disagree_are_an_error(name: str) -> None:
    problem, extents, operands, grads = small()
    plan = cpu.schedule(problem, extents, "attention_backward")
    changes, kind, message = bad_gradients()[name]
    with pytest.raises(kind, match=message):
        cpu.attention_backward(problem, extents, plan, operands, replace(grads, **changes))
    assert not grads.dq.keep[0].any()
    cpu.attention_backward(problem, extents, plan, operands, grads)


def test_long_sequences_of_several_waves() -> None:
    problem = Problem(2, 1, 128, 128, dtype="float32", scale=0.09)
    call = converted(make(problem, (9000, 40, 3000), (300, 70, 10), Band.full()), torch.float32)
    saved = native(call)
    want, got = wanted(call, saved), gradients(call, saved)
    judge(call, saved, got, want, problem)


def test_a_table_serves_more_than_one_pair() -> None:
    call = converted(make(Problem(1, 1, 4, 4, bias="table"), (1030,), (1030,), Band.causal()), torch.float32)
    with pytest.raises(ValueError, match="dbias cannot be written once"):
        gradients(call, native(call), owned=True)
