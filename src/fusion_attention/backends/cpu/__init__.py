"""The CPU back end: both verbs by the native core, and what empty rows in mean form add to them.

Knows which problems it can compute and forwards to the core. Refuses to know any interface's words; validates nothing.
"""

from __future__ import annotations

import torch

from fusion_attention._native import BackwardPlan, ForwardPlan
from fusion_attention.backends.cpu import decode
from fusion_attention.backends.cpu.means import add_mean_gradients, add_means
from fusion_attention.backends.cpu.native import plan_backward, run_backward, run_forward
from fusion_attention.problem import Extents, Grads, Operands, Problem

NAME = "cpu"
DEVICES = ("cpu",)
DTYPES = ("float32", "float16", "bfloat16")


def reasons_against(problem: Problem, device: torch.device | str) -> list[str]:
    """One sentence for each thing that this back end cannot do; empty when it can."""
    table = (
        ("device", torch.device(device).type, DEVICES),
        ("dtype", problem.dtype, DTYPES),
        ("select_count", problem.select_count, (0,)),
    )
    listed = [
        f"the cpu back end computes {what} {', '.join(map(str, accepted))}, not {given}."
        for what, given, accepted in table
        if given not in accepted
    ]
    return listed + decode.reasons_against(problem)


def schedule(
    problem: Problem, extents: Extents, verb: str, variant: str | None = None
) -> ForwardPlan | BackwardPlan | decode.Schedule:
    """The core's plan of one verb; variant: an instruction set that runs here, by default the strongest.

    Boundaries of tiles depend on each sequence's own lengths, so a sequence's bits do not depend on its neighbours,
    on packing or on threads.
    """
    if verb == "attention_backward":
        return plan_backward(problem, extents, variant)
    return decode.plan(problem, extents, variant)


def workspace_bytes(problem: Problem, extents: Extents, verb: str) -> int:
    """What a verb allocates besides operands and results, with torch's present number of threads."""
    return schedule(problem, extents, verb).workspace_bytes(torch.get_num_threads())


def attention_forward(
    problem: Problem, extents: Extents, schedule: ForwardPlan | decode.Schedule, operands: Operands
) -> None:
    """Writes operands.out and operands.stats for every row of every sequence."""
    if len(extents) == 0:
        return
    if isinstance(schedule, decode.Schedule):
        empty_rows = decode.run(schedule, problem, operands)
    else:
        empty_rows = run_forward(schedule, problem, operands)
    if empty_rows and problem.empty_rows != "zero":
        add_means(problem, extents, operands)


def reschedule(
    problem: Problem, extents: Extents, verb: str, schedule: ForwardPlan | BackwardPlan | decode.Schedule
) -> ForwardPlan | BackwardPlan | decode.Schedule:
    """The plan for other key lengths and bands of the same sequences; a decode's is changed, others are made anew."""
    if isinstance(schedule, decode.Schedule) and schedule.dense is None:
        schedule.update(extents)
        return schedule
    return globals()["schedule"](problem, extents, verb)


def attention_backward(
    problem: Problem, extents: Extents, schedule: BackwardPlan, operands: Operands, grads: Grads
) -> None:
    """Writes dq, dk, dv, rope tails and dsink, and adds to dbias, from the saved statistics and the saved out."""
    if len(extents) == 0:
        if grads.dsink is not None:
            grads.dsink.zero_()
        return
    if run_backward(schedule, problem, operands, grads):
        add_mean_gradients(problem, extents, operands, grads)
