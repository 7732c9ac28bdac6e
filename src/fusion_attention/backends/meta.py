"""The back end of torch's meta device: calls are checked and planned, and return tensors without memory."""

from typing import Any

import torch

from fusion_attention.ir.problem import AnyProblem, Extents

NAME = "meta"


def reasons_against(problem: AnyProblem, device: torch.device, op_kind: str = "") -> list[str]:
    """Returns one sentence if the tensors are not on torch's device "meta", else []."""
    return [] if device.type == NAME else [f"the meta back end computes device meta, not {device.type}."]


def workspace_bytes(problem: AnyProblem, extents: Extents, op_kind: str) -> int:
    """Returns 0: nothing is computed for tensors on torch's device "meta", which have no memory."""
    return 0


def nothing(*_: Any) -> None:
    """Does nothing and returns None: there are no schedules, and meta tensors have no memory to write."""


schedule = reschedule = prepare = keep = nothing
attention_forward = attention_backward = nothing
indexer_topk = indexer_backward = indexer_lse = indexer_loss = nothing
pooling = pooling_backward = nothing
