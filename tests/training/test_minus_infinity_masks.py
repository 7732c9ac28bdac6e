"""A key with a score of -inf is hidden: it reaches no result and no gradient, even if it holds NaN or infinity.

Golden is compared with autograd of finite numbers; the CPU core with golden, and bit by bit with zeros in place of
hidden values; interfaces give equal bits.
"""

import copy
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import native_decode
from support.bits import same_bits, same_where_not_finite
from support.cases import BITS, CAUSAL, DRAWN, compute
from support.native_dense import VARIANTS, converted, draw_call, gradients, judge, native, wanted
from support.oracle import Call, Results, forward, make, run, seen_by, witness

import fusion_attention as fa
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Problem
from fusion_attention.testing import Case, arguments, check, expected, golden, part, pythonic

# The reference accumulates into a broadcast bias, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Use of index_put_")
INF, NAN = math.inf, math.nan
FILLS = (NAN, INF, -INF)
DTYPES = ("float32", "float16", "bfloat16")
Tensor = torch.Tensor


# -------------------------------------------------------------------------------------------------------------- golden


def agree(got: Results, want: Results) -> None:
    for name, tensors in want.items():
        for b, (g, w) in enumerate(zip(got[name], tensors, strict=True)):
            at = f"{name}, sequence {b}"
            torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11, equal_nan=True, msg=lambda m, at=at: f"{at}: {m}")


SPECIFIED: dict[str, tuple[dict[str, Any], str, Band | None]] = {
    "plain": ({}, "hij", None),
    "a row for all": ({"bias_scaled": True, "has_blocked": True}, "j", Band.window(3, 2)),
    "dropout, a sink": ({"dropout": "bits", "keep_prob": 0.75, "has_sink": True}, "ij", Band.causal()),
    "means": ({"dropout": "bits", "keep_prob": 0.75, "empty_rows": "mean"}, "hij", None),
}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", SPECIFIED)
def test_golden_ignores_keys_with_scores_of_minus_infinity(name: str, fill: float) -> None:
    """The autograd reference gets finite numbers, and a mask of the pairs with scores of -inf."""
    fields, axes, band = SPECIFIED[name]
    problem = Problem(4, 2, 3, 2, dtype="float64", scale=0.7, bias="matrix", **fields)
    wild = make(problem, (5, 3), (7, 4), band, axes)
    for q, k, bias in zip(wild.q, wild.k, wild.bias, strict=True):
        bias[..., 1] = bias[:, -1:, 2] = -INF  # a key that no row sees, one that the last does not
        q[..., 0], k[..., 1] = q[..., 0].abs() + 0.1, k[..., 1].abs() + 0.1
    tame = copy.deepcopy(wild)
    tame.problem = replace(problem, has_blocked=True)
    tame.blocked = [~seen_by(wild, b) for b in range(2)]
    for q, k, v, blocked in zip(wild.q, wild.k, wild.v, tame.blocked, strict=True):
        k[1, 3, 0], blocked[2:, :, 3] = -INF, True  # scores of -inf from an element of K
        q[:, 0, 1], blocked[:, 0] = -INF, True  # and from one of q
        if problem.empty_rows == "zero":  # means read all values
            v[:, 1] = fill
    agree(run(wild), witness(tame))


# --------------------------------------------------------------------------------------------------------- the CPU core

# More rows than the decode path takes: bits of decode depend on values that are not finite.
SIZES = {"small": ((9, 20), (5, 33)), "odd": ((61, 0, 17), (77, 4, 9)), "tiles": ((250, 40), (530, 300))}
BANDS = {"small": Band.full(), "odd": Band.window(30, 9), "tiles": Band.causal("end")}
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocked, rope": {"has_blocked": True, "dim_rope": 7, "bias_scaled": True},
    "dropout, a sink": {"dropout": "philox", "keep_prob": 0.7, "has_sink": True},
}


def change_hidden(tame: Call) -> Call:
    """Returns the call with NaN and infinity in the keys that its float mask hides from all rows.

    For every fourth such key the mask is finite: an infinite element of K alone makes the scores -inf.
    """
    wild = copy.deepcopy(tame)
    for b, bias in enumerate(tame.bias):
        hidden = (bias == -INF).flatten(0, 1).all(0).nonzero().flatten().tolist()
        for n, j in enumerate(hidden):
            wild.v[b][:, j, n % wild.v[b].shape[2] :] = FILLS[n % 3]
            if n % 2:
                wild.k[b][:, j, 0] = -INF
            if n % 4 == 1:
                wild.bias[b][..., j] = 0.25
    return wild


def masked(size: str, fields: dict[str, Any], dtype: str, axes: str) -> Call:
    """Returns a call with a float mask that hides keys from all, some or one row; q begins with positives."""
    problem = Problem(4, 2, 40, 24, dtype=dtype, scale=0.2, bias="matrix", **fields)
    call = converted(make(problem, *SIZES[size], BANDS[size], axes), problem.torch_dtype)
    for q, k, v, bias in zip(call.q, call.k, call.v, call.bias, strict=True):
        hidden = [j for j in range(v.shape[1]) if j // 16 % 3 == 1 or j % 7 == 3 or j == v.shape[1] - 1]
        bias[..., hidden] = -INF
        if "i" in axes:
            bias[:, : q.shape[1] // 2, ::5] = bias[:, 1:2] = -INF
        v[:, hidden], k[:, hidden, 0] = 0, 0
        q[..., 0] = q[..., 0].abs() + 0.5
    return call


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("size", SIZES)
def test_nan_and_infinity_hidden_by_float_mask_give_same_bits_as_zeros(size: str, fields: str, dtype: str) -> None:
    tame = masked(size, FIELDS[fields], dtype, "j" if size == "odd" else "hij")
    wild = change_hidden(tame)
    for variant in VARIANTS:
        want, got = native(tame, variant), native(wild, variant)
        same_bits(got, want)
        assert any(t.any() for t in got["out"])
        for owned in (False, True)[: 1 if size == "odd" else 2]:
            results = [gradients(*saved, variant, owned=owned) for saved in ((wild, got), (tame, want))]
            for each in results:
                # 0 times a hidden value gives a zero of either sign; adding 0.0 makes it positive.
                each["dbias"] = [tensor + 0.0 for tensor in each["dbias"]]
            same_bits(*results)


def biased(seed: int) -> Call:
    """Returns a random call with a float mask and some elements of V, K and q, dout or bias not finite."""
    rng = random.Random(seed)
    call = draw_call(next(n for n in range(seed, seed + 999, 37) if draw_call(n).bias))
    for bias in call.bias:
        bias[torch.rand(bias.shape) < 0.3] = -INF
        bias[..., rng.sample(range(bias.shape[2]), bias.shape[2] // 3)] = -INF
    for name in ("v", "v", "v", "k", rng.choice(["q", "dout", "bias"])):
        for tensor in getattr(call, name):
            for _ in range(2 if tensor.numel() else 0):
                tensor[tuple(rng.randrange(n) for n in tensor.shape)] = rng.choice(FILLS)
    return call


@pytest.mark.parametrize("seed", range(3000, 3030))
def test_nan_visible_through_float_mask_reaches_exactly_reference_results(seed: int) -> None:
    call = biased(seed)
    saved, want = native(call), forward(call)
    descent = wanted(call, saved)
    for variant in VARIANTS:
        same_where_not_finite(native(call, variant), want, f"{variant} {call.problem}")
        for name, tensors in gradients(call, saved, variant).items():
            for mine, other in zip(tensors, descent[name], strict=True):
                assert torch.equal(mine.isfinite(), other.isfinite()), (variant, name, call.problem)


# --------------------------------------------------------------------------------------------------------------- decode

CACHES = {
    "rows": {"dtype": "float32"},
    "pages": {"dtype": "bfloat16", "page_size": 16, "has_sink": True},
    "pages of float16": {"dtype": "float16", "page_size": 128, "bias_scaled": True},
    "int8": {"dtype": "bfloat16", "page_size": 64, "kv_dtype": "int8", "dequant_k": "channel", "dequant_v": "token"},
    "int4": {"dtype": "float16", "page_size": 16, "kv_dtype": "int4", "dequant_k": "token", "dequant_v": "token"},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("heads", [(8, 2), (20, 10)], ids=str)
def test_decode_ignores_keys_hidden_by_float_mask(name: str, heads: tuple[int, int]) -> None:
    problem = Problem(*heads, 64, 32, scale=0.1, bias="matrix", **CACHES[name])
    tame = native_decode.plain_case(problem, (1, 3, 2), (2100, 77, 1024))
    for bias in tame.call.bias:
        bias[..., ::3] = bias[..., -4:] = bias[:, -1:, 5:9] = -INF
    tame = replace(tame, call=replace(tame.call, q=[t.abs() for t in tame.call.q]))
    wild = copy.deepcopy(tame)
    for b, bias in enumerate(wild.call.bias):
        for n, j in enumerate((bias == -INF).flatten(0, 1).all(0).nonzero().flatten().tolist()):
            if problem.kv_dtype:
                wild.v.scale[b][:, j] = FILLS[n % 3]
                continue
            wild.v.numbers[b][:, j, n % 32] = FILLS[n % 3]
            if n % 4 == 1:
                wild.k.numbers[b][:, j], bias[..., j] = -INF, 0.25
    wild.call.k[:], wild.call.v[:] = wild.k.meaning(), wild.v.meaning()
    want = forward(wild.call)
    agree(want, forward(tame.call))
    for variant in VARIANTS:
        got = native_decode.native(wild, variant)
        judge(tame.remade, got, want, (variant, name))


# ------------------------------------------------------------------------------------------------------- the interfaces

INTERFACES = [
    Case(q_len=(2, 2), kv_len=(37, 37), pse="full", dtype="bfloat16", inner_precise=2),
    Case(q_len=(20, 20), kv_len=(37, 37), pse="full", pse_type=0),
    Case("BNSD", "bfloat16", (6, 6), (40, 40), pse="row", pse_type=1),
    Case("BSH", "float16", (20, 20), (20, 20), pse="shared_full", **CAUSAL),
    Case("SBH", q_len=(5, 5), kv_len=(7, 7), pse="shared_row", pse_type=0, **BITS),
    Case("TND", "bfloat16", (3, 20), (5, 33), pse="blocks", pse_type=0, sink=True, dim_rope=3, **DRAWN),
    Case("TND", q_len=(3, 20), kv_len=(5, 33), pse="row_blocks", mask="matrix", blank=True, inner_precise=2),
]


def hidden_values(case: Case, fill: float) -> dict[str, Any]:
    """Returns a case's arguments; the last two keys of each sequence, hidden by pse, have values of `fill`."""
    args, first = arguments(case), 0
    for b, keys in enumerate(case.kv_len):
        part(case, args["value"], "kv", case.heads_kv, b)[:, -2:] = fill
        if case.pse.endswith("blocks"):
            size = case.heads_q * (case.q_len[b] if case.pse == "blocks" else 1) * keys
            args["pse"][first : first + size].view(-1, keys)[:, -2:] = -INF
            first += size
        else:
            args["pse"][..., -2:] = -INF
    return args


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("case", INTERFACES, ids=lambda case: case.id)
def test_every_interface_ignores_nan_and_infinity_in_values_hidden_by_pse(case: Case, fill: float) -> None:
    wild = hidden_values(case, fill)
    got, want = compute(case, wild), golden(case, wild)
    assert all(t.isfinite().all() for t in want.values())
    check(case.id, got, expected(case, hidden_values(case, 0.0), want))
    given = pythonic(case, wild)
    if given is not None:
        leaves = {name: given[name].detach().requires_grad_() for name in ("q", "k", "v", "bias")}
        out = fa.attention(**{**given, **leaves})
        results = [out.detach(), *torch.autograd.grad(out, list(leaves.values()), wild["dy"])]
        for name, tensor in zip(("out", "dq", "dk", "dv", "dpse"), results, strict=True):
            torch.testing.assert_close(tensor, got[name], rtol=0, atol=0)
