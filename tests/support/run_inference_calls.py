"""Lowered calls of inference attention: conversion to float64, and a run with poisoned results."""

from dataclasses import replace
from typing import Any

import torch

from fusion_attention.contract import CallCache
from fusion_attention.ops.inference.lowered_call import InferenceCall
from fusion_attention.plan import compute


def in_float64(call: InferenceCall) -> InferenceCall:
    """Returns the same call in float64; stored integers and their scales do not change."""

    def promote(t: Any) -> Any:
        if isinstance(t, tuple):
            return tuple(map(promote, t))
        return t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t

    names = ("q", "k", "v", "bias", "q_rope", "k_rope", "k_common", "v_common")
    changed = {name: promote(getattr(call, name)) for name in names}
    return replace(call, problem=replace(call.problem, dtype="float64"), call_cache=CallCache(), **changed)


def run(call: InferenceCall, backend: str) -> dict[str, torch.Tensor]:
    """Returns the results of a call by name."""
    results = call.results()
    for tensor in results.values():
        tensor.view(-1).view(torch.uint8).fill_(0xA5)
    compute(call, results, backend)
    return results
