"""The CPU back end: the C++ core computes all operations; torch computes means of V for rows without visible keys."""

from collections.abc import Callable
from typing import Any

import torch

from fusion_attention._native import (
    BackwardPlan,
    ForwardPlan,
    IndexerPlan,
    PreparedDecode,
    PreparedForward,
    PreparedIndexer,
    PreparedSparse,
    SparsePlan,
)
from fusion_attention.backends.cpu import decode, full_int8
from fusion_attention.backends.cpu.indexer import indexer_backward as indexer_backward
from fusion_attention.backends.cpu.indexer import indexer_loss as indexer_loss
from fusion_attention.backends.cpu.indexer import indexer_lse as indexer_lse
from fusion_attention.backends.cpu.indexer import indexer_topk as indexer_topk
from fusion_attention.backends.cpu.indexer import lists_of, plan_indexer, plan_indexer_loss
from fusion_attention.backends.cpu.mean_rows import add_mean_gradients, add_means
from fusion_attention.backends.cpu.native import KeptOperands, plan_backward, prepare_forward, run_backward, run_forward
from fusion_attention.backends.cpu.pooling import PoolingPlan, plan_pooling
from fusion_attention.backends.cpu.pooling import pooling as pooling
from fusion_attention.backends.cpu.pooling import pooling_backward as pooling_backward
from fusion_attention.backends.cpu.sparse import plan_sparse, prepare_sparse, run_sparse_backward, run_sparse_forward
from fusion_attention.ir.pooling import PoolingProblem
from fusion_attention.ir.problem import (
    PLAIN_SELECTION,
    AnyProblem,
    Extents,
    Grads,
    IndexerLossProblem,
    IndexerProblem,
    Operands,
    Problem,
)

NAME = "cpu"
DEVICES = ("cpu",)
DTYPES = ("float32", "float16", "bfloat16")

Schedule = ForwardPlan | BackwardPlan | SparsePlan | IndexerPlan | decode.Schedule | full_int8.Schedule | PoolingPlan


def reasons_against(problem: AnyProblem, device: torch.device | str, op_kind: str = "") -> list[str]:
    """Returns a sentence for each unsupported property of a problem (dtype, mask, ...), and for a device but the CPU.

    op_kind has no effect: all operations support the same properties.
    """
    table: list[tuple[str, object, tuple[object, ...]]] = [
        ("device", torch.device(device).type, DEVICES),
        ("dtype", problem.dtype, DTYPES),
    ]
    if isinstance(problem, IndexerProblem | IndexerLossProblem):
        table.append(("weights_dtype", problem.weights_dtype, DTYPES))
    elif isinstance(problem, Problem) and problem.selects:
        table += [
            (f"{name} with select_count", getattr(problem, name), (value,)) for name, value in PLAIN_SELECTION.items()
        ]
        if problem.compressed_ratio:
            table.append(("dim_rope with compressed_ratio", problem.dim_rope, (0,)))
    listed = [
        f"the cpu back end computes {what} {', '.join(map(str, accepted))}, not {given}."
        for what, given, accepted in table
        if given not in accepted
    ]
    if isinstance(problem, Problem) and not problem.selects:
        listed += (full_int8 if problem.has_weight_scale else decode).reasons_against(problem)
    return listed


def schedule(problem: AnyProblem, extents: Extents, op_kind: str, variant: str | None = None) -> Schedule:
    """Returns the C++ core's plan (tiles, scratch) of an operation; variant: an instruction set, None: the fastest.

    The boundaries of tiles depend only on a sequence's lengths, so the bits of its results do not depend on other
    sequences, packing or the number of threads.
    """
    backward = op_kind.endswith("_backward")
    if isinstance(problem, IndexerLossProblem):
        return plan_indexer_loss(problem, extents, variant)
    if isinstance(problem, PoolingProblem):
        return plan_pooling(problem, extents, op_kind, variant)
    if isinstance(problem, IndexerProblem):
        return plan_indexer(problem, extents, op_kind, variant)
    if problem.selects:
        return plan_sparse(problem, extents, backward, variant)
    if problem.has_weight_scale:
        return full_int8.plan(problem)
    return (plan_backward if backward else decode.plan)(problem, extents, variant)


def reschedule(problem: Problem, extents: Extents, op_kind: str, planned: Schedule) -> Schedule:
    """Returns the native core's plan for `extents`, which has other key lengths and bands of the same sequences:
    `planned` (the previous plan), updated in place, if it is a decode plan and still suits, else a new plan."""
    if isinstance(planned, decode.Schedule) and planned.update(problem, extents):
        return planned
    return schedule(problem, extents, op_kind)


def workspace_bytes(problem: AnyProblem, extents: Extents, op_kind: str) -> int:
    """Returns the bytes that an operation allocates besides operands and results, with torch's number of threads."""
    return schedule(problem, extents, op_kind).workspace_bytes(torch.get_num_threads())


def attention_forward(
    problem: Problem,
    extents: Extents,
    schedule: ForwardPlan | SparsePlan | decode.Schedule | full_int8.Schedule,
    operands: Operands,
) -> None:
    """Writes attention's out, and the softmax's max and sum, to `operands`; the schedule's type selects the kernel."""
    if len(extents) == 0:
        return
    if isinstance(schedule, SparsePlan):
        run_sparse_forward(schedule, problem, operands)
        return
    if isinstance(schedule, full_int8.Schedule):
        empty_rows = full_int8.run(schedule, problem, extents, operands)
    elif isinstance(schedule, decode.Schedule):
        empty_rows = decode.run(schedule, problem, operands)
    else:
        empty_rows = run_forward(schedule, problem, operands)
    if empty_rows and problem.empty_rows != "zero":
        add_means(problem, extents, operands)


def prepare(problem: Any, schedule: Schedule, operands: Any, names: tuple[str, ...]) -> Callable[..., bool] | None:
    """Returns a function that repeats a forward on other tensors of equal shapes and strides; None for some plans.

    The function takes tensors in the order of `names`, and returns False if it did not write the means of V for rows
    without visible keys. operands: views of the first call's tensors.
    """
    prepared: PreparedForward | PreparedDecode | PreparedIndexer | PreparedSparse
    if isinstance(schedule, IndexerPlan):
        prepared = schedule.prepare(lists_of(problem, operands), names)
    elif isinstance(schedule, SparsePlan):
        prepared = prepare_sparse(schedule, problem, operands, names)
    elif isinstance(schedule, decode.Schedule) and schedule.dense is None:
        prepared = decode.prepare(schedule, problem, operands, names)
    elif isinstance(schedule, ForwardPlan):
        prepared = prepare_forward(schedule, problem, operands, names)
    else:
        return None
    run, complete = prepared.run, not isinstance(problem, Problem) or problem.empty_rows == "zero"
    return lambda *tensors: run(torch.get_num_threads(), *tensors) == 0 or complete


def keep(operands: Any) -> Any:
    """Returns `operands` with a cache of the C++ core's arguments; None for operands of the indexer or of pooling."""
    return KeptOperands(**vars(operands)) if isinstance(operands, Operands) else None


def attention_backward(
    problem: Problem, extents: Extents, schedule: BackwardPlan | SparsePlan, operands: Operands, grads: Grads
) -> None:
    """Writes attention's gradients to `grads` from saved out, max and sum; adds to dbias unless grads.owns_dbias."""
    if len(extents) == 0:
        if grads.dsink is not None:
            grads.dsink.zero_()
        return
    if isinstance(schedule, SparsePlan):
        run_sparse_backward(schedule, problem, operands, grads)
        return
    if run_backward(schedule, problem, operands, grads):
        add_mean_gradients(problem, extents, operands, grads)
