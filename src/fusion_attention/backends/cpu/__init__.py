"""The CPU back end: forward by the native core, backward by blocked torch, over the bands' own tiles.

Knows which problems it can compute and forwards to the verbs. Refuses to know any interface's words; validates nothing.
"""

from __future__ import annotations

import torch

from fusion_attention.backends.cpu.dense import attention_backward, attention_forward
from fusion_attention.backends.cpu.tiling import Schedule, schedule, workspace_bytes
from fusion_attention.problem import Problem

NAME = "cpu"
DEVICES = ("cpu",)
DTYPES = ("float32", "float16", "bfloat16")

__all__ = [
    "NAME",
    "Schedule",
    "attention_backward",
    "attention_forward",
    "reasons_against",
    "schedule",
    "workspace_bytes",
]


def reasons_against(problem: Problem, device: torch.device | str) -> list[str]:
    """One sentence for each thing that this back end cannot do; empty when it can."""
    table = (("device", torch.device(device).type, DEVICES), ("dtype", problem.dtype, DTYPES))
    return [
        f"the cpu back end computes {what} {', '.join(accepted)}, not {given}."
        for what, given, accepted in table
        if given not in accepted
    ]
