"""The golden back end: the specification in float64, which judges every other back end.

Computes every problem on every device, dtype "float64" included; plans nothing. Never chosen silently.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion_attention.backends.golden.attention import attention_backward, attention_forward
from fusion_attention.backends.golden.indexer import indexer_backward, indexer_topk
from fusion_attention.backends.golden.indexer_loss import indexer_loss, indexer_lse
from fusion_attention.ir.problem import AnyProblem, Extents, IndexerLossProblem, IndexerProblem

__all__ = [
    "NAME",
    "attention_backward",
    "attention_forward",
    "indexer_backward",
    "indexer_loss",
    "indexer_lse",
    "indexer_topk",
    "keep",
    "prepare",
    "reasons_against",
    "reschedule",
    "schedule",
    "workspace_bytes",
]

NAME = "golden"
# Buffers of heads * q_len * kv_len doubles that are alive at once (measured on the plain formula, rounded up).
_BUFFERS = {
    "attention_forward": 6,
    "attention_backward": 10,
    "indexer_topk": 4,
    "indexer_backward": 6,
    "indexer_lse": 4,
    "indexer_loss": 8,
}


def reasons_against(problem: AnyProblem, device: torch.device, op_kind: str = "") -> list[str]:
    """Why this back end cannot compute the problem: never."""
    return []


def workspace_bytes(problem: AnyProblem, extents: Extents, op_kind: str) -> int:
    """About what the score matrices of the largest sequence take."""
    pairs = int((extents.q_len * extents.kv_len).max()) if len(extents) else 0
    if isinstance(problem, IndexerProblem):
        heads = problem.heads
    elif isinstance(problem, IndexerLossProblem):
        heads = max(problem.heads_q, problem.heads_index)
    else:
        heads = problem.heads_q
    return 8 * heads * pairs * _BUFFERS[op_kind]


def nothing(*_: Any) -> None:
    """Nothing is planned: one sequence after the other, each as a whole."""


schedule = reschedule = prepare = keep = nothing
