"""The golden back end: the reference in float64, with which every other back end is compared.

It computes every problem in every dtype on every device, without a plan, and is used only if a call names it.
"""

from typing import Any

import torch

from fusion_attention.backends.golden.attention import attention_backward as attention_backward
from fusion_attention.backends.golden.attention import attention_forward as attention_forward
from fusion_attention.backends.golden.indexer import indexer_backward as indexer_backward
from fusion_attention.backends.golden.indexer import indexer_topk as indexer_topk
from fusion_attention.backends.golden.indexer_loss import indexer_loss as indexer_loss
from fusion_attention.backends.golden.indexer_loss import indexer_lse as indexer_lse
from fusion_attention.backends.golden.pooling import pooling as pooling
from fusion_attention.backends.golden.pooling import pooling_backward as pooling_backward
from fusion_attention.ir.pooling import PoolingProblem
from fusion_attention.ir.problem import AnyProblem, Extents, IndexerLossProblem, IndexerProblem

NAME = "golden"
# Number of buffers of heads * q_len * kv_len doubles that are in memory at once (measured, rounded up).
_BUFFERS = {
    "attention_forward": 6,
    "attention_backward": 10,
    "indexer_topk": 4,
    "indexer_backward": 6,
    "indexer_lse": 4,
    "indexer_loss": 8,
    "pooling": 6,
    "pooling_backward": 12,
}


def reasons_against(problem: AnyProblem, device: torch.device, op_kind: str = "") -> list[str]:
    """Returns [], no reason against computing `problem`: the float64 back end computes every operation anywhere."""
    return []


def workspace_bytes(problem: AnyProblem, extents: Extents, op_kind: str) -> int:
    """Returns an estimate of the bytes of float64 score matrices [heads, q_len, kv_len] of the largest sequence."""
    if isinstance(problem, PoolingProblem):
        rows = int(extents.kv_len.max(initial=0))
        return 8 * problem.heads * problem.channels * rows * _BUFFERS[op_kind]
    pairs = int((extents.q_len * extents.kv_len).max()) if len(extents) else 0
    if isinstance(problem, IndexerProblem):
        heads = problem.heads
    elif isinstance(problem, IndexerLossProblem):
        heads = max(problem.heads_q, problem.heads_index)
    else:
        heads = problem.heads_q
    return 8 * heads * pairs * _BUFFERS[op_kind]


def nothing(*_: Any) -> None:
    """Returns None: the float64 back end has no schedules, and no functions that repeat a call."""


schedule = reschedule = prepare = keep = nothing
