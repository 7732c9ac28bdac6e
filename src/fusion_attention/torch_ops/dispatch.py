"""The entry of a call: whether it runs at once or must be an operator that torch sees, and what functions ask before.

Eager calls on plain tensors are spared the dispatcher's and the text's time (text.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Op, bind
from fusion_attention.ir.mask import Band
from fusion_attention.torch_ops import eager, traced
from fusion_attention.torch_ops.autograd_guards import forward_mode

_NUMBERS: tuple[Any, ...] = (int, float, torch.Tensor, torch.SymInt, torch.SymFloat, np.generic)
_USUAL = frozenset({torch.Tensor, torch.nn.Parameter, type(None), int, float, str, bool, list, tuple, Band})


def is_traced(args: Iterable[Any]) -> bool:
    """Whether a call with these arguments must be one of the operators: it is traced, transformed, under a mode, or
    on tensors of a class of their own."""
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or forward_mode()
    ):
        return True
    return not _USUAL.issuperset(map(type, args)) and any(
        isinstance(value, torch.Tensor) and type(value) not in _USUAL for value in args
    )


def autocast(args: dict[str, Any], names: Sequence[str]) -> None:
    """Under autocast: the named tensors in its dtype, as scaled_dot_product_attention has them cast; names[0] is q."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return  # the usual case, found out faster than a tensor's device
    q = args[names[0]]
    device = q.device.type if isinstance(q, torch.Tensor) else ""
    if device not in ("", "meta") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        for name in names:
            tensor = args.get(name)
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64:
                args[name] = tensor.to(dtype)


def drops(keep_prob: Any) -> bool:
    """Whether a call drops probabilities; None keeps all, and what is no number bind() refuses."""
    return isinstance(keep_prob, _NUMBERS) and bool(keep_prob < 1)


def results(
    op: Op, args: Mapping[str, Any], backend: str = "auto", *, complete: bool = False, reads: bool = True
) -> dict[str, torch.Tensor]:
    """The results of a call by canonical name, as eager.results() says; in a trace, those it has not are empty.

    reads: as bind(); False where the caller made what would be read.
    """
    if is_traced(args.values()):
        return traced.results(op, args, backend)
    with torch._C.DisableTorchFunction():  # Modes have seen the call; what it takes inside is not theirs.
        return eager.results(bind(op, args, reads=reads), backend, complete=complete)


def in_order(op: Op, args: Mapping[str, Any], like: torch.Tensor) -> Any:
    """The results of a call as a tuple in its record's order; absent ones are empty, in the dtype of `like`."""
    result = results(op, args)
    return tuple(result[name] if name in result else like.new_empty(0) for name in op.results)
