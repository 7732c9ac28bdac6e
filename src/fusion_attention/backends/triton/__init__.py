"""The Triton back end: attention on NVIDIA GPUs. Imports Triton only where it computes, so that any machine may ask.

Knows which problems it can compute. Refuses to know any interface's words; validates nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fusion_attention.backends.triton import shapes
from fusion_attention.problem import Extents, Grads, Operands, Problem

if TYPE_CHECKING:
    from fusion_attention.backends.triton.launch import Schedule

NAME = "triton"
DTYPES = ("float32", "float16", "bfloat16")
OLDEST = 8  # compute capability of the oldest chip that the kernels are compiled for (sm_80)


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, on the CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def against_device(device: torch.device) -> list[str]:
    """Why a device cannot run the kernels."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return ["the triton back end needs the package triton, which is not installed."]
    if interpreted():
        return []
    if device.type != "cuda":
        return [f"the triton back end computes device cuda, not {device.type}."]
    if torch.version.hip is not None:
        return ["the triton back end computes on NVIDIA GPUs, not on AMD's."]
    if not torch.cuda.is_available():
        return ["the triton back end finds no GPU."]
    major = torch.cuda.get_device_capability(device)[0]
    return [] if major >= OLDEST else [f"the triton back end computes on sm_80 and newer, not on sm_{major}x."]


def reasons_against(problem: Problem, device: torch.device | str) -> list[str]:
    """One sentence for each thing that this back end cannot do; empty when it can."""
    p = problem
    table = (
        ("dtype", p.dtype, DTYPES),
        ("page_size", p.page_size, (0,)),
        ("shares_kv", p.shares_kv, (False,)),
        ("kv_dtype", p.kv_dtype, ("",)),
        ("out_quant", p.out_quant, ("none",)),
        ("select_count", p.select_count, (0,)),
    )
    return against_device(torch.device(device)) + [
        f"the triton back end computes {what} {', '.join(map(str, accepted))}, not {given}."
        for what, given, accepted in table
        if given not in accepted
    ]


def schedule(problem: Problem, extents: Extents, verb: str) -> Schedule:
    """The tiles of one verb; what depends on a device is copied there by the first run."""
    from fusion_attention.backends.triton import launch

    planner = launch.plan_backward if verb == "attention_backward" else launch.plan_forward
    return planner(problem, extents)


def workspace_bytes(problem: Problem, extents: Extents, verb: str) -> int:
    """What a verb allocates besides operands and results."""
    from fusion_attention.backends.triton import launch

    return launch.workspace_bytes(problem, extents, verb)


def attention_forward(problem: Problem, extents: Extents, schedule: Schedule, operands: Operands) -> None:
    """Writes operands.out and operands.stats for every row of every sequence."""
    from fusion_attention.backends.triton import launch

    if len(extents):
        launch.run_forward(problem, extents, schedule, operands)


def attention_backward(
    problem: Problem, extents: Extents, schedule: Schedule, operands: Operands, grads: Grads
) -> None:
    """Writes dq, dk, dv, rope tails and dsink, and adds to dbias, from the saved statistics and the saved out.

    The same bits in every run, but for dbias where a bias repeats: its elements are then sums in no fixed order.
    """
    from fusion_attention.backends.triton import launch

    if len(extents):
        launch.run_backward(problem, extents, schedule, operands, grads)
    elif grads.dsink is not None:
        grads.dsink.zero_()
