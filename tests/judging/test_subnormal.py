"""Verdicts on results in the subnormal range of a dtype."""

import pytest
import torch

import fusion_attention as fa

Tensor = torch.Tensor


def verdict(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> str:
    return fa.judge("attention", {"q": q, "k": k, "v": v, "scale": 1.0}, {"out": out}, backends=False).verdict


def draw(dtype: torch.dtype, factor: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, tiny v, out computed in float32)."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 200, 2, 16, generator=generator) for _ in range(3))
    q, k, v = (q / 4).to(dtype), k.to(dtype), (v.double() * factor).to(dtype)
    weights = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()).softmax(-1)
    return q, k, v, torch.einsum("bhij,bjhd->bihd", weights, v.float()).to(dtype)


@pytest.mark.parametrize("factor", [1e-36, 1e-38, 1e-40, 1e-43])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subnormal_results_are_right(dtype: torch.dtype, factor: float) -> None:
    assert verdict(*draw(dtype, factor)) == "right"


@pytest.mark.parametrize(("factor", "verdict_expected"), [(1e-39, "right"), (1e-34, "wrong")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subnormal_results_may_be_flushed_to_zero(dtype: torch.dtype, factor: float, verdict_expected: str) -> None:
    q, k, v, out = draw(dtype, factor)
    assert verdict(q, k, v, torch.zeros_like(out)) == verdict_expected


@pytest.mark.parametrize(("score", "verdict_expected"), [(-75.0, "right"), (-60.0, "wrong")])
def test_only_negligible_softmax_weights_may_be_dropped(score: float, verdict_expected: str) -> None:
    q, v = torch.ones(1, 40, 1, 1), torch.zeros(1, 2, 1, 16)
    k = torch.tensor([0.0, score]).view(1, 2, 1, 1)
    v[0, 1] = 1e30
    out = (torch.tensor(score).double().exp() * v[:, 1:].double()).float().expand(1, 40, 1, 16)
    assert verdict(q, k, v, out) == "right"
    assert verdict(q, k, v, torch.zeros_like(out)) == verdict_expected
