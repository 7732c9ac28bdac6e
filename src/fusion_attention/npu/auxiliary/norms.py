"""torch_npu's root-mean-square norms, computed by torch's operators in float32."""

from typing import Any

import torch

from fusion_attention.npu.auxiliary.call import computed
from fusion_attention.npu.auxiliary.saved import Some, keeping
from fusion_attention.ops.auxiliary_definitions import norms

Tensor = torch.Tensor


@computed(norms.RMS_NORM_BACKWARD)
def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return _gradients((True, True), dy, input, gamma, rstd)


@computed(norms.ADD_RMS_NORM)
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    x = x1 + x2
    return *normalised(x, gamma, epsilon), x


@computed(norms.GEMMA_RMS_NORM)
def npu_gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return normalised(input, 1 + gamma.float(), epsilon)


def normalised(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns (y = input / rms * gamma in the dtype of input, rstd = 1 / rms in float32, not differentiable).
    The mean of squares is over gamma's axes, the last ones of input; epsilon is added to it."""

    def compute(x: Tensor, gamma: Tensor) -> tuple[tuple[Tensor, Tensor], Some]:
        rstd = _rstd(x, gamma, epsilon)
        results = (x.float() * rstd * gamma).to(x.dtype), rstd.detach()
        return results, (x, gamma, results[1])

    def gradient(wanted: tuple[bool, bool], dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> Some:
        again = torch.is_grad_enabled()  # second derivatives also pass through rstd
        return _gradients(wanted, dy, x, gamma, _rstd(x, gamma, epsilon) if again else rstd)

    y, rstd = keeping(compute, gradient, input, gamma)
    return y, rstd


npu_rms_norm = computed(norms.RMS_NORM)(normalised)


def _rstd(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Returns 1 / sqrt(mean(x^2) + epsilon) in float32, the mean being over gamma's axes, the last ones of x."""
    x32 = x.float()
    return (x32 * x32).mean(tuple(range(-gamma.dim(), 0)), keepdim=True).add(epsilon).rsqrt()


def _gradients(wanted: tuple[bool, bool], dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> Any:
    """Returns (dx, dgamma) of the RMS norm from dy; wanted: (True if dx is needed, True if dgamma is), else None in its
    place; rstd: 1 / rms, from the forward."""
    axes, rows = tuple(range(-gamma.dim(), 0)), tuple(range(x.dim() - gamma.dim()))
    scale, upstream = rstd.float(), dy.float()
    xhat, weighed = x.float() * scale, upstream * gamma
    dx = scale * (weighed - xhat * (weighed * xhat).mean(axes, keepdim=True)) if wanted[0] else None
    dgamma = upstream * xhat if wanted[1] else None
    dgamma = dgamma.sum(rows) if rows and dgamma is not None else dgamma
    return None if dx is None else dx.to(x.dtype), dgamma
