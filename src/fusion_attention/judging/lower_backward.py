"""Makes the backward of a recorded forward in the form that kernels read; computes statistics that were not saved."""

from collections.abc import Mapping
from typing import Any

import torch

from fusion_attention.captures.gradients import gradient_name
from fusion_attention.contract import Op
from fusion_attention.judging.outputs import computed, setting_of, units
from fusion_attention.ops.compressed.lowered_call import LSE as SHARED_LSE
from fusion_attention.ops.sparse.lowered_call import RESULTS as SPARSE
from fusion_attention.ops.sparse.lowered_call import Sparse
from fusion_attention.ops.training.forward_backward import RESULTS, DenseForward

Tensor = torch.Tensor
DOUT, DLSE, LSE = "dout", "dlse", "lse"
OUT = SPARSE[0]


def upstream_of(op: Op) -> dict[str, str]:
    """Returns {gradient ("dout", "dlse"): result name} of the operator's results whose gradients its backward takes."""
    if "keep_prob" in op.by_name:
        return dict(zip((DOUT, DLSE), op.trains, strict=False))
    of_lists = "sparse_indices" in op.by_name and "sinks" in op.by_name and SHARED_LSE not in op.trains
    return {DOUT: OUT} if of_lists and op.trains else {}


def gradients_of(op: Op) -> dict[str, str]:
    """Returns {accepted name: gradient's name} of the gradients of an operator's inputs, such as {"dquery": "dq"}."""
    inputs = {name: None for names in op.trains.values() for name in names} if upstream_of(op) else {}
    names = {name: gradient_name(op, name) for name in inputs if name in op.by_name}
    return {f"d{op.by_name[n].shown}": g for n, g in names.items()} | {g: g for g in names.values()}


def is_training(call: Any) -> bool:
    """True if backward_of() can make the backward of the forward `call`: dense or sparse attention."""
    return isinstance(call, DenseForward) or type(call) is Sparse


def with_kernel_statistics(call: Any) -> Any:
    """Returns a dense attention call with one number per query and head in its statistics, as in kernels, where CANN's
    have 8 copies; other calls unchanged."""
    return DenseForward(call.call) if isinstance(call, DenseForward) else call


def names_of(call: Any) -> dict[str, str]:
    """Returns {name of a call's result: its name in the kernels}."""
    return dict(zip(call.names, RESULTS, strict=True)) if isinstance(call, DenseForward) else {n: n for n in SPARSE}


def backward_of(call: Any, saved: Mapping[str, Tensor], upstream: Mapping[str, Tensor]) -> Any:
    """Returns the backward of the forward `call`, with its tensors; formulas compute the softmax statistics.
    saved: the forward's recorded results, by name. Without the output, it is computed and rounded to the call's dtype.
    upstream: the gradients of its results."""
    forward, names = with_kernel_statistics(call), names_of(call)
    results = {name: torch.zeros_like(t) for name, t in forward.results().items()}
    setting, outputs = setting_of(forward, results)
    for unit in units(setting, outputs):
        wanted = computed(setting, unit, outputs, None)
        for o in outputs:
            o.rows(setting, unit.b, unit.heads, unit.rows).copy_(wanted[o.name].value)
    for o in outputs:
        if o.form == "sparse" and o.view is not None:
            results[o.name] = forward.grouped(o.view.keep[0])
    results |= {names[name]: t for name, t in saved.items() if names[name] == next(iter(results))}
    return forward.backward(results, {names[name]: t for name, t in upstream.items()})
