"""Entry point of operator calls: runs them eagerly, or as registered operators if torch traces or transforms them.

Eager calls on ordinary tensors avoid the overhead of torch's dispatcher and of serialization (serialize.py).
"""

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
    """True if a call must be a registered operator: in a trace, transform, dispatch mode, or with a tensor subclass."""
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
    """Casts the tensors args[name], for all names, to autocast's dtype if it is on, as scaled_dot_product_attention
    does. names[0] is q, whose device decides."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return  # the usual case, tested first because it is faster than reading a tensor's device
    q = args[names[0]]
    device = q.device.type if isinstance(q, torch.Tensor) else ""
    if device not in ("", "meta") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        for name in names:
            tensor = args.get(name)
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64:
                args[name] = tensor.to(dtype)


def drops(keep_prob: Any) -> bool:
    """True if keep_prob is a number below 1 (dropout); other checks report values that are not numbers."""
    if isinstance(keep_prob, torch.Tensor) and keep_prob.numel() != 1:
        return False
    return isinstance(keep_prob, _NUMBERS) and bool(keep_prob < 1)


def results(
    op: Op, args: Mapping[str, Any], backend: str = "auto", *, complete: bool = False, reads: bool = True
) -> dict[str, torch.Tensor]:
    """Runs the operator `op` on a back end; returns {name: result}, in a trace absent ones empty. args: by name.
    complete: return all results that a derivative reads. reads: check tensors' content; False if the caller made it."""
    if is_traced(args.values()):
        return traced.results(op, args, backend)
    with torch._C.DisableTorchFunction():  # Function modes have seen this call; its internal calls are hidden.
        return eager.results(bind(op, args, reads=reads), backend, complete=complete)


def in_order(op: Op, args: Mapping[str, Any], like: torch.Tensor) -> Any:
    """Runs the operator `op` and returns its results as a tuple, in the order of its definition; absent ones are empty
    tensors with the dtype of `like`. args: arguments by name."""
    result = results(op, args)
    return tuple(result[name] if name in result else like.new_empty(0) for name in op.results)
