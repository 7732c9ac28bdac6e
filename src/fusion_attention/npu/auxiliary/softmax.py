"""torch_npu's softmax of masked scores, computed by torch's operators in float32."""

from typing import Any

import torch

from fusion_attention.npu.auxiliary.call import computed
from fusion_attention.npu.auxiliary.saved import keeping
from fusion_attention.ops.auxiliary_definitions import softmax

Tensor = torch.Tensor
_MASKED = -10000.0


@computed(softmax.SCALED_MASKED_SOFTMAX)
def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool) -> Tensor:
    def compute(x: Tensor) -> tuple[tuple[Tensor], tuple[Tensor, Tensor | None]]:
        y = (x.float() * scale).masked_fill(_hidden(x, mask, fixed_triu_mask), _MASKED).softmax(-1).to(x.dtype)
        return (y,), (y, None if fixed_triu_mask else mask)

    (y,) = keeping(compute, lambda _, dy, y, mask: (_gradient(dy, y, mask, scale, fixed_triu_mask),), x)
    return y


def _gradient(y_grad: Tensor, y: Tensor, mask: Tensor | None, scale: float, fixed_triu_mask: bool) -> Tensor:
    """Returns the gradient of scores, in y's dtype, from y_grad, that of y = softmax(scale * scores); it is 0 for
    scores that are hidden by the bool mask, or, with fixed_triu_mask, above the diagonal."""
    dy, weights = y_grad.float(), y.float()
    dx = scale * weights * (dy - (dy * weights).sum(-1, keepdim=True))
    return dx.masked_fill(_hidden(y, mask, fixed_triu_mask), 0).to(y.dtype)


npu_scaled_masked_softmax_backward = computed(softmax.SCALED_MASKED_SOFTMAX_BACKWARD)(_gradient)


def _hidden(scores: Tensor, mask: Tensor | None, triangle: bool) -> Any:
    """Returns the bool mask of hidden scores [..., rows, keys]: the upper triangle if `triangle` is true, or `mask`."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1) if triangle else mask
