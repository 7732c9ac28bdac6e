"""Triton's kernels with the smallest and largest operands of each dtype, and with every keep_prob."""

from collections.abc import Iterator

import pytest
import torch
from support.extremes import CASES, FACTORS, OPERANDS, TINY, judge_kept, scaled

import fusion_attention as fa
from fusion_attention.testing import Case, check, expected, lowered, run

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Makes torch fill new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.id)
def test_triton_attention_with_tiny_and_huge_operands_matches_reference(case: Case, operand: str) -> None:
    for factor in FACTORS[::3]:
        args = scaled(case, operand, factor)
        if args is not None:
            got = run(lowered(case, args), args["dy"], "triton")
            check(f"{operand} times {factor}", got, expected(case, args))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("keep_prob", TINY)
def test_triton_attention_with_tiny_keep_prob_and_drop_mask_matches_reference(keep_prob: float) -> None:
    judge_kept("float32", keep_prob, "triton")


def test_tiny_keep_prob_with_drawn_mask_returns_zero_output_and_gradients() -> None:
    x = torch.randn(1, 20, 2, 16, requires_grad=True)
    out = fa.attention(x, x, x, keep_prob=TINY[0], seed=1, backend="triton")
    assert not out.any()
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert not gradient.any()
