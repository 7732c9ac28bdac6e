"""Gradients from statistics that do not belong to the inputs: no crash, and no access outside the operands.

Back ends run every variant, forced; interfaces are npu, aclnn and Python. Only results of poisoned rows may change.
"""

import inspect
import math

import pytest
import torch
from support.bits import same
from support.native_dense import VARIANTS, converted, gradients, native
from support.oracle import forward, make, run
from support.two_phase import Args, done

from fusion_attention import Band, attention, npu
from fusion_attention.contract import Op
from fusion_attention.contract.sampling import sample
from fusion_attention.ir.problem import Problem
from fusion_attention.ops import RECORDS

pytestmark = pytest.mark.usefixtures("runtime")

nan, inf = math.nan, math.inf
BAD = [  # (max, sum)
    *((nan, 1.0), (0.5, nan), (nan, nan), (0.5, 0.0), (0.5, -0.0), (0.5, -3.0), (0.5, inf), (0.5, -inf), (0.5, 1e-45)),
    *((inf, 1.0), (inf, inf), (1e30, 1.0), (-1e30, 1.0), (-inf, 0.0), (-inf, nan), (-inf, 2.0), (-inf, inf)),
]
DTYPES = ("float32", "float16", "bfloat16")
SEQ, HEAD, ROW = 0, 2, 60  # poisoned: rows from here on

# ------------------------------------------------------------------------------------------------------- the back ends


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bias", ["none", "matrix"])
@pytest.mark.parametrize("empty", [False, True], ids=["sums", "means"])
def test_wrong_statistics_change_only_gradients_of_their_rows_and_visible_keys(
    empty: bool, bias: str, variant: str, dtype: str
) -> None:
    more = {"dim_rope": 3, "has_sink": True, "dropout": "philox", "keep_prob": 0.8} if bias == "none" else {}
    problem = Problem(4, 2, 24, 17, dtype=dtype, scale=0.2, bias=bias, **more)
    converted_call = converted(make(problem, (130, 40), (150, 40), Band.causal("start")), problem.torch_dtype)
    saved = native(converted_call, variant)
    poisoned = {name: [t.clone() for t in tensors] for name, tensors in saved.items()}
    pairs = [pair for pair in BAD if (pair[0] == -inf) == empty]
    for row, pair in enumerate(pairs, ROW):
        poisoned["max"][SEQ][HEAD, row], poisoned["sum"][SEQ][HEAD, row] = pair
    want, got = gradients(converted_call, saved, variant), gradients(converted_call, poisoned, variant)
    rows, heads = torch.ones(4, 130, dtype=torch.bool), torch.arange(4) != HEAD
    rows[HEAD, ROW : ROW + len(pairs)] = False
    reached = 150 if empty else ROW + len(pairs)  # a row in mean form has all keys
    for name, tensors in got.items():
        for b, (a, w) in enumerate(zip(tensors, want[name], strict=True)):
            if name == "dsink":
                assert same(a[heads], w[heads])
            elif b != SEQ:
                assert same(a, w), name
            elif name in ("dq", "dq_rope", "dbias"):
                assert same(a[rows], w[rows]), name
                assert not any(torch.equal(x, y) for x, y in zip(a[~rows], w[~rows], strict=True)), name
            else:
                assert same(a[0], w[0]), name  # the other key head
                assert same(a[1, reached:], w[1, reached:]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_empty_rows_with_any_statistics_give_zero_dq_and_dk(variant: str) -> None:
    problem = Problem(2, 1, 8, 8, dtype="float32", dropout="philox", keep_prob=0.5, empty_rows="mean")
    converted_call = converted(make(problem, (9, 3), (5, 7), Band.window(-20, 0)), torch.float32)  # no row sees a key
    saved = native(converted_call, variant)
    for peak, total in BAD:
        poisoned = saved | {"max": [torch.full_like(t, peak) for t in saved["max"]]}
        poisoned["sum"] = [torch.full_like(t, total) for t in saved["sum"]]
        got = gradients(converted_call, poisoned, variant)
        assert all(not t.any() for name in ("dq", "dk") for t in got[name])
        assert all(t.any() == (peak == -inf and 0 < total < inf) for t in got["dv"]), (peak, total)


@pytest.mark.parametrize(("peak", "total"), BAD)
def test_golden_backward_with_wrong_statistics_keeps_other_rows_finite(peak: float, total: float) -> None:
    converted_call = make(Problem(2, 1, 8, 8), (9,), (5,), Band.causal())
    saved = {name: [t.clone() for t in tensors] for name, tensors in forward(converted_call).items()}
    saved["max"][0][1, 3], saved["sum"][0][1, 3] = peak, total
    dq = run(converted_call, saved)["dq"][0]
    assert dq[0].isfinite().all()
    assert dq[1, :3].isfinite().all()


# ------------------------------------------------------------------------------------------------------- the interfaces

GRADIENTS = [RECORDS[f"aclnn{name}"] for name in ("FlashAttentionScoreGrad", "FlashAttentionUnpaddingScoreGradV5")]


def of_npu(args: Args) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of the same call by npu_fusion_attention_grad_v2."""
    names = inspect.signature(npu.npu_fusion_attention_grad_v2).parameters
    given = {name: value for name, value in args.items() if name in names and value is not None}
    return npu.npu_fusion_attention_grad_v2(**given)


@pytest.mark.parametrize("op", GRADIENTS, ids=lambda op: op.name)
def test_aclnn_and_torch_npu_gradients_agree_for_any_statistics(op: Op) -> None:
    args = sample(op, S1=9, S2=9)
    for peak, total in BAD:
        poisoned = args | {n: torch.full_like(args[n], x) for n, x in (("softmax_max", peak), ("softmax_sum", total))}
        got = done(op, poisoned)
        for name, theirs in zip(("dq", "dk", "dv"), of_npu(poisoned), strict=False):
            assert same(got[name], theirs), (name, peak, total)


def test_attention_backward_ignores_overwritten_lse_and_refuses_overwritten_out() -> None:
    q, k, v = (torch.randn(2, 9, 2, 16, requires_grad=True) for _ in range(3))
    out, lse = attention(q, k, v, return_lse=True)
    want = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    lse.fill_(nan)
    got = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    with torch.no_grad():
        out.fill_(nan)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
