"""Every variant of the native core with the smallest and largest operands of a dtype, and with every keep_prob."""

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from support.extremes import CASES, FACTORS, OPERANDS, TINY, judge_kept, scaled
from support.native_dense import VARIANTS

import fusion_attention as fa
import fusion_attention.plan as plans
from fusion_attention import npu
from fusion_attention.backends import cpu
from fusion_attention.ops import RECORDS
from fusion_attention.ops.training.statistics import from_lanes, to_lanes
from fusion_attention.testing import Case, check, expected, lowered, run
from fusion_attention.testing.run_case import attention, attention_backward

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Makes torch fill new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forces one variant of the core for all plans; clears cached plans and signatures."""
    monkeypatch.setattr(cpu, "schedule", partial(cpu.schedule, variant=request.param))
    monkeypatch.setattr(plans, "_PLANS", OrderedDict())
    for op in RECORDS.values():
        op.signatures.clear()
    yield
    for op in RECORDS.values():
        op.signatures.clear()


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.usefixtures("variant")
def test_attention_with_tiny_and_huge_operands_matches_reference(case: Case, operand: str) -> None:
    for factor in FACTORS:
        args = scaled(case, operand, factor)
        if args is not None:
            got = run(lowered(case, args), args["dy"], "cpu")
            check(f"{operand} times {factor}", got, expected(case, args))


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.usefixtures("variant")
def test_subnormal_float32_values_are_not_flushed_to_zero(rows: int) -> None:
    """The error bound would allow zeros. Every partial sum is rounded to a multiple of 2^-149."""
    keys, power = 300, 2.0**-130
    q, k, v = torch.randn(1, rows, 2, 32), torch.randn(1, keys, 2, 32), torch.randn(1, keys, 2, 32)
    normal = fa.attention(q, k, (v * power / power), backend="cpu").double() * power
    tiny = fa.attention(q, k, v * power, backend="cpu").double()
    assert tiny.any()
    assert (tiny - normal).abs().max() <= 2 * keys * 2.0**-149


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("keep_prob", TINY)
@pytest.mark.usefixtures("variant")
def test_attention_with_tiny_keep_prob_and_given_drop_mask_matches_reference(keep_prob: float, dtype: str) -> None:
    judge_kept(dtype, keep_prob, "cpu")


@pytest.mark.parametrize("keep_prob", TINY)
@pytest.mark.usefixtures("variant")
def test_tiny_keep_prob_with_drawn_mask_returns_zero_output_and_gradients(keep_prob: float) -> None:
    x = torch.randn(1, 40, 2, 16, requires_grad=True)
    for out in (
        fa.attention(x, x, x, keep_prob=keep_prob, seed=1, backend="cpu"),
        npu.npu_fusion_attention(x, x, x, 2, "BSND", keep_prob=keep_prob)[0],
    ):
        assert not out.any()
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("variant")
def test_attention_of_1_and_70_rows_with_tiny_and_huge_values_is_accurate(dtype: torch.dtype) -> None:
    """One row takes the decode path, 70 rows do not."""
    for factor in FACTORS:
        generator = torch.Generator().manual_seed(5)
        k, v, *queries = (
            torch.randn(2, n, h, 32, generator=generator) for n, h in ((300, 2), (300, 2), (1, 4), (70, 4))
        )
        for q in queries:
            given = {"q": q.to(dtype), "k": k.to(dtype), "v": (v.double() * factor).to(dtype)}
            result = fa.judge("attention", given, {"out": fa.attention(**given, backend="cpu")}, backends=False)
            assert result.verdict == "right", (q.shape, factor, str(result))


@pytest.mark.usefixtures("variant")
def test_inexact_saved_statistics_of_huge_scores_give_finite_gradients() -> None:
    """Another program's maxima may differ from the scores' maxima in the last bits."""
    args = scaled(CASES[0], "query", 1e20)
    assert args is not None
    call = lowered(CASES[0], args)
    out, *stats = attention(call, "golden")
    grads = attention_backward(
        call, args["dy"], out, from_lanes(call, *to_lanes(call, *stats)), dbias=False, backend="cpu"
    )
    assert all(g.isfinite().all() for g in grads[:3])
