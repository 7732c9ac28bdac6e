"""torch_npu's cross entropy, computed by torch's operators in float32."""

from typing import Any, NamedTuple

import torch

from fusion_attention.npu.auxiliary.call import computed
from fusion_attention.npu.auxiliary.saved import Some, keeping
from fusion_attention.ops.auxiliary_definitions import losses

Tensor = torch.Tensor


class _How(NamedTuple):
    """The attributes of a call: reduction ("none", "mean", "sum"), class of ignored rows, and label smoothing."""

    reduction: str
    ignored: int
    smoothing: float


@computed(losses.CROSS_ENTROPY)
def npu_cross_entropy_loss(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    how = _How(reduction, ignore_index, label_smoothing)

    def compute(x: Tensor) -> tuple[tuple[Tensor, Tensor], Some]:
        log_prob = x.float().log_softmax(-1)
        loss = _loss(log_prob, target, weight, how)
        return (loss.to(x.dtype), log_prob.detach().to(x.dtype)), (x, target, weight)

    def gradient(_: Any, dloss: Tensor, x: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor]:
        return (_gradient(dloss, x.float().softmax(-1), target, weight, how).to(x.dtype),)

    loss, log_prob = keeping(compute, gradient, input)
    nothing = input.new_empty(0)
    return loss, log_prob, nothing, nothing.clone()


def _loss(log_prob: Tensor, target: Tensor, weight: Tensor | None, how: _How) -> Tensor:
    """Returns the cross entropy of target [rows] under log_prob [rows, classes]: [rows] for reduction "none", else [1].
    weight: factor of each class, or None. how: reduction, ignored class and label smoothing."""
    counted, of_label, norm = _rows(target, weight, log_prob, how)
    label = target.where(counted, 0).unsqueeze(1)
    smoothing = how.smoothing
    loss = -log_prob.gather(1, label).squeeze(1) * of_label
    if smoothing:
        spread = log_prob if weight is None else log_prob * weight
        loss = (1 - smoothing) * loss - smoothing / log_prob.shape[1] * spread.sum(1)
    loss = loss.where(counted, 0.0)
    return loss if how.reduction == "none" else (loss.sum() / norm).reshape(1)


@computed(losses.CROSS_ENTROPY_BACKWARD)
def npu_cross_entropy_loss_backward(
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    how = _How(reduction, ignore_index, label_smoothing)
    return _gradient(grad_loss, log_prob.float().exp(), target, weight, how).to(log_prob.dtype)


def _gradient(dloss: Tensor, p: Tensor, target: Tensor, weight: Tensor | None, how: _How) -> Tensor:
    """Returns the gradient of the logits, float32 [rows, classes], from the loss's, dloss; p: softmax(logits).

    target: class of each row. weight: factor of each class, or None. how: reduction, ignored class, label smoothing.
    """
    counted, of_label, norm = _rows(target, weight, p, how)
    g, smoothing = (dloss.float().flatten() / norm).expand_as(target), how.smoothing
    right = total = (1 - smoothing) * g * of_label
    if smoothing:
        weights = p.new_ones(p.shape[1]) if weight is None else weight
        smoothed = smoothing / p.shape[1] * g
        total = right + smoothed * weights.sum()
    dx = (p * total.unsqueeze(1)).scatter_add_(1, target.where(counted, 0).unsqueeze(1), -right.unsqueeze(1))
    if smoothing:
        dx = dx - smoothed.unsqueeze(1) * weights
    return dx.masked_fill_(~counted.unsqueeze(1), 0)


def _rows(target: Tensor, weight: Tensor | None, like: Tensor, how: _How) -> tuple[Tensor, Tensor, Any]:
    """Returns (bool [rows], true for rows that are not ignored; weight of each row's class; divisor of the loss: the
    sum of these weights for "mean", else 1). target: class of each row. weight: factor of each class, or None. like: a
    tensor of the weights' dtype and device. how: reduction, ignored class and label smoothing."""
    counted = target != how.ignored
    of_label = like.new_ones(target.shape) if weight is None else weight[target.where(counted, 0)]
    return counted, of_label, of_label.where(counted, 0.0).sum() if how.reduction == "mean" else 1
