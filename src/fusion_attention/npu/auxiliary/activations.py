"""torch_npu's activation functions, with and without a gate, computed by torch's operators in float32."""

from collections.abc import Callable
from typing import Any

import torch

from fusion_attention.npu.auxiliary.call import computed
from fusion_attention.npu.auxiliary.saved import keeping
from fusion_attention.ops.auxiliary_definitions import activations

Tensor = torch.Tensor
_WORDS = "none", "tanh"
_SLOPE = 1.702


@computed(activations.SWIGLU)
def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    def compute(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim)
        return torch.nn.functional.silu(a) * b

    return _of_one(compute, lambda dy, x: _swiglu_gradient(dy, x, dim), input)


def _swiglu_gradient(grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    a, b = input.float().chunk(2, dim)
    dy, s = grad_output.float(), a.sigmoid()
    y = a * s
    return torch.cat((dy * b * torch.addcmul(s, y, 1 - s), dy * y), dim).to(input.dtype)


npu_swiglu_backward = computed(activations.SWIGLU_BACKWARD)(_swiglu_gradient)


@computed(activations.GEGLU)
def npu_geglu(input: Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    def compute(x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
        linear, active = _halves(x, dim, activate_left)
        gelu = torch.nn.functional.gelu(active, approximate=_WORDS[approximate])
        return ((linear * gelu).to(x.dtype), gelu.detach().to(x.dtype)), (x,)

    def gradient(_: Any, dy: Tensor, x: Tensor) -> tuple[Tensor]:
        gelu = torch.nn.functional.gelu(
            _halves(x, dim, activate_left)[1], approximate=_WORDS[approximate]
        )  # recomputed in float32, more exact than the rounded result
        return (_geglu_gradient(dy, x, gelu, dim, approximate, activate_left),)

    y, gelu = keeping(compute, gradient, input)
    return y, gelu


def _geglu_gradient(
    grad_output: Tensor, input: Tensor, gelu: Tensor, dim: int, approximate: int, activate_left: bool
) -> Tensor:
    linear, active = _halves(input, dim, activate_left)
    dy = grad_output.float()
    pair = dy * gelu.float(), torch.ops.aten.gelu_backward(dy * linear, active, approximate=_WORDS[approximate])
    return torch.cat(pair[::-1] if activate_left else pair, dim).to(input.dtype)


npu_geglu_grad = computed(activations.GEGLU_GRAD)(_geglu_gradient)


@computed(activations.GELU)
def npu_gelu(input: Tensor, approximate: str) -> Tensor:
    return _of_one(
        lambda x: torch.nn.functional.gelu(x.float(), approximate=approximate),
        lambda dy, x: _gelu_gradient(dy, x, approximate),
        input,
    )


def _gelu_gradient(grad_output: Tensor, input: Tensor, approximate: str) -> Tensor:
    dx: Tensor = torch.ops.aten.gelu_backward(grad_output.float(), input.float(), approximate=approximate)
    return dx.to(input.dtype)


npu_gelu_backward = computed(activations.GELU_BACKWARD)(_gelu_gradient)


@computed(activations.FAST_GELU)
def npu_fast_gelu(input: Tensor) -> Tensor:
    return _of_one(lambda x: fast_gelu(x.float()), _fast_gelu_gradient, input)


def fast_gelu(x: Tensor) -> Tensor:
    """Returns x / (1 + exp(-1.702 x)), in the dtype of x."""
    return x * (_SLOPE * x).sigmoid()


def _fast_gelu_gradient(grad: Tensor, input: Tensor) -> Tensor:
    steep = _SLOPE * input.float()
    s = steep.sigmoid()
    return (grad.float() * s * (1 + steep * (1 - s))).to(input.dtype)


npu_fast_gelu_backward = computed(activations.FAST_GELU_BACKWARD)(_fast_gelu_gradient)


def _of_one(function: Callable[[Tensor], Tensor], gradient: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns function(x), computed in float32, in x's dtype; its backward saves only x and calls gradient(dy, x)."""
    (y,) = keeping(lambda x: ((function(x).to(x.dtype),), (x,)), lambda _, dy, x: (gradient(dy, x),), x)
    return y


def _halves(input: Tensor, dim: int, left: bool) -> tuple[Tensor, Tensor]:
    """Returns (linear half, activated half) of a GEGLU's input along `dim` in float32; left: activated half first."""
    a, b = input.float().chunk(2, dim)
    return (b, a) if left else (a, b)
