"""The CPU back end: both verbs by the native core, and what empty rows in mean form add to them.

Knows which problems it can compute and forwards to the core. Refuses to know any interface's words; validates nothing.
"""

from __future__ import annotations

import torch

from fusion_attention._native import BackwardPlan, ForwardPlan
from fusion_attention.backends.cpu.means import add_mean_gradients, add_means
from fusion_attention.backends.cpu.native import plan_backward, plan_forward, run_backward, run_forward
from fusion_attention.problem import Extents, Grads, IndexerProblem, Operands, Problem

NAME = "cpu"
DEVICES = ("cpu",)
DTYPES = ("float32", "float16", "bfloat16")


def reasons_against(problem: Problem | IndexerProblem, device: torch.device | str) -> list[str]:
    """One sentence for each thing that this back end cannot do; empty when it can."""
    if isinstance(problem, IndexerProblem):
        return ["the cpu back end computes no indexer."]
    table = (
        ("device", torch.device(device).type, DEVICES),
        ("dtype", problem.dtype, DTYPES),
        ("page_size", problem.page_size, (0,)),
        ("shares_kv", problem.shares_kv, (False,)),
        ("kv_dtype", problem.kv_dtype, ("",)),
        ("out_quant", problem.out_quant, ("none",)),
        ("select_count", problem.select_count, (0,)),
    )
    return [
        f"the cpu back end computes {what} {', '.join(map(str, accepted))}, not {given}."
        for what, given, accepted in table
        if given not in accepted
    ]


def schedule(problem: Problem, extents: Extents, verb: str, variant: str | None = None) -> ForwardPlan | BackwardPlan:
    """The core's plan of one verb; variant: an instruction set that runs here, by default the strongest.

    Boundaries of tiles depend on each sequence's own lengths, so a sequence's bits do not depend on its neighbours,
    on packing or on threads.
    """
    planner = plan_backward if verb == "attention_backward" else plan_forward
    return planner(problem, extents, variant)


def workspace_bytes(problem: Problem, extents: Extents, verb: str) -> int:
    """What a verb allocates besides operands and results, with torch's present number of threads."""
    return schedule(problem, extents, verb).workspace_bytes(torch.get_num_threads())


def attention_forward(problem: Problem, extents: Extents, schedule: ForwardPlan, operands: Operands) -> None:
    """Writes operands.out and operands.stats for every row of every sequence."""
    if len(extents) == 0:
        return
    empty_rows = run_forward(schedule, problem, operands)
    if empty_rows and problem.empty_rows != "zero":
        add_means(problem, extents, operands)


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
