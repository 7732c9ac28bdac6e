"""torch_npu's cross entropy, in torch's own operators; float32 inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusion_attention.npu.auxiliary.call import checked
from fusion_attention.npu.auxiliary.kept import Some, keeping
from fusion_attention.ops.auxiliary import losses

__all__ = ["npu_cross_entropy_loss", "npu_cross_entropy_loss_backward"]

Tensor = torch.Tensor


def npu_cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cross entropy of rows of scores.

    log_prob = x - log(sum(exp(x)))        of each row
    l = -(1 - s) * weight[y] * log_prob[y] - s / C * sum_c weight[c] * log_prob[c]
    loss = l,  sum(l),  or sum(l) / sum(weight[y])

    Args:
        input: [T, C]; float16, bfloat16 or float32.
        target: the class of every row, int64 [T].
        weight: float32 [C]; None: ones.
        reduction: "mean", "sum" or "none".
        ignore_index: rows of this label count for nothing. One below 0 counts here too.
        label_smoothing: s.
        lse_square_scale_for_zloss, return_zloss: computed neither on the chip nor here.

    Returns:
        (loss, log_prob, zloss, lse_for_zloss) in the dtype of input: the loss is [1], of reduction "none" [T], and
        alone is differentiable; log_prob [T, C]; the others have no elements. The mean of no row is NaN.

    Raises:
        ContractError: a call that `fusion-attention ops npu_cross_entropy_loss` does not allow.

    Source: Ascend op-plugin, npu_cross_entropy_loss.

    Example:
        >>> loss, *_ = npu_cross_entropy_loss(torch.zeros(3, 4), torch.tensor([0, 3, -100]))
        >>> round(loss.exp().item(), 4)
        4.0
    """
    given = checked(losses.CROSS_ENTROPY, {
        "input": input, "target": target, "weight": weight, "reduction": reduction, "ignore_index": ignore_index,
        "label_smoothing": label_smoothing, "lse_square_scale_for_zloss": lse_square_scale_for_zloss,
        "return_zloss": return_zloss,
    })  # fmt: skip

    def compute(x: Tensor) -> tuple[tuple[Tensor, Tensor], Some]:
        log_prob = x.float().log_softmax(-1)
        loss = _loss(log_prob, target, weight, given)
        return (loss.to(x.dtype), log_prob.detach().to(x.dtype)), (x, target, weight)

    def gradient(_: Any, dloss: Tensor, x: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor]:
        return (_gradient(dloss, x.float().softmax(-1), target, weight, given).to(x.dtype),)

    loss, log_prob = keeping(compute, gradient, input)
    nothing = input.new_empty(0)
    return loss, log_prob, nothing, nothing.clone()


def _loss(log_prob: Tensor, target: Tensor, weight: Tensor | None, given: Mapping[str, Any]) -> Tensor:
    kept, of_label, norm = _rows(target, weight, log_prob, given)
    label = target.where(kept, 0).unsqueeze(1)
    smoothing = given["label_smoothing"]
    loss = -log_prob.gather(1, label).squeeze(1) * of_label
    if smoothing:
        spread = log_prob if weight is None else log_prob * weight
        loss = (1 - smoothing) * loss - smoothing / log_prob.shape[1] * spread.sum(1)
    loss = loss.where(kept, 0.0)
    return loss if given["reduction"] == "none" else (loss.sum() / norm).reshape(1)


def npu_cross_entropy_loss_backward(
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    grad_zloss: Tensor | None = None,
    lse_for_zloss: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
) -> Tensor:
    """The gradient of npu_cross_entropy_loss.

    dx = g * ((1 - s) * weight[y] * (p - onehot(y)) + s / C * (sum(weight) * p - weight)),  p = exp(log_prob)
    g = dloss of the row,  dloss,  or dloss / sum(weight[y]);  0 of a row that is ignored

    Args:
        grad_loss: gradient of the loss.
        log_prob: what the forward returned.
        grad_zloss, lse_for_zloss, lse_square_scale_for_zloss: computed neither on the chip nor here.
        all others: of the forward.

    Returns:
        dx [T, C] as log_prob.

    Raises:
        ContractError: a call that `fusion-attention ops npu_cross_entropy_loss_backward` does not allow.

    Source: Ascend op-plugin, npu_cross_entropy_loss_backward.

    Example:
        >>> x, y = torch.randn(3, 4, requires_grad=True), torch.tensor([0, 3, 1])
        >>> loss, log_prob, *_ = npu_cross_entropy_loss(x, y)
        >>> loss.backward()
        >>> torch.allclose(npu_cross_entropy_loss_backward(torch.ones(1), log_prob, y), x.grad, atol=1e-6)
        True
    """
    given = checked(losses.CROSS_ENTROPY_BACKWARD, {
        "grad_loss": grad_loss, "log_prob": log_prob, "target": target, "weight": weight, "grad_zloss": grad_zloss,
        "lse_for_zloss": lse_for_zloss, "reduction": reduction, "ignore_index": ignore_index,
        "label_smoothing": label_smoothing, "lse_square_scale_for_zloss": lse_square_scale_for_zloss,
    })  # fmt: skip
    return _gradient(grad_loss, log_prob.float().exp(), target, weight, given).to(log_prob.dtype)


def _gradient(dloss: Tensor, p: Tensor, target: Tensor, weight: Tensor | None, given: Mapping[str, Any]) -> Tensor:
    """dx in float32; p: the probabilities."""
    kept, of_label, norm = _rows(target, weight, p, given)
    g, smoothing = (dloss.float() / norm).expand_as(target), given["label_smoothing"]
    right = total = (1 - smoothing) * g * of_label
    if smoothing:
        weights = p.new_ones(p.shape[1]) if weight is None else weight
        part = smoothing / p.shape[1] * g
        total = right + part * weights.sum()
    dx = (p * total.unsqueeze(1)).scatter_add_(1, target.where(kept, 0).unsqueeze(1), -right.unsqueeze(1))
    if smoothing:
        dx = dx - part.unsqueeze(1) * weights
    return dx.masked_fill_(~kept.unsqueeze(1), 0)


def _rows(target: Tensor, weight: Tensor | None, like: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Any]:
    """(whether each row counts, the weight of its class, what a sum over rows is divided by)."""
    kept = target != given["ignore_index"]
    of_label = like.new_ones(target.shape) if weight is None else weight[target.where(kept, 0)]
    return kept, of_label, of_label.where(kept, 0.0).sum() if given["reduction"] == "mean" else 1
