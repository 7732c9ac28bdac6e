"""Guards against missing derivatives: second derivatives and forward mode raise errors, instead of giving zeros."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

Tensor = torch.Tensor


class _Once(_SingleLevelFunction):
    """An autograd function that computes gradients and whose backward raises; single-level, for use in torch.func."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Iterable[Tensor | None]], *_: Any) -> tuple[Tensor | None, ...]:
        return tuple(compute())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            "fusion_attention: cannot differentiate twice: gradients of gradients are not computed (detach() the "
            "gradients, or leave out create_graph=True)"
        )


def once(compute: Callable[[], Iterable[Tensor | None]], reads: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Returns compute(), gradients computed from the tensors `reads`; differentiating them raises an error. torch's
    once_differentiable is not sufficient: it returns the gradients as constants if the upstream gradient is one."""
    read = tuple(reads)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in read):
        with enable_single_level_autograd_function():
            result: tuple[Tensor | None, ...] = _Once.apply(compute, *read)  # type: ignore[attr-defined]
            return result
    with torch.no_grad():
        return tuple(compute())


def constants(upstream: Iterable[Tensor | None]) -> None:
    """Raises if `upstream`, gradients of softmax statistics, are not zero, since statistics have no derivative.
    Zeros are legal: reentrant checkpointing makes them for unused outputs. NaN counts as zero: the logarithm makes it
    from a zero gradient if the sum of a row without keys is 0."""
    for t in upstream:
        if t is not None and not t.is_meta and bool(t.nan_to_num(0.0).any()):
            raise NotImplementedError(
                "fusion_attention: the loss goes through the lse of an attention across processes, which has no "
                "derivative: use lse.detach() where it is a constant"
            )


@contextmanager
def below() -> Iterator[None]:
    """A context in which autograd does not see an operator, because the caller records its derivative.
    Outer levels of torch.func still record theirs."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
        yield


def forward_mode() -> bool:
    """True if forward-mode differentiation is active, so tensors may have tangents."""
    return forward_ad._current_level >= 0


def no_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Raises NotImplementedError if a tensor has a tangent, that is, takes part in forward-mode differentiation."""
    if forward_mode() and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            "fusion_attention: forward-mode derivatives (jvp, jacfwd, dual numbers) are not computed: use backward(), "
            "torch.func.grad or torch.func.vjp"
        )
