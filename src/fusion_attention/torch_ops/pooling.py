"""Compressed keys: windows of rows pooled by a softmax per channel, in the native core or in torch's operators."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from fusion_attention.ops.shared import pooling
from fusion_attention.ops.shared.pooling import Windows
from fusion_attention.torch_ops.dispatch import is_traced

Tensor = torch.Tensor
__all__ = ["Windows", "pooled"]


def pooled(rows: Tensor, gates: Tensor, bias: Tensor | None, windows: Windows) -> Tensor:
    """Pools windows of rows like ops.shared.pooling.pooled(): in the native core unless rows are float64, elsewhere
    than on the CPU, or traced."""
    core = None if is_traced((rows, gates, bias)) else _core()
    if core is None or not core.reads(rows, gates) or (bias is not None and not bias.is_cpu):
        return pooling.pooled(rows, gates, bias, windows)
    result: Tensor = _Pooled.apply(rows, gates, None if bias is None else bias.float(), windows)
    return result


@functools.cache
def _core() -> ModuleType | None:
    """Pooling in the native core; None if it cannot be loaded."""
    try:
        from fusion_attention.backends.cpu import pooling as core
    except ImportError:
        return None
    return core


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, bias: Tensor | None, windows: Windows) -> Tensor:
        ctx.save_for_backward(rows, gates, bias)
        ctx.windows = windows
        return _native(rows, windows).forward(_read(rows), _read(gates), bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rows, gates, bias = ctx.saved_tensors
        wants: tuple[bool, ...] = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # These gradients are differentiated again.
            leaves = [t for t, wanted in zip((rows, gates, bias), wants, strict=True) if wanted]
            out = pooling.pooled(rows, gates, bias, ctx.windows)
            gradients = iter(torch.autograd.grad(out, leaves, dout, create_graph=True))
            return *(next(gradients) if wanted else None for wanted in wants), None
        dkv, dgate, dbias = _native(rows, ctx.windows).backward(
            _read(rows), _read(gates), bias, _read(dout.to(rows.dtype)), wants[2]
        )
        return dkv if wants[0] else None, dgate if wants[1] else None, dbias, None


def _native(rows: Tensor, windows: Windows) -> Any:
    size = None if windows.packed else rows.shape[1]
    lengths = windows.lengths
    if lengths is None:
        lengths = (rows.shape[1],) * rows.shape[0]
    core = _core()
    assert core is not None
    return core.Pooling(windows.ratio, windows.overlap, lengths, windows.before, size)


def _read(tensor: Tensor) -> Tensor:
    """Rows whose channels are contiguous, as the core reads them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
