"""Golden's gradients of DeepSeek-V4's operators against central differences (torch.autograd.gradcheck), to 1e-6."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusion_attention as fa
from fusion_attention.ops.indexer_loss.lowered_call import DIFFERENTIABLE, TARGET_RESULTS
from fusion_attention.testing.target_loss import TargetCase, arguments, golden, lowered

Tensor = torch.Tensor


def drawn(*shape: int, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.requires_grad_()


def differs(function: Callable[..., Any], *leaves: Tensor) -> None:
    """Checks that gradients equal central differences to 1e-6, along random directions."""
    with fa.use_backend("golden"):
        assert torch.autograd.gradcheck(function, leaves, eps=1e-5, atol=1e-8, rtol=1e-6, fast_mode=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_golden_compress_gradients_match_central_differences(overlap: bool) -> None:
    channels = 4 if overlap else 2
    leaves = drawn(1, 7, 1, channels, seed=1), drawn(1, 7, 1, channels, seed=2), drawn(3, channels, seed=3)
    differs(lambda kv, gate, bias: fa.compress(kv, gate, ratio=3, position_bias=bias, overlap=overlap), *leaves)


@pytest.mark.parametrize("listed", [False, True])
def test_golden_compressed_attention_gradients_match_central_differences(listed: bool) -> None:
    """Includes rows without keys, repeated entries, and a residual."""
    leaves = drawn(1, 6, 2, 3, seed=1), drawn(1, 5, 1, 3, seed=2), drawn(1, 2, 1, 3, seed=3), drawn(2, seed=4)
    lists = torch.tensor([[-1, -1], [0, -1], [-1, -1], [0, 0], [0, -1], [1, 0]])[None, :, None] if listed else None
    words = {"ratio": 2, "residual": [1], "band": fa.Band.window(1), "return_lse": True}

    def attend(q: Tensor, k: Tensor, compressed: Tensor, sink: Tensor) -> Any:
        out, lse = fa.compressed_attention(q, k, compressed, lists, sink=sink, **words)
        return out, lse[:, :, 1:]  # the first row has no key

    differs(attend, *leaves)


class TargetLoss(torch.autograd.Function):
    """- sum p ln y, from golden's y in float64 (golden's loss is a float32), with golden's gradients."""

    @staticmethod
    def forward(ctx: Any, case: TargetCase, args: Any, *leaves: Tensor) -> Tensor:
        given = dict(zip(DIFFERENTIABLE, (t.detach() for t in leaves), strict=True))
        *ctx.gradients, y = golden(lowered(case, {**args, **given}, TARGET_RESULTS)).values()
        p = args["target"].double().masked_fill(y == 0, 0)  # elements that no row reads
        return -torch.special.xlogy(p, y.where(p > 0, 1)).sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        return None, None, *(upstream[0] * gradient for gradient in ctx.gradients)


@pytest.mark.parametrize("count", [0, 2])
def test_golden_target_loss_gradients_match_central_differences(count: int) -> None:
    case = TargetCase(q_len=(5, 3), kv_len=(2, 2), ratio=2, residual=(1, 0), heads=2, dim=3, count=count)
    args = arguments(case)
    leaves = [args[name].detach().double().requires_grad_() for name in DIFFERENTIABLE]
    differs(lambda *leaves: TargetLoss.apply(case, args, *leaves), *leaves)
