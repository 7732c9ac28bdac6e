"""From a bound call of fused inference attention down to the waist. Stands in until the lowering is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusion_attention.contract import Bound
from fusion_attention.memory import empty
from fusion_attention.ops.inference.fused_geometry import geometry, lse_shape, out_dtype, out_shape

__all__ = ["PROMPT_RESULTS", "RESULTS", "fresh", "geometry", "lower"]

PROMPT_RESULTS = ("attention_out",)
RESULTS = ("attention_out", "softmax_lse")


def fresh(n: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Memory for the results of a call with these arguments."""
    q = n["query"]
    found = {"attention_out": empty(q, out_shape(n), out_dtype(n))}
    if n["has_lse"]:
        found["softmax_lse"] = empty(q, lse_shape(n), torch.float32)
    return found


def lower(bound: Bound) -> Any:
    """The call below its interface's words."""
    raise NotImplementedError(bound.op.name)
