"""Backwards of which no statistics were saved: the formulas compute them from the forward's inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusion_attention.captures.gradients import gradient_name
from fusion_attention.contract import Op
from fusion_attention.judging.outputs import computed, setting_of, units
from fusion_attention.ops.training.run import RESULTS, DenseBackward, DenseForward

Tensor = torch.Tensor
DOUT, DLSE, LSE = "dout", "dlse", "lse"


def upstream_of(op: Op) -> dict[str, str]:
    """Returns the results with a gradient, by the gradient's name: dout of the output, dlse of its statistic."""
    results = list(op.trains) if op.trains and "keep_prob" in op.by_name else []
    return dict(zip((DOUT, DLSE), results, strict=False))


def gradients_of(op: Op) -> tuple[str, ...]:
    """Returns the names of the gradients of an operator's inputs."""
    inputs = {name: None for names in op.trains.values() for name in names} if upstream_of(op) else {}
    return tuple(gradient_name(op, name) for name in inputs)


def with_kernel_statistics(call: DenseForward) -> DenseForward:
    """Returns a call with statistics in the kernels' format: one number per row and head."""
    return DenseForward(call.call)


def backward_of(call: DenseForward, saved: Mapping[str, Tensor], upstream: Mapping[str, Tensor]) -> DenseBackward:
    """Lowers the backward of a forward whose statistics were not saved.

    The output is that of the file, or else the right one in the call's dtype.
    """
    forward = with_kernel_statistics(call)
    results = {name: torch.zeros_like(t) for name, t in forward.results().items()}
    setting, outputs = setting_of(forward, results)
    for unit in units(setting, outputs):
        wanted = computed(setting, unit, outputs, None)
        for o in outputs:
            o.rows(setting, unit.b, unit.heads, unit.rows).copy_(wanted[o.name].value)
    given = dict(zip(RESULTS, (saved.get(name) for name in call.names), strict=True))
    results["out"] = results["out"] if given["out"] is None else given["out"]
    by_name = dict(zip(RESULTS, (upstream.get(name) for name in call.names), strict=True))
    return forward.backward(results, {name: t for name, t in by_name.items() if t is not None})
