"""torch_npu's gated and plain activations, in torch's own operators; float32 inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusion_attention.npu.auxiliary.call import checked
from fusion_attention.npu.auxiliary.kept import keeping
from fusion_attention.ops.auxiliary import gates

__all__ = [
    "npu_fast_gelu",
    "npu_fast_gelu_backward",
    "npu_geglu",
    "npu_geglu_grad",
    "npu_gelu",
    "npu_gelu_backward",
    "npu_swiglu",
    "npu_swiglu_backward",
]

Tensor = torch.Tensor
_WORDS = "none", "tanh"
_SLOPE = 1.702


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """The SiLU of one half, times the other half.

    a, b = the halves of x along dim
    y = a / (1 + exp(-a)) * b

    Args:
        input: both halves; float16, bfloat16 or float32.
        dim: the axis that is cut in the middle.

    Returns:
        y in the dtype of input, half as long along dim.

    Raises:
        ContractError: a call that `fusion-attention ops npu_swiglu` does not allow.

    Source: Ascend op-plugin, npu_swiglu.

    Example:
        >>> npu_swiglu(torch.tensor([0.0, 2.0, 1.0, 3.0])).tolist()[0]
        0.0
    """
    dim = checked(gates.SWIGLU, {"input": input, "dim": dim})["dim"]

    def compute(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim)
        return torch.nn.functional.silu(a) * b

    return _of_one(compute, lambda dy, x: _swiglu_gradient(dy, x, dim), input)


def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """The gradient of npu_swiglu.

    s = 1 / (1 + exp(-a))
    da = dy * b * s * (1 + a * (1 - s)),  db = dy * a * s

    Args:
        grad_output: gradient of y.
        input, dim: of the forward.

    Returns:
        dx as input.

    Raises:
        ContractError: a call that `fusion-attention ops npu_swiglu_backward` does not allow.

    Source: Ascend op-plugin, npu_swiglu_backward.

    Example:
        >>> x = torch.randn(3, 8, requires_grad=True)
        >>> npu_swiglu(x).sum().backward()
        >>> torch.allclose(npu_swiglu_backward(torch.ones(3, 4), x.detach()), x.grad, atol=1e-6)
        True
    """
    dim = checked(gates.SWIGLU_BACKWARD, {"grad_output": grad_output, "input": input, "dim": dim})["dim"]
    return _swiglu_gradient(grad_output, input, dim)


def _swiglu_gradient(dy: Tensor, x: Tensor, dim: int) -> Tensor:
    a, b = x.float().chunk(2, dim)
    dy, s = dy.float(), a.sigmoid()
    y = a * s
    return torch.cat((dy * b * torch.addcmul(s, y, 1 - s), dy * y), dim).to(x.dtype)


def npu_geglu(input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    """The GELU of one half, times the other half.

    a, b = the halves of x along dim
    y = a * gelu(b);  with activate_left gelu(a) * b

    Args:
        input: both halves; float16, bfloat16 or float32.
        dim: the axis that is cut in the middle.
        approximate: 1: GELU by tanh; 0: by the error function.
        activate_left: the left half is activated, not the right one.

    Returns:
        (y, gelu): both in the dtype of input, half as long along dim. y alone has a derivative.

    Raises:
        ContractError: a call that `fusion-attention ops npu_geglu` does not allow.

    Source: Ascend op-plugin, npu_geglu.

    Example:
        >>> y, gelu = npu_geglu(torch.tensor([2.0, 3.0]), approximate=0)
        >>> (y / gelu).item()
        2.0
    """
    args = {"input": input, "dim": dim, "approximate": approximate, "activate_left": activate_left}
    given = checked(gates.GEGLU, args)
    word = _WORDS[given["approximate"]]

    def compute(x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
        plain, active = _halves(x, given)
        gelu = torch.nn.functional.gelu(active, approximate=word)
        return ((plain * gelu).to(x.dtype), gelu.detach().to(x.dtype)), (x,)

    def gradient(_: Any, dy: Tensor, x: Tensor) -> tuple[Tensor]:
        gelu = torch.nn.functional.gelu(_halves(x, given)[1], approximate=word)  # again, as exact as it was
        return (_geglu_gradient(dy, x, gelu, given),)

    y, gelu = keeping(compute, gradient, input)
    return y, gelu


def npu_geglu_grad(
    grad_output: Tensor, input: Tensor, gelu: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> Tensor:
    """The gradient of npu_geglu.

    da = dy * gelu(b),  db = dy * a * gelu'(b);  with activate_left the other way round

    Args:
        grad_output: gradient of y.
        input, dim, approximate, activate_left: of the forward.
        gelu: the forward's second result.

    Returns:
        dx as input.

    Raises:
        ContractError: a call that `fusion-attention ops npu_geglu_grad` does not allow.

    Source: Ascend op-plugin, npu_geglu_grad.

    Example:
        >>> x = torch.randn(3, 8, requires_grad=True)
        >>> y, gelu = npu_geglu(x)
        >>> y.sum().backward()
        >>> torch.allclose(npu_geglu_grad(torch.ones(3, 4), x.detach(), gelu), x.grad, atol=1e-6)
        True
    """
    args = {
        "grad_output": grad_output, "input": input, "gelu": gelu, "dim": dim, "approximate": approximate,
        "activate_left": activate_left,
    }  # fmt: skip
    given = checked(gates.GEGLU_GRAD, args)
    return _geglu_gradient(grad_output, input, gelu, given)


def _geglu_gradient(dy: Tensor, x: Tensor, gelu: Tensor, given: Mapping[str, Any]) -> Tensor:
    plain, active = _halves(x, given)
    dy, word = dy.float(), _WORDS[given["approximate"]]
    pair = dy * gelu.float(), torch.ops.aten.gelu_backward(dy * plain, active, approximate=word)
    return torch.cat(pair[::-1] if given["activate_left"] else pair, given["dim"]).to(x.dtype)


def npu_gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """x times the normal distribution function of x.

    y = x * Phi(x)

    Args:
        input: float16, bfloat16 or float32.
        approximate: "none": by the error function; "tanh": by tanh.

    Returns:
        y as input.

    Raises:
        ContractError: a call that `fusion-attention ops npu_gelu` does not allow.

    Source: Ascend op-plugin, npu_gelu.

    Example:
        >>> round(npu_gelu(torch.tensor(1.0)).item(), 4)
        0.8413
    """
    word = checked(gates.GELU, {"input": input, "approximate": approximate})["approximate"]
    return _of_one(
        lambda x: torch.nn.functional.gelu(x.float(), approximate=word),
        lambda dy, x: _gelu_gradient(dy, x, word),
        input,
    )


def npu_gelu_backward(grad_output: Tensor, input: Tensor, *, approximate: str = "none") -> Tensor:
    """The gradient of npu_gelu.

    dx = dy * (Phi(x) + x * phi(x))

    Args:
        grad_output: gradient of y; as input.
        input, approximate: of the forward.

    Returns:
        dx as input.

    Raises:
        ContractError: a call that `fusion-attention ops npu_gelu_backward` does not allow.

    Source: Ascend op-plugin, npu_gelu_backward.

    Example:
        >>> round(npu_gelu_backward(torch.tensor(1.0), torch.tensor(0.0)).item(), 4)
        0.5
    """
    args = {"grad_output": grad_output, "input": input, "approximate": approximate}
    word = checked(gates.GELU_BACKWARD, args)["approximate"]
    return _gelu_gradient(grad_output, input, word)


def _gelu_gradient(dy: Tensor, x: Tensor, word: str) -> Tensor:
    return torch.ops.aten.gelu_backward(dy.float(), x.float(), approximate=word).to(x.dtype)


def npu_fast_gelu(input: Tensor) -> Tensor:
    """A GELU by a logistic function.

    y = x / (1 + exp(-1.702 x))

    Args:
        input: float16, bfloat16 or float32.

    Returns:
        y as input.

    Raises:
        ContractError: a call that `fusion-attention ops npu_fast_gelu` does not allow.

    Source: Ascend op-plugin, npu_fast_gelu.

    Example:
        >>> round(npu_fast_gelu(torch.tensor(1.0)).item(), 4)
        0.8458
    """
    checked(gates.FAST_GELU, {"input": input})
    return _of_one(lambda x: fast_gelu(x.float()), _fast_gelu_gradient, input)


def fast_gelu(x: Tensor) -> Tensor:
    """x / (1 + exp(-1.702 x)), in the dtype of x."""
    return x * (_SLOPE * x).sigmoid()


def npu_fast_gelu_backward(grad: Tensor, input: Tensor) -> Tensor:
    """The gradient of npu_fast_gelu.

    s = 1 / (1 + exp(-1.702 x))
    dx = dy * s * (1 + 1.702 x * (1 - s))

    Args:
        grad: gradient of y; as input.
        input: of the forward.

    Returns:
        dx as input.

    Raises:
        ContractError: a call that `fusion-attention ops npu_fast_gelu_backward` does not allow.

    Source: Ascend op-plugin, npu_fast_gelu_backward.

    Example:
        >>> npu_fast_gelu_backward(torch.tensor(1.0), torch.tensor(0.0)).item()
        0.5
    """
    checked(gates.FAST_GELU_BACKWARD, {"grad": grad, "input": input})
    return _fast_gelu_gradient(grad, input)


def _fast_gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    steep = _SLOPE * x.float()
    s = steep.sigmoid()
    return (dy.float() * s * (1 + steep * (1 - s))).to(x.dtype)


def _of_one(function: Callable[[Tensor], Tensor], gradient: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of one tensor, rounded to its dtype, whose gradient reads that tensor alone."""
    (y,) = keeping(lambda x: ((function(x).to(x.dtype),), (x,)), lambda _, dy, x: (gradient(dy, x),), x)
    return y


def _halves(input: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(the half that stays, the half that is activated) of a geglu, in float32."""
    a, b = input.float().chunk(2, given["dim"])
    return (b, a) if given["activate_left"] else (a, b)
