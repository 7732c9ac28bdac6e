"""npu_cross_entropy_loss and its gradient are compared with torch's cross entropy in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.bits import same_bits

from fusion_attention import npu
from fusion_attention.contract import ContractError
from fusion_attention.testing.estimated_rounding_errors import compare_with

X = torch.randn(6, 7, generator=torch.Generator().manual_seed(5))
Y = torch.tensor([0, 3, -100, 6, 2, 2])
WEIGHT = torch.linspace(0.1, 1, 7)


@pytest.mark.parametrize(
    ("reduction", "smoothing", "weight", "ignored"),
    list(itertools.product(("mean", "sum", "none"), (0.0, 0.25), (None, WEIGHT), (-100, 2))),
)
def test_cross_entropy_loss_and_gradient_match_torch(
    reduction: str, smoothing: float, weight: torch.Tensor | None, ignored: int
) -> None:
    def golden(x: torch.Tensor) -> torch.Tensor:
        w = None if weight is None else weight.to(x.dtype)
        return F.cross_entropy(x, y, w, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)

    y = Y.where(Y != -100, ignored)
    x = X.clone().requires_grad_()
    loss, log_prob, zloss, lse = npu.npu_cross_entropy_loss(x, y, weight, reduction, ignored, smoothing)
    assert loss.shape == ((6,) if reduction == "none" else (1,))
    assert (zloss.numel(), lse.numel(), log_prob.requires_grad) == (0, 0, False)
    dy = torch.linspace(1, 2, loss.numel()).reshape(loss.shape)
    (dx,) = torch.autograd.grad(loss, x, dy)
    again = npu.npu_cross_entropy_loss_backward(dy, log_prob, y, weight, None, None, reduction, ignored, smoothing)

    def program() -> list[torch.Tensor]:
        x64 = X.double().requires_grad_()
        want = golden(x64).reshape(loss.shape)
        (dwide,) = torch.autograd.grad(want, x64, dy.double())
        return [want, x64.log_softmax(1), dwide, dwide]

    compare_with("[loss, log_prob, gradient, backward]", [loss, log_prob, dx, again], program)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_grad_loss_of_one_element_may_have_any_rank(reduction: str) -> None:
    def gradient(*shape: int) -> torch.Tensor:
        dloss, log_prob = torch.ones(shape), X.log_softmax(1)
        return npu.npu_cross_entropy_loss_backward(dloss, log_prob, Y, WEIGHT, reduction=reduction)

    for shape in ((), (1, 1), (1, 1, 1)):
        same_bits(gradient(*shape), gradient(1))


def test_bfloat16_loss_and_log_prob_are_rounded_once() -> None:
    x = X.bfloat16()
    loss, log_prob, *_ = npu.npu_cross_entropy_loss(x, Y)
    same_bits(loss, F.cross_entropy(x.float(), Y).bfloat16().reshape(1))
    same_bits(log_prob, x.float().log_softmax(1).bfloat16())


def test_all_labels_ignored_has_nan_mean_zero_sum_and_zero_gradient() -> None:
    x, nothing = X.clone().requires_grad_(), torch.full((6,), -100)
    assert npu.npu_cross_entropy_loss(x, nothing)[0].isnan().all()
    total = npu.npu_cross_entropy_loss(x, nothing, reduction="sum")[0]
    total.sum().backward()
    assert total.item() == 0
    assert x.grad is not None
    assert not x.grad.any()
    empty = npu.npu_cross_entropy_loss(X[:0], nothing[:0], reduction="none")
    assert [t.shape for t in empty[:2]] == [(0,), (0, 7)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"target": Y.where(Y != 6, 7)},
            r"target: expected labels below the number of columns of input, got 7, outside \[0, 7\)",
        ),
        ({"target": Y.int()}, "target: expected int64"),
        ({"input": X.double()}, "input: expected float16 or bfloat16 or float32, got float64"),
        ({"weight": WEIGHT[:3]}, "weight: expected"),
        ({"return_zloss": True}, "return_zloss: expected not return_zloss"),
        ({"label_smoothing": 1.0}, "label_smoothing: expected 0 <= label_smoothing < 1"),
    ],
)
def test_cross_entropy_invalid_argument_error_names_parameter(change: dict[str, object], text: str) -> None:
    with pytest.raises(ContractError, match=text):
        npu.npu_cross_entropy_loss(**{"input": X, "target": Y, **change})
