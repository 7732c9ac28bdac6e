"""torch_npu's root-mean-square norms, in torch's own operators; float32 inside."""

from __future__ import annotations

from typing import Any

import torch

from fusion_attention.npu.auxiliary.call import checked
from fusion_attention.npu.auxiliary.kept import Some, keeping
from fusion_attention.ops.auxiliary import norms

__all__ = ["npu_add_rms_norm", "npu_gemma_rms_norm", "npu_rms_norm", "npu_rms_norm_backward"]

Tensor = torch.Tensor


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """Divides rows by their root mean square, and weighs their elements.

    rstd = 1 / sqrt(mean(x^2) + epsilon),  y = x * rstd * gamma

    Args:
        input: float16, bfloat16 or float32.
        gamma: in the shape of input's last axes, which are normalised together; in any of these dtypes.
        epsilon: added to the mean square.

    Returns:
        (y, rstd): y as input; rstd in float32, the normalised axes of size 1. y alone has a derivative.

    Raises:
        ContractError: a call that `fusion-attention ops npu_rms_norm` does not allow.

    Source: Ascend op-plugin, npu_rms_norm.

    Example:
        >>> y, rstd = npu_rms_norm(torch.full((2, 4), 3.0), torch.ones(4))
        >>> list(y.shape), list(rstd.shape), round(rstd[0].item(), 3)
        ([2, 4], [2, 1], 0.333)
    """
    given = checked(norms.RMS_NORM, {"input": input, "gamma": gamma, "epsilon": epsilon})
    return normalised(input, gamma, given["epsilon"])


def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of npu_rms_norm.

    xhat = x * rstd
    dx = rstd * (dy * gamma - xhat * mean(dy * gamma * xhat)),  dgamma = sum(dy * xhat)

    Args:
        dy: gradient of y; as input.
        input, gamma: of the forward.
        rstd: what the forward returned.

    Returns:
        (dx, dgamma): dx as input; dgamma in float32.

    Raises:
        ContractError: a call that `fusion-attention ops npu_rms_norm_backward` does not allow.

    Source: Ascend op-plugin, npu_rms_norm_backward.

    Example:
        >>> x, gamma = torch.randn(2, 4, requires_grad=True), torch.ones(4)
        >>> y, rstd = npu_rms_norm(x, gamma)
        >>> y.sum().backward()
        >>> torch.allclose(npu_rms_norm_backward(torch.ones(2, 4), x.detach(), gamma, rstd)[0], x.grad, atol=1e-6)
        True
    """
    checked(norms.RMS_NORM_BACKWARD, {"dy": dy, "input": input, "gamma": gamma, "rstd": rstd})
    return _gradients((True, True), dy, input, gamma, rstd)


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor, Tensor]:
    """npu_rms_norm of a sum, which is returned too.

    x = x1 + x2
    rstd = 1 / sqrt(mean(x^2) + epsilon),  y = x * rstd * gamma

    Args:
        x1, x2: float16, bfloat16 or float32, of one shape.
        gamma: in the shape of x1's last axes; in any of these dtypes.
        epsilon: added to the mean square.

    Returns:
        (y, rstd, x): y and x as x1; rstd in float32. y and x have a derivative.

    Raises:
        ContractError: a call that `fusion-attention ops npu_add_rms_norm` does not allow.

    Source: Ascend op-plugin, npu_add_rms_norm.

    Example:
        >>> y, _, x = npu_add_rms_norm(torch.ones(2, 4), torch.ones(2, 4), torch.ones(4))
        >>> x[0, 0].item(), round(y[0, 0].item(), 4)
        (2.0, 1.0)
    """
    given = checked(norms.ADD_RMS_NORM, {"x1": x1, "x2": x2, "gamma": gamma, "epsilon": epsilon})
    x = x1 + x2
    return *normalised(x, gamma, given["epsilon"]), x


def npu_gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """npu_rms_norm with weights that count from 1, as Gemma's do.

    rstd = 1 / sqrt(mean(x^2) + epsilon),  y = x * rstd * (1 + gamma)

    Args:
        input, gamma, epsilon: as in npu_rms_norm.

    Returns:
        (y, rstd), as npu_rms_norm.

    Raises:
        ContractError: a call that `fusion-attention ops npu_gemma_rms_norm` does not allow.

    Source: Ascend op-plugin, npu_gemma_rms_norm.

    Example:
        >>> x = torch.randn(2, 4)
        >>> torch.equal(npu_gemma_rms_norm(x, torch.zeros(4))[0], npu_rms_norm(x, torch.ones(4))[0])
        True
    """
    given = checked(norms.GEMMA_RMS_NORM, {"input": input, "gamma": gamma, "epsilon": epsilon})
    return normalised(input, 1 + gamma.float(), given["epsilon"])


def normalised(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(y, rstd): rows over their root mean square times gamma, in the dtype of x, and 1 / rms without a derivative."""

    def compute(x: Tensor, gamma: Tensor) -> tuple[tuple[Tensor, Tensor], Some]:
        rstd = _rstd(x, gamma, epsilon)
        results = (x.float() * rstd * gamma).to(x.dtype), rstd.detach()
        return results, (x, gamma, results[1])

    def gradient(wanted: tuple[bool, bool], dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> Some:
        again = torch.is_grad_enabled()  # for a derivative of the gradient, which goes through rstd too
        return _gradients(wanted, dy, x, gamma, _rstd(x, gamma, epsilon) if again else rstd)

    y, rstd = keeping(compute, gradient, x, gamma)
    return y, rstd


def _rstd(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return (wide * wide).mean(tuple(range(-gamma.dim(), 0)), keepdim=True).add(epsilon).rsqrt()


def _gradients(wanted: tuple[bool, bool], dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> Any:
    """(dx, dgamma) as npu_rms_norm_backward says, those that are wanted."""
    axes, rows = tuple(range(-gamma.dim(), 0)), tuple(range(x.dim() - gamma.dim()))
    scale, upstream = rstd.float(), dy.float()
    xhat, weighed = x.float() * scale, upstream * gamma
    dx = scale * (weighed - xhat * (weighed * xhat).mean(axes, keepdim=True)) if wanted[0] else None
    dgamma = upstream * xhat if wanted[1] else None
    dgamma = dgamma.sum(rows) if rows and dgamma is not None else dgamma
    return None if dx is None else dx.to(x.dtype), dgamma
