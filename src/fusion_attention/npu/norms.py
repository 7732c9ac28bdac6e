"""torch_npu's root-mean-square norms, in torch's own operators; float32 inside."""

from __future__ import annotations

import torch

from fusion_attention.npu.companion_call import checked
from fusion_attention.ops.companions import norms

__all__ = ["npu_rms_norm", "npu_rms_norm_backward"]

Tensor = torch.Tensor


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """Divides rows by their root mean square, and weighs their elements.

    rstd = 1 / sqrt(mean(x^2) + epsilon),  y = x * rstd * gamma

    Args:
        self: float16, bfloat16 or float32.
        gamma: in the shape of self's last axes, which are normalised together; in any of these dtypes.
        epsilon: added to the mean square.

    Returns:
        (y, rstd): y as self; rstd in float32, the normalised axes of size 1. y alone has a derivative.

    Raises:
        ContractError: a call that the record docs/ops/npu_rms_norm.md does not allow.

    Source: Ascend op-plugin, npu_rms_norm.

    Example:
        >>> y, rstd = npu_rms_norm(torch.full((2, 4), 3.0), torch.ones(4))
        >>> list(y.shape), list(rstd.shape), round(rstd[0].item(), 3)
        ([2, 4], [2, 1], 0.333)
    """
    given = checked(norms.RMS_NORM, {"self": self, "gamma": gamma, "epsilon": epsilon})
    x = self.float()
    rstd = _rstd(x, gamma, given["epsilon"])
    return (x * rstd * gamma).to(self.dtype), rstd.detach()


def npu_rms_norm_backward(dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of npu_rms_norm.

    xhat = x * rstd
    dx = rstd * (dy * gamma - xhat * mean(dy * gamma * xhat)),  dgamma = sum(dy * xhat)

    Args:
        dy: gradient of y; as self.
        self, gamma: of the forward.
        rstd: what the forward returned.

    Returns:
        (dx, dgamma): dx as self; dgamma in float32.

    Raises:
        ContractError: a call that the record docs/ops/npu_rms_norm_backward.md does not allow.

    Source: Ascend op-plugin, npu_rms_norm_backward.

    Example:
        >>> x, gamma = torch.randn(2, 4, requires_grad=True), torch.ones(4)
        >>> y, rstd = npu_rms_norm(x, gamma)
        >>> y.sum().backward()
        >>> torch.allclose(npu_rms_norm_backward(torch.ones(2, 4), x.detach(), gamma, rstd)[0], x.grad, atol=1e-6)
        True
    """
    checked(norms.RMS_NORM_BACKWARD, {"dy": dy, "self": self, "gamma": gamma, "rstd": rstd})
    axes = tuple(range(-gamma.dim(), 0))
    rows = tuple(range(self.dim() - gamma.dim()))
    scale, upstream = rstd.float(), dy.float()
    xhat, weighed = self.float() * scale, upstream * gamma
    dx = scale * (weighed - xhat * (weighed * xhat).mean(axes, keepdim=True))
    dgamma = (upstream * xhat).sum(rows) if rows else upstream * xhat
    return dx.to(self.dtype), dgamma


def _rstd(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """1 / rms over gamma's axes, in float32."""
    return (x * x).mean(tuple(range(-gamma.dim(), 0)), keepdim=True).add(epsilon).rsqrt()
