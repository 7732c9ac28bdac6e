"""Autograd for functions that save chosen tensors for backward instead of the intermediates of torch's operators."""

from collections.abc import Callable
from typing import Any

import torch

from fusion_attention.torch_ops.dispatch import is_traced

Tensor = torch.Tensor
Some = tuple[Tensor | None, ...]


def keeping(
    compute: Callable[..., tuple[tuple[Tensor, ...], Some]], gradient: Callable[..., Some], *inputs: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns the results of compute(*inputs), of which only the first has a derivative.

    In a trace autograd differentiates compute(), and the compiler decides which tensors are saved.

    Args:
        compute: returns (results, tensors to save for the gradient).
        gradient: takes (wanted, gradient of the first result, *saved tensors), returns the gradients of the inputs,
            computed by differentiable operators; wanted: for each input, True if its gradient is needed.
        inputs: all tensors that may require gradients.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs) and not is_traced(inputs):
        result: tuple[Tensor, ...] = _Keeping.apply(compute, gradient, *inputs)
        return result
    return compute(*inputs)[0]


class _Keeping(torch.autograd.Function):
    """The autograd function of keeping(): its forward calls compute(), its backward gradient() on the saved tensors."""

    @staticmethod
    def forward(ctx: Any, compute: Any, gradient: Any, *inputs: Any) -> tuple[Tensor, ...]:
        results, saved = compute(*inputs)
        ctx.gradient = gradient
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[2:]
        if upstream[0] is None:
            return (None,) * (2 + len(wanted))
        return None, None, *ctx.gradient(wanted, upstream[0], *ctx.saved_tensors)
