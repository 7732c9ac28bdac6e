"""Matrices without rows, memory that no row sees, inputs that stay as they are."""

from dataclasses import replace

import pytest
import torch
from support.bits import same_bits
from support.cases import BITS, CAUSAL, DRAWN, FLOATS, PACKED, Args, compute, operands

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.testing import Case, arguments, hostile, part, seen

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")


SAMPLES = [
    Case(mask="head", blank=True, pse="full", sink=True, dim_rope=4, **DRAWN),
    Case(layout="SBH", dtype="bfloat16", pse="shared_row", **BITS),
    Case(layout="BSH", dtype="float16", sparse_mode=4, mask="compressed", pre=3, next=1, pse="slopes_flat", pse_type=2),
    Case(layout="BNSD", mask="batch", blank=True, **BITS),
    replace(PACKED, mask="tokens", blank=True, pse="blocks", softmax_layout="TND", q_rest=2, kv_rest=1, **DRAWN),
    replace(PACKED, dtype="bfloat16", pse="shared_table", sink=True, dim_rope=3, **CAUSAL),
    replace(PACKED, q_len=(0, 3, 5), kv_len=(2, 0, 6), pse="row_blocks", **BITS),
]
samples = pytest.mark.parametrize("case", SAMPLES, ids=lambda case: case.id)


@pytest.mark.parametrize("shape", [(2, 4, 0, 16), (1, 1, 0, 16), (0, 16)])
@pytest.mark.parametrize("name", ["bias", "blocked"])
@pytest.mark.parametrize("backend", ["auto", "golden"])
def test_matrices_without_rows(shape: tuple[int, ...], name: str, backend: str) -> None:
    """Nothing lies there, with whatever strides: an empty result, and no gradient."""
    q, k = torch.randn(2, 0, 4, 8, requires_grad=True), torch.randn(2, 16, 2, 8, requires_grad=True)
    matrix = torch.zeros(*shape[:-1], 32, dtype=torch.bool if name == "blocked" else torch.float32)[..., ::2]
    out = fa.attention(q, k, k, backend=backend, **{name: matrix})
    assert out.shape == q.shape
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert dq.shape == q.shape
    assert not dk.any()
    if len(shape) == 4:
        rows = {"pse": matrix, "pse_type": 0} if name == "bias" else {"atten_mask": matrix}
        if name == "blocked" or shape[1] == 4:
            assert npu.npu_fusion_attention_v2(q, k, k, 4, "BSND", **rows)[0].shape == q.shape
        cache = (k.detach(), k.detach())
        assert (
            fa.decode_attention(q.detach(), cache, kv_len=[16, 16], backend=backend, **{name: matrix}).shape == q.shape
        )


@samples
def test_inputs_are_not_written(case: Case) -> None:
    args = arguments(case)
    tensors = [
        t for t in args.values() if (isinstance(t, torch.Tensor) and case.mask != "compressed") or t is args["query"]
    ]
    memory = [t._base if t._base is not None else t for t in tensors]
    before = [m.clone() for m in memory]
    compute(case, args)
    for now, then in zip(memory, before, strict=True):
        same_bits(now, then, "an input or the memory around it")


def fill_unseen(case: Case, args: Args, value: float) -> Args:
    """The call with a value wherever a float tensor holds what no row may see: keys, rows and biases."""
    filled = {n: hostile(t) if isinstance(t, torch.Tensor) and n in FLOATS else t for n, t in args.items()}
    for b in range(len(case.q_len)):
        visible = seen(case, args, b)
        dead = ~visible.unflatten(0, (case.heads_kv, -1)).any(1).any(1)
        for name in ("key", "value", "key_rope"):
            if args[name] is not None:
                part(case, filled[name], "kv", case.heads_kv, b)[dead] = value
        blind = ~visible.any(-1)
        for name in ("query", "query_rope", "dy"):
            if args[name] is not None:
                part(case, filled[name], "q", case.heads_q, b)[blind] = value
        if case.pse == "full":
            filled["pse"][b][~visible] = value
    return filled


@pytest.mark.parametrize(
    "case",
    [
        Case(sparse_mode=4, mask="compressed", pre=1, next=-1, q_len=(6, 6), kv_len=(9, 9), pse="full", dim_rope=2),
        Case(layout="BNSD", sparse_mode=2, mask="compressed", q_len=(4, 4), kv_len=(9, 9), sink=True, **DRAWN),
        Case(q_len=(7, 7), kv_len=(3, 3), pse="full", dtype="bfloat16", **CAUSAL),
        Case(mask="head", blank=True, inner_precise=2, pse="full", dtype="float16"),
        Case(layout="SBH", sparse_mode=0, mask="batch", pre=1, next=1, q_len=(4, 4), kv_len=(9, 9), inner_precise=2),
        replace(PACKED, sparse_mode=4, mask="compressed", pre=1, next=-1, kv_len=(8, 9, 7), **BITS),
    ],
    ids=lambda case: case.id,
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_memory_that_no_row_may_see_never_reaches_a_result(case: Case, value: float) -> None:
    args = operands(case)
    poisoned = fill_unseen(case, args, value)
    count = sum(int(poisoned[n].isnan().sum() + poisoned[n].isinf().sum()) for n in ("query", "key", "value"))
    assert count > sum(int(args[n].isnan().sum()) for n in ("query", "key", "value"))
    same_bits(compute(case, poisoned), compute(case, fill_unseen(case, args, 0.0)))
