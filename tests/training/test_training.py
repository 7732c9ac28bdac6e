"""Training attention, forward and backward: every case on every back end against golden, golden against formulas."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.cases import CASES, CAUSAL, PACKED, operands

import fusion_attention as fa
from fusion_attention import ContractWarning
from fusion_attention.npu import npu_fusion_attention_grad_v2, npu_fusion_attention_v2
from fusion_attention.ops.training import definitions as training
from fusion_attention.testing import (
    Case,
    call_interface,
    check,
    expected,
    golden,
    hostile,
    lowered,
    plain,
    run,
)
from fusion_attention.testing.estimated_rounding_errors import compare_with

BACKENDS = ("cpu",)
FLT_MAX = torch.finfo(torch.float32).max
# Some cases are legal calls that warn (mode 5 without a legal prefix).
pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")


@cache
def truth(case: Case) -> dict[str, torch.Tensor]:
    return golden(case, operands(case))


# ------------------------------------------------------------------------------------------------------- every case

# Rows without keys: hidden by a mask or a band, and in sequences without keys.
EMPTY_ROWS = [
    *(Case(mask="matrix", blank=True, inner_precise=precise) for precise in (0, 2)),
    Case(q_len=(7, 7), kv_len=(4, 4), mask="batch", blank=True, pre=0, next=3),
    *(Case(q_len=q, kv_len=(4, 3), layout="TND", **CAUSAL) for q in ((6, 3), (4, 5))),
    Case(layout="TND", q_len=(6, 3), kv_len=(4, 4), mask="tokens", blank=True),
    Case(layout="TND", q_len=(3, 2), kv_len=(0, 0), kv_rest=2),
    Case(sink=True, mask="head", blank=True),
]


# Golden computes in float64, whatever the dtype of the tensors: one case of those that differ in it alone.
ANY_DTYPE = {replace(case, dtype="float32"): case for case in [*CASES, *EMPTY_ROWS]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ANY_DTYPE.values(), ids=lambda case: case.id)
def test_golden_and_lowering_match_independent_formulas(case: Case) -> None:
    want = plain(case, operands(case))
    assert want.keys() == truth(case).keys()
    for name, value in truth(case).items():
        size = value.masked_fill(value.abs() >= FLT_MAX, 0).abs().amax().clamp(min=1.0).item() if value.numel() else 1.0
        torch.testing.assert_close(
            value, want[name], rtol=1e-12, atol=1e-12 * size, msg=lambda m, n=name: f"{case.id}: {n}: {m}"
        )


@pytest.mark.sampled(12)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_training_attention_of_each_back_end_matches_reference(case: Case, backend: str) -> None:
    args = operands(case)
    check(case.id, run(lowered(case, args), args["dy"], backend), expected(case, args, truth(case)))


LEAVES = {"query": "dq", "key": "dk", "value": "dv", "query_rope": "dq_rope", "key_rope": "dk_rope"}
LEAVES |= {"pse": "dpse", "sink": "dsink"}
# torch_npu's gradient functions have no parameter for a drop mask.
EXPLICIT = [case for case in CASES if case.npu and case.dropout != "bits"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", EXPLICIT, ids=lambda case: case.id)
def test_explicit_gradient_function_is_bitwise_equal_to_autograd(case: Case) -> None:
    args = dict(operands(case))
    dy = args["dy"]
    want = run(lowered(case, args), dy, "cpu")
    leaves = {n: args[n].detach().requires_grad_() for n in LEAVES if args[n] is not None and LEAVES[n] in want}
    out, top, total, reserved, seed, offset, numels = call_interface(
        npu_fusion_attention_v2, training.TORCH_V2, {**args, **leaves}
    )
    for name, value in (("out", out), ("max", top), ("sum", total)):
        same_bits(value.detach(), want[name], name)
    assert reserved.numel() == 0
    assert not top.requires_grad
    assert not total.requires_grad
    saved = {"softmax_max": hostile(top), "softmax_sum": hostile(total), "attention_in": hostile(out.detach())}
    saved |= {"seed": seed, "offset": offset, "numels": numels}
    names = ("dq", "dk", "dv", "dpse", "dq_rope", "dk_rope", "dsink")
    explicit = call_interface(npu_fusion_attention_grad_v2, training.TORCH_GRAD_V2, {**args, **saved})
    explicit = dict(zip(names, explicit, strict=True))
    by_autograd = torch.autograd.grad(out, list(leaves.values()), dy)
    for leaf, gradient in zip(leaves, by_autograd, strict=True):
        same_bits(gradient, want[LEAVES[leaf]], f"autograd: {LEAVES[leaf]}")
    for name in names:
        if name in want:
            same_bits(explicit[name], want[name], f"explicit: {name}")
        elif name == "dpse" and args["pse"] is not None:
            same_bits(explicit[name], torch.zeros(args["pse"].shape), "slopes have no gradient")
        else:
            assert explicit[name].numel() == 0, name


# -------------------------------------------------------------------------------------------------- details of results


def interface(case: Case) -> tuple[dict[str, Any], tuple[Any, ...]]:
    args = operands(case)
    return args, call_interface(npu_fusion_attention_v2, training.TORCH_V2, args)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.packed and case.q_rest + case.kv_rest], ids=lambda case: case.id
)
def test_packed_rows_beyond_last_sequence_end_are_zero(case: Case) -> None:
    args = operands(case)
    got = run(lowered(case, args), args["dy"], "cpu")
    rows, keys = sum(case.q_len), sum(case.kv_len)
    for name in ("out", "max", "sum", "dq", "dq_rope", "dk", "dv", "dk_rope"):
        if name in got:
            rest = got[name][keys if name[:2] in ("dk", "dv") else rows :]
            assert len(rest) == (case.kv_rest if name[:2] in ("dk", "dv") else case.q_rest)
            assert not rest.any(), name


def test_softmax_layout_orders_packed_statistics_by_sequence_or_by_token() -> None:
    """Packed statistics are head-major per sequence, or token-major; the eight lanes are equal."""
    case = Case(layout="TND", q_len=(3, 6), kv_len=(5, 4))
    args = operands(case)
    by_item = call_interface(npu_fusion_attention_v2, training.TORCH_V2, args)[1:3]
    by_token = call_interface(npu_fusion_attention_v2, training.TORCH_V2, {**args, "softmax_layout": "TND"})[1:3]
    for one, other, name in zip(by_item, by_token, ("max", "sum"), strict=True):
        assert one.shape == other.shape == (9, 4, 8)
        assert one.is_contiguous()
        assert (one == one[..., :1]).all()
        assert (other == other[..., :1]).all()
        flat = one.reshape(-1)
        for first, rows, keys in ((0, 3, slice(0, 5)), (3, 6, slice(5, 9))):
            for n in range(4):
                for i in range(rows):
                    assert flat[(4 * first + n * rows + i) * 8] == other[first + i, n, 0]
            at = slice(first, first + rows)
            compare_with(name, other[at, :, 0], partial(statistic, args, at, keys, name))


def statistic(args: dict[str, Any], rows: slice, keys: slice, name: str) -> torch.Tensor:
    """Returns the maximum or the sum of a softmax, [rows, heads], in float64."""
    q, k = (args[of].double().transpose(0, 1)[:, tokens] for of, tokens in (("query", rows), ("key", keys)))
    scores = 0.3 * q @ k.repeat_interleave(2, 0).mT
    top = scores.amax(-1, keepdim=True)
    return (top[..., 0] if name == "max" else (scores - top).exp().sum(-1)).mT


MODE_1, OF_PREFIX = Case(sparse_mode=1, mask="batch"), "prefix: expected per sequence a prefix between"
# (case, changed arguments, text of the warning): results are those of the case.
IGNORED = [
    *((MODE_1, {"sparse_mode": 5, "prefix": prefix}, OF_PREFIX) for prefix in (None, [1, 7], [3], [2, 8])),
    (PACKED, {"sparse_mode": 3}, "without atten_mask ignores sparse_mode"),
]


@pytest.mark.parametrize(("case", "mode", "text"), IGNORED, ids=lambda value: getattr(value, "id", str(value)))
def test_sparse_mode_without_effect_warns_and_is_ignored(case: Case, mode: dict[str, Any], text: str) -> None:
    args, want = interface(case)
    with pytest.warns(ContractWarning, match=text):
        got = call_interface(npu_fusion_attention_v2, training.TORCH_V2, {**args, **mode})
    same_bits(got[:3], want[:3], "as without that mode")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_value_gradient_of_many_empty_rows_is_rounded_once(dtype: torch.dtype) -> None:
    rows, keys = 1500, 4
    q, k = torch.zeros(1, rows, 1, 8, dtype=dtype), torch.zeros(1, keys, 1, 8, dtype=dtype)
    dy = torch.rand(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    v = torch.zeros_like(k).requires_grad_()
    blocked = torch.ones(rows, keys, dtype=torch.bool)
    fa.attention(q, k, v, blocked=blocked, empty_rows="mean").backward(dy)
    assert v.grad is not None
    assert torch.equal(v.grad, (dy.double().sum(1) / keys).to(dtype)[:, None].expand_as(v))
