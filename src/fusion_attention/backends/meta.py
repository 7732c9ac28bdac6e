"""Calls on the meta device: every check, plan and shape, and no value, as torch's own operators have them there."""

from __future__ import annotations

from typing import Any

import torch

from fusion_attention.ir.problem import AnyProblem, Extents

NAME = "meta"


def reasons_against(problem: AnyProblem, device: torch.device, op_kind: str = "") -> list[str]:
    """Why this back end cannot compute the problem: tensors with memory need values."""
    return [] if device.type == NAME else [f"the meta back end computes device meta, not {device.type}."]


def workspace_bytes(problem: AnyProblem, extents: Extents, op_kind: str) -> int:
    """None."""
    return 0


def nothing(*_: Any) -> None:
    """Nothing is planned, and nothing written into memory that is not there."""


schedule = reschedule = prepare = keep = nothing
attention_forward = attention_backward = nothing
indexer_topk = indexer_backward = indexer_lse = indexer_loss = nothing
