"""torch_npu's softmax of masked scores, in torch's own operators; float32 inside."""

from __future__ import annotations

from typing import Any

import torch

from fusion_attention.npu.auxiliary.call import checked
from fusion_attention.npu.auxiliary.kept import keeping
from fusion_attention.ops.auxiliary import softmax

__all__ = ["npu_scaled_masked_softmax", "npu_scaled_masked_softmax_backward"]

Tensor = torch.Tensor
_MASKED = -10000.0


def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False) -> Tensor:
    """The softmax of scaled scores, those that a mask hides at -10000.

    y = softmax(where(mask, -10000, scale * x)) over the last axis

    Args:
        x: [..., rows, keys]; float16, bfloat16 or float32.
        mask: bool; axes of size 1 are repeated. A row that it hides altogether is uniform.
        scale: factor on the scores.
        fixed_triu_mask: hide what lies above the diagonal, whatever mask says.

    Returns:
        y as x.

    Raises:
        ContractError: a call that `fusion-attention ops npu_scaled_masked_softmax` does not allow.

    Source: Ascend op-plugin, npu_scaled_masked_softmax.

    Example:
        >>> npu_scaled_masked_softmax(torch.zeros(1, 2), torch.tensor([[False, True]])).tolist()
        [[1.0, 0.0]]
    """
    args = {"x": x, "mask": mask, "scale": scale, "fixed_triu_mask": fixed_triu_mask}
    given = checked(softmax.SCALED_MASKED_SOFTMAX, args)
    factor, triangle = given["scale"], given["fixed_triu_mask"]

    def compute(x: Tensor) -> tuple[tuple[Tensor], tuple[Tensor, Tensor | None]]:
        y = (x.float() * factor).masked_fill(_hidden(x, mask, triangle), _MASKED).softmax(-1).to(x.dtype)
        return (y,), (y, None if triangle else mask)

    (y,) = keeping(compute, lambda _, dy, y, mask: (_gradient(dy, y, mask, factor, triangle),), x)
    return y


def npu_scaled_masked_softmax_backward(
    y_grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool
) -> Tensor:
    """The gradient of npu_scaled_masked_softmax.

    dx = scale * y * (dy - sum(dy * y)),  0 where masked

    Args:
        y_grad: gradient of y; as y.
        y: what the forward returned.
        mask, scale, fixed_triu_mask: of the forward.

    Returns:
        dx as y.

    Raises:
        ContractError: a call that `fusion-attention ops npu_scaled_masked_softmax_backward` does not allow.

    Source: Ascend op-plugin, npu_scaled_masked_softmax_backward.

    Example:
        >>> x, dy, mask = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3), torch.eye(3, dtype=torch.bool)
        >>> y = npu_scaled_masked_softmax(x, mask, 0.5)
        >>> y.backward(dy)
        >>> dx = npu_scaled_masked_softmax_backward(dy, y.detach(), mask, 0.5, False)
        >>> torch.allclose(dx, x.grad, atol=1e-6)
        True
    """
    args = {"y_grad": y_grad, "y": y, "mask": mask, "scale": scale, "fixed_triu_mask": fixed_triu_mask}
    checked(softmax.SCALED_MASKED_SOFTMAX_BACKWARD, args)
    return _gradient(y_grad, y, mask, scale, fixed_triu_mask)


def _gradient(dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, triangle: bool) -> Tensor:
    dy, weights = dy.float(), y.float()
    dx = scale * weights * (dy - (dy * weights).sum(-1, keepdim=True))
    return dx.masked_fill(_hidden(y, mask, triangle), 0).to(y.dtype)


def _hidden(scores: Tensor, mask: Tensor | None, triangle: bool) -> Any:
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1) if triangle else mask
