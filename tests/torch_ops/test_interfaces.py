"""Interfaces of training attention: equal calls give equal bits, torch's operators included; dropout; clear errors."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.cases import BITS, CASES, CAUSAL, DRAWN, DTYPES, FLOATS, PACKED, compute, operands
from support.compiled import Recorder
from torch.utils._pytree import tree_map_only

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.ir import dropout
from fusion_attention.ops.training import definitions as training
from fusion_attention.testing import Case, call_interface, in_band, pythonic, stats_part
from fusion_attention.testing.estimated_rounding_errors import compare_with

FLT_MAX = torch.finfo(torch.float32).max
pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")


# ------------------------------------------------------------------------------------------------- interfaces, versions

BY_PYTHON = [case for case in CASES if case.npu and pythonic(case, operands(case)) is not None]
LEAVES = {"query": "q", "key": "k", "value": "v", "query_rope": "q_rope", "key_rope": "k_rope", "sink": "sink"}


@pytest.mark.parametrize("case", BY_PYTHON, ids=lambda case: case.id)
def test_attention_equals_npu_fusion_attention_bitwise(case: Case) -> None:
    args = operands(case)
    given = pythonic(case, args)
    assert given is not None
    want = compute(case, args)
    names = {**LEAVES, **({"pse": "bias"} if "dpse" in want else {})}
    leaves = {new: args[old].detach().requires_grad_() for old, new in names.items() if args[old] is not None}
    out, lse = fa.attention(**{**given, **leaves}, return_lse=True)
    same_bits(out.detach(), want["out"], "out")
    top, total = want["max"], want["sum"]
    expected = torch.where((top == -FLT_MAX) | (total == 0), -torch.inf, top + total.log())
    if case.sink:  # the chip says 0 and 0 of sequences without keys; their lse is the sink
        sink = args["sink"][:, None, None]
        for b in np.flatnonzero(np.array(case.kv_len) == 0):
            stats_part(case, expected, int(b))[:] = sink
    for b, rows in enumerate(case.q_len):
        first = sum(case.q_len[:b])
        lse_of_item = lse[first : first + rows].mT if case.packed else lse[b, :, :rows]
        same_bits(lse_of_item, stats_part(case, expected, b)[..., 0], "lse")
    gradients = torch.autograd.grad(out, list(leaves.values()), args["dy"])
    wanted = {**{new: f"d{new}" for new in LEAVES.values()}, "bias": "dpse"}
    for name, gradient in zip(leaves, gradients, strict=True):
        same_bits(gradient, want[wanted[name]], wanted[name])


VERSIONS = {
    1: (npu.npu_fusion_attention, training.TORCH_V1, npu.npu_fusion_attention_grad, training.TORCH_GRAD_V1),
    2: (npu.npu_fusion_attention_v2, training.TORCH_V2, npu.npu_fusion_attention_grad_v2, training.TORCH_GRAD_V2),
    3: (npu.npu_fusion_attention_v3, training.TORCH_V3, npu.npu_fusion_attention_grad_v3, training.TORCH_GRAD_V3),
}


@pytest.mark.parametrize(
    "case",
    [
        Case(mask="head", blank=True, pse="full", sink=True),
        Case(layout="SBH", sparse_mode=6, mask="compressed", prefix=(2, 4), dtype="bfloat16", pse="row"),
        replace(
            PACKED, sparse_mode=4, mask="compressed", pre=2, next=1, softmax_layout="TND", sink=True, dtype="float16"
        ),
        replace(PACKED, mask="tokens", blank=True, inner_precise=2, pse="blocks"),
        Case(layout="BNSD", mask="matrix", **DRAWN),
    ],
    ids=lambda case: case.id,
)
def test_npu_fusion_attention_v1_v2_v3_are_bitwise_equal(case: Case) -> None:
    args = {**operands(case), **({} if case.sink else {"sink": None})}
    results = {}
    for version, (forward, op, backward, grad_op) in VERSIONS.items():
        # v3 takes no seed and draws one: all versions draw the same after an equal seed of torch.
        torch.manual_seed(7)
        out, top, total, _, seed, offset, *_ = call_interface(forward, op, {**args, "seed": 0, "offset": 0})
        saved = {"softmax_max": top, "softmax_sum": total, "attention_in": out, "seed": seed, "offset": offset}
        grads = call_interface(backward, grad_op, {**args, **saved})
        names = ("dq", "dk", "dv", "dpse", "dq_rope", "dk_rope", "dsink")
        named = dict(zip(names if version == 2 else (*names[:4], "dsink"), grads, strict=True))
        results[version] = {"out": out, "max": top, "sum": total, **{n: named[n] for n in (*names[:4], "dsink")}}
        if version == 3:
            assert (seed.dtype, seed.shape, offset.shape) == (torch.int64, (1,), (1,))
        assert (int(seed) > 0) is (case.dropout == "philox")
    same_bits(results[1], results[2])
    same_bits(results[3], results[2])


@pytest.mark.parametrize(
    "name", ["pse", "padding_mask", "atten_mask", "query_rope", "key_rope", "sink", "dropout_mask"]
)
@pytest.mark.parametrize("nothing", [torch.empty(0), torch.tensor(1.0)], ids=["empty", "0-dim"])
def test_empty_optional_tensor_equals_an_omitted_argument(name: str, nothing: torch.Tensor) -> None:
    args = operands(Case())
    forward, op, *_ = VERSIONS[2]
    want = call_interface(forward, op, args)
    got = forward(**{p.shown: args[p.name] for p in op.params if args.get(p.name) is not None}, **{name: nothing})
    for one, other in zip(got[:3], want[:3], strict=True):
        same_bits(one, other, name)


# ------------------------------------------------------------------------------------------------------------- dropout


def packed_bits(case: Case, seed: int, offset: int) -> torch.Tensor:
    """Returns the dropout mask that philox draws for a case, as explicit bits."""
    drawn = [
        dropout.keep_from_philox(seed, offset, case.keep_prob, b * case.heads_q, case.heads_q, slice(0, q), slice(0, k))
        for b, (q, k) in enumerate(zip(case.q_len, case.kv_len, strict=True))
    ]
    bits = np.concatenate([t.numpy().reshape(-1) for t in drawn])
    return torch.from_numpy(np.packbits(bits, bitorder="little"))


@pytest.mark.parametrize(
    "case", [Case(**DRAWN), Case(layout="SBH", dtype="bfloat16", **DRAWN), replace(PACKED, **DRAWN)], ids=lambda c: c.id
)
def test_dropout_from_a_seed_equals_explicit_drop_mask(case: Case) -> None:
    args = operands(case)
    leaves = {n: args[n].detach().requires_grad_() for n in ("query", "key", "value")}
    mask = {"drop_mask": packed_bits(case, args["seed"], args["offset"]), "seed": 0, "offset": 0}
    results = []
    for given in ({}, mask):
        out, top, total, _, seed, offset, numels = call_interface(*VERSIONS[2][:2], {**args, **leaves, **given})
        grads = torch.autograd.grad(out, list(leaves.values()), args["dy"])
        results.append({str(i): t.detach() for i, t in enumerate((out, top, total, *grads))})
        assert (seed, offset) == ((0, 0) if given else (args["seed"], args["offset"]))
        assert numels == case.heads_q * sum(q * k for q, k in zip(case.q_len, case.kv_len, strict=True))
    same_bits(*results)
    other = call_interface(*VERSIONS[2][:2], {**args, "offset": args["offset"] + 1})[0]
    assert not torch.equal(other.nan_to_num(), results[0]["0"].nan_to_num())


@pytest.mark.parametrize("version", [1, 2, 3])
def test_dropout_seed_follows_manual_seed_and_backward_reuses_seed(version: int) -> None:
    case = replace(PACKED, dropout="philox", keep_prob=0.6)
    args = {**operands(case), "seed": 0, "offset": 0}
    forward, op, backward, grad_op = VERSIONS[version]
    leaves = {n: args[n].detach().requires_grad_() for n in ("query", "key", "value")}

    def once() -> tuple[Any, ...]:
        return call_interface(forward, op, {**args, **leaves})

    torch.manual_seed(3)
    first, second = once(), once()
    torch.manual_seed(3)
    again = once()
    assert int(first[4]) == int(again[4]) != int(second[4])
    same_bits(first[0], again[0], "same seed")
    assert not torch.equal(first[0], second[0])
    out, top, total, _, seed, offset, *numels = second
    saved = {"softmax_max": top, "softmax_sum": total, "attention_in": out.detach(), "seed": seed, "offset": offset}
    saved |= {"numels": numels[0]} if numels else {}
    explicit = call_interface(backward, grad_op, {**args, **saved})
    for one, other in zip(explicit, torch.autograd.grad(out, list(leaves.values()), args["dy"]), strict=False):
        same_bits(one, other, "regenerated")


def test_attention_dropout_follows_torch_manual_seed() -> None:
    q = torch.randn(1, 9, 2, 4)
    torch.manual_seed(5)
    first, second = (fa.attention(q, q, q, keep_prob=0.5) for _ in range(2))
    torch.manual_seed(5)
    same_bits(fa.attention(q, q, q, keep_prob=0.5), first, "manual_seed")
    assert not torch.equal(first, second)
    same_bits(fa.attention(q, q, q, keep_prob=0.5, seed=4), fa.attention(q, q, q, keep_prob=0.5, seed=4), "seed")


# ------------------------------------------------------------------------------------------------ torch.library, golden

OPCHECKED = [
    Case(),
    Case(dtype="bfloat16", mask="head", pse="full", sink=True, dim_rope=2, **BITS),
    Case(q_len=(0, 0), kv_len=(4, 4)),
    replace(PACKED, q_rest=1, pse="blocks", sink=True, **DRAWN),
    replace(PACKED, dim_v=5, pse="slopes_flat", pse_type=3, softmax_layout="TND", **CAUSAL),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", OPCHECKED, ids=lambda case: case.id)
def test_registered_operators_equal_eager_and_pass_opcheck(case: Case) -> None:
    # Without unusual strides, gaps, or NaN outside of sequences.
    args = tree_map_only(torch.Tensor, lambda t: torch.nan_to_num(t).contiguous().clone(), operands(case))
    want = compute(case, args)
    names = [n for n in FLOATS[:-1] if args[n] is not None and (n != "pse" or "dpse" in want)]
    leaves = [args[n].requires_grad_() for n in names]
    with Recorder() as recorder:
        out, top, total, *_ = call_interface(*VERSIONS[2][:2], args)
        gradients = torch.autograd.grad(out, leaves, args["dy"])
    results = ["dpse" if n == "pse" else f"d{LEAVES[n]}" for n in names]
    got = {"out": out.detach(), "max": top, "sum": total, **dict(zip(results, gradients, strict=True))}
    same_bits(got, want)
    (forward, given), (backward, saved) = recorder.calls
    assert (forward.__name__, backward.__name__) == ("lowered.default", "lowered_grad.default")
    torch.library.opcheck(forward, given)
    torch.library.opcheck(backward, tree_map_only(torch.Tensor, torch.Tensor.detach, saved))


def test_attention_passes_gradcheck_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    def call(q: Any, k: Any, v: Any, q_rope: Any, k_rope: Any, bias: Any) -> torch.Tensor:
        ropes = {"q_rope": q_rope, "k_rope": k_rope, "band": fa.Band.causal(), "keep_prob": 0.7, "seed": 3}
        return fa.attention(q, k, v, bias=bias, backend="golden", **ropes)

    inputs = (draw(1, 3, 2, 2), draw(1, 4, 1, 2), draw(1, 4, 1, 3), draw(1, 3, 2, 1), draw(1, 4, 1, 1), draw(2, 3, 4))
    assert torch.autograd.gradcheck(call, inputs, fast_mode=False)


def test_gradients_are_computed_only_for_tensors_that_require_grad() -> None:
    case = Case(pse="full", sink=True, dim_rope=2)
    args = operands(case)
    want = compute(case, args)
    for name, result in (("value", "dv"), ("pse", "dpse"), ("sink", "dsink"), ("key_rope", "dk_rope")):
        leaf = args[name].detach().requires_grad_()
        out = call_interface(*VERSIONS[2][:2], {**args, name: leaf})[0]
        same_bits(torch.autograd.grad(out, leaf, args["dy"])[0], want[result], result)
    assert not call_interface(*VERSIONS[2][:2], args)[0].requires_grad


def test_unknown_back_end_raises_value_error() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"backend: expected one of auto, .*cpu.*golden, got 'gpu'"):
        fa.attention(q, q, q, backend="gpu")
    for bad in (["cpu"], {}, 5, None, torch.ones(2).numpy()):
        with pytest.raises(ValueError, match="backend: expected a name, got "):
            fa.attention(q, q, q, backend=bad)


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_float64_is_computed_only_by_the_golden_back_end(backend: str) -> None:
    q = torch.randn(1, 4, 2, 8, dtype=torch.float64)
    with pytest.raises(
        fa.BackendError, match=r"no back end computes this call\. .*cpu back end computes dtype .*float64"
    ):
        fa.attention(q, q, q, backend=backend)
    assert fa.attention(q, q, q, backend="golden").dtype == torch.float64


# -------------------------------------------------------------------------------------------- only in the Python API


@pytest.mark.parametrize("dtype", DTYPES)
def test_alibi_is_measured_from_the_lower_right_corner(dtype: str) -> None:
    q, k = (torch.randn(1, n, 2, 8).to(getattr(torch, dtype)) for n in (3, 7))
    slopes = torch.tensor([0.5, 0.25])
    got = fa.attention(q, k, k, alibi_slopes=slopes)
    distance = (torch.arange(7) - torch.arange(3)[:, None] - 4).abs()
    same = fa.attention(q, k, k, alibi_slopes=slopes, alibi_start=(4, 0))
    same_bits(got, same, "explicit start")
    bias = (-slopes[:, None, None] * distance).to(q.dtype)
    slow = [fa.attention(q, k, k, **given, backend="golden") for given in ({"alibi_slopes": slopes}, {"bias": bias})]
    same_bits(*slow, "the same as a bias")


def test_default_scale_uses_head_dim_including_rope() -> None:
    q, rope = torch.randn(1, 4, 2, 12), torch.randn(1, 4, 2, 4)
    got = fa.attention(q, q, q, q_rope=rope, k_rope=rope)
    same_bits(got, fa.attention(q, q, q, q_rope=rope, k_rope=rope, scale=0.25), "scale")


def test_empty_rows_option_returns_zeros_or_mean_of_values() -> None:
    q, v = torch.randn(1, 5, 2, 8), torch.randn(1, 3, 2, 8)
    zero, lse = fa.attention(q, v, v, band=fa.Band.causal(), return_lse=True)
    mean, other = fa.attention(q, v, v, band=fa.Band.causal(), empty_rows="mean", return_lse=True)
    assert not zero[:, :2].any()
    compare_with("mean", mean[:, :2], lambda: v.double().mean(1, keepdim=True).expand(-1, 2, -1, -1))
    same_bits(zero[:, 2:], mean[:, 2:], "the other rows")
    for value in (lse, other):
        assert (value[..., :2] == -torch.inf).all()
        assert value[..., 2:].isfinite().all()


def test_band_equals_the_corresponding_sparse_mode() -> None:
    q, k = torch.randn(2, 4, 2, 8), torch.randn(2, 6, 2, 8)
    pairs = {2: fa.Band.causal("start"), 3: fa.Band.causal(), 4: fa.Band.window(2, 1), 0: fa.Band.window(2, 1, "start")}
    for mode, band in pairs.items():
        by_mode = fa.attention(q, k, k, sparse_mode=mode, pre_tokens=2, next_tokens=1)
        same_bits(by_mode, fa.attention(q, k, k, band=band), f"mode {mode}")
        assert not in_band(Case(q_len=(4,), kv_len=(6,), sparse_mode=mode, mask="x", pre=2, next=1), 0).all()
