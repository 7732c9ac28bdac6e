"""torch_npu's gated and plain activations, in torch's own operators; float32 inside."""

from __future__ import annotations

import torch

from fusion_attention.npu.companion_call import checked
from fusion_attention.ops.companions import gates

__all__ = ["npu_swiglu", "npu_swiglu_backward"]

Tensor = torch.Tensor


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """The SiLU of one half, times the other half.

    a, b = the halves of x along dim
    y = a / (1 + exp(-a)) * b

    Args:
        self: both halves; float16, bfloat16 or float32.
        dim: the axis that is cut in the middle.

    Returns:
        y in the dtype of self, half as long along dim.

    Raises:
        ContractError: a call that the record docs/ops/npu_swiglu.md does not allow.

    Source: Ascend op-plugin, npu_swiglu.

    Example:
        >>> npu_swiglu(torch.tensor([0.0, 2.0, 1.0, 3.0])).tolist()[0]
        0.0
    """
    dim = checked(gates.SWIGLU, {"self": self, "dim": dim})["dim"]
    a, b = self.float().chunk(2, dim)
    return (torch.nn.functional.silu(a) * b).to(self.dtype)


def npu_swiglu_backward(grad_output: Tensor, self: Tensor, dim: int = -1) -> Tensor:
    """The gradient of npu_swiglu.

    s = 1 / (1 + exp(-a))
    da = dy * b * s * (1 + a * (1 - s)),  db = dy * a * s

    Args:
        grad_output: gradient of y.
        self, dim: of the forward.

    Returns:
        dx as self.

    Raises:
        ContractError: a call that the record docs/ops/npu_swiglu_backward.md does not allow.

    Source: Ascend op-plugin, npu_swiglu_backward.

    Example:
        >>> x = torch.randn(3, 8, requires_grad=True)
        >>> npu_swiglu(x).sum().backward()
        >>> torch.allclose(npu_swiglu_backward(torch.ones(3, 4), x.detach()), x.grad, atol=1e-6)
        True
    """
    dim = checked(gates.SWIGLU_BACKWARD, {"grad_output": grad_output, "self": self, "dim": dim})["dim"]
    a, b = self.float().chunk(2, dim)
    dy, s = grad_output.float(), a.sigmoid()
    return torch.cat((dy * b * s * (1 + a * (1 - s)), dy * a * s), dim).to(self.dtype)
