"""The Triton back end: all operations on NVIDIA GPUs. The first computation imports Triton, this module does not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fusion_attention.backends.triton.common import shapes
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.ir.pooling import PoolingGrads, PoolingOperands, PoolingProblem
from fusion_attention.ir.problem import (
    PLAIN_SELECTION,
    AnyProblem,
    Extents,
    Grads,
    IndexerGrads,
    IndexerLossOperands,
    IndexerLossProblem,
    IndexerOperands,
    IndexerProblem,
    Operands,
    Problem,
)

if TYPE_CHECKING:
    from fusion_attention.backends.triton.common.launching import Schedule

NAME = "triton"
DTYPES = ("float32", "float16", "bfloat16")
MAJORS = (8, 9, 10, 12)  # major compute capabilities for which the kernels were compiled
TRITONS = ((3, 6), (3, 8))  # oldest and newest supported versions of Triton
# Names of an operation's tables of tile shapes; only the decode kernels read caches.
TABLES = {"attention_forward": ("forward", "decode"), "attention_backward": ("query", "key")}
ALL = ("forward", "query", "key", "decode")


def against_triton() -> list[str]:
    """Returns the reasons why Triton cannot compile the kernels: it is missing, or has an untested version."""
    try:
        import triton
    except ImportError:
        return ["the triton back end needs the package triton, which is not installed."]
    result = re.findall(r"\d+", triton.__version__)
    oldest, newest = (".".join(map(str, version)) for version in TRITONS)
    if TRITONS[0] <= tuple(map(int, result[:2])) <= TRITONS[1]:
        return []
    return [f"the triton back end was compiled with triton {oldest} to {newest}, not with {triton.__version__}."]


def interpreted() -> bool:
    """Returns True if kernels run under Triton's interpreter, on the CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def against_device(device: torch.device) -> list[str]:
    """Returns the reasons why a device cannot run the kernels."""
    if against := against_triton():
        return against
    if interpreted():
        return []
    if device.type != "cuda":
        return [f"the triton back end computes device cuda, not {device.type}."]
    if torch.version.hip is not None:
        return ["the triton back end computes on NVIDIA GPUs, not on AMD's."]
    if not torch.cuda.is_available():
        return ["the triton back end finds no GPU."]
    major = torch.cuda.get_device_capability(device)[0]
    if major not in MAJORS:
        served = ", ".join(f"sm_{major_served}x" for major_served in MAJORS)
        return [f"the triton back end was compiled for {served}, not for sm_{major}x."]
    if shapes.chip_of(device) is None:
        least, available_kb = min(kb for _, kb in shapes.CHIPS.values()), shapes.shared_memory(shapes.index_of(device))
        return [f"the triton back end needs {least} KB of shared memory; this GPU has {available_kb} KB."]
    return []


def against_shape(problem: Problem, device: torch.device, op_kind: str) -> list[str]:
    """Returns the reasons why a problem's sizes are not supported: no tile shape fits them on the device."""
    p, reasons = problem, []
    if p.dim_rope > shapes.WIDEST_ROPE:
        reasons.append(f"the triton back end computes dim_rope up to {shapes.WIDEST_ROPE}, not {p.dim_rope}.")
    if p.dtype not in DTYPES:
        return reasons
    chip = shapes.chip_of(device)
    kernels = TABLES.get(op_kind, ALL) if not (p.page_size or p.kv_dtype) else ("decode",)
    if chip is not None and any(shapes.row_of(kernel, p, chip) is None for kernel in kernels):
        sizes = f"dim_qk {p.dim_qk}, dim_rope {p.dim_rope} and dim_v {p.dim_v} in {p.dtype}"
        reasons.append(f"the triton back end has no tile for {sizes}: shared memory or registers do not hold one.")
    return reasons


def against_cache(problem: Problem) -> list[str]:
    """Returns the reasons why the decode kernels do not support a problem with a cache."""
    p = problem
    if not p.page_size and not p.kv_dtype:
        return []
    reasons = []
    if p.dropout != "none":
        reasons.append("the triton back end computes no dropout with a paged or quantised cache.")
    if p.empty_rows != "zero":
        reasons.append("the triton back end computes empty rows as zeros only, with a paged or quantised cache.")
    return reasons


def refused(table: tuple[tuple[str, object, tuple[object, ...]], ...]) -> list[str]:
    """Returns a sentence for each row (what, given, accepted) whose given value is not accepted."""
    return [
        f"the triton back end computes {what} {', '.join(map(str, accepted))}, not {given}."
        for what, given, accepted in table
        if given not in accepted
    ]


def against_dense(problem: Problem) -> list[str]:
    """Returns the reasons why the dense and decode kernels do not support a problem."""
    p = problem
    unknown = refused(
        (
            ("dtype", p.dtype, DTYPES),
            ("kv_dtype", p.kv_dtype or "as dtype", ("as dtype", "int8")),
            ("out_quant", p.out_quant, ("none",)),
            ("common_keys", p.common_keys, (0,)),
            ("has_row_scale", p.has_row_scale, (False,)),
            ("has_weight_scale", p.has_weight_scale, (False,)),
        )
    )
    if p.has_blocked_tiles:
        unknown.append("the triton back end computes no blocked tiles: give them as a matrix, blocked.")
    return unknown


def against_selection(problem: Problem) -> list[str]:
    """Returns the reasons why the kernels of selected keys do not support a problem."""
    p, what = problem, "select_count" if problem.select_count else "compressed_ratio"
    return refused(
        (
            ("dtype", p.dtype, DTYPES),
            *((f"{name} with {what}", getattr(p, name), (value,)) for name, value in PLAIN_SELECTION.items()),
        )
    )


def against_family(problem: AnyProblem, device: torch.device, op_kind: str) -> list[str]:
    """Returns the reasons why kernels of selected keys, of the indexer or its loss do not support a problem's sizes."""
    chip = shapes.chip_of(device)
    if problem.dtype not in DTYPES or chip is None:
        return []
    return shapes_sparse.against(problem, op_kind, chip)


def reasons_against(problem: AnyProblem, device: torch.device | str, op_kind: str = "") -> list[str]:
    """Returns a sentence for each property of the problem that is not supported; op_kind "": by some operation."""
    p, where = problem, torch.device(device)
    against = against_device(where)
    if isinstance(p, IndexerProblem | IndexerLossProblem):
        against += refused((("dtype", p.dtype, DTYPES), ("weights_dtype", p.weights_dtype, DTYPES)))
        return against + against_family(p, where, op_kind)
    if isinstance(p, PoolingProblem):
        return against + refused((("dtype", p.dtype, DTYPES),))
    if p.selects:
        return against + against_selection(p) + against_family(p, where, op_kind)
    return against + against_dense(p) + against_shape(p, where, op_kind) + against_cache(p)


def schedule(problem: AnyProblem, extents: Extents, op_kind: str) -> Schedule:
    """Returns the schedule of an operation on given lengths; the first run on a device adds the device's tables."""
    from fusion_attention.backends.triton.common import launching
    from fusion_attention.backends.triton.decode import launch as launch_decode

    if isinstance(problem, Problem) and op_kind == "attention_forward" and not problem.selects:
        return launching.plan(extents, op_kind, launch_decode.serves(problem, extents))
    return launching.plan(extents, op_kind)


def workspace_bytes(problem: AnyProblem, extents: Extents, op_kind: str) -> int:
    """Returns the most bytes that an operation allocates besides operands and results."""
    planned = schedule(problem, extents, op_kind)
    if isinstance(problem, PoolingProblem):
        from fusion_attention.backends.triton.windows import launch as launch_pooling

        return launch_pooling.workspace_bytes(problem, planned)
    if isinstance(problem, IndexerLossProblem) or (isinstance(problem, IndexerProblem) and op_kind == "indexer_lse"):
        from fusion_attention.backends.triton.indexer import launch_loss

        return launch_loss.workspace_bytes(problem, planned)
    if isinstance(problem, IndexerProblem):
        from fusion_attention.backends.triton.indexer import launch as launch_indexer

        return launch_indexer.workspace_bytes(problem, planned)
    if planned.decodes:
        from fusion_attention.backends.triton.decode import launch as launch_decode

        return launch_decode.workspace_bytes(problem, planned)
    if op_kind == "attention_forward":
        from fusion_attention.backends.triton.selected import launch as launch_sparse

        return launch_sparse.workspace_bytes(problem, planned) if problem.selects else 0
    if problem.selects:
        from fusion_attention.backends.triton.selected import launch_backward as launch_sparse_backward

        return launch_sparse_backward.workspace_bytes(problem, planned)
    from fusion_attention.backends.triton.dense import launch as launch_dense

    return launch_dense.workspace_bytes(problem, planned)


def reschedule(problem: AnyProblem, extents: Extents, op_kind: str, schedule: Schedule) -> Schedule:
    """Updates a schedule to other key lengths of the same rows, also for CUDA graphs that were captured with it."""
    schedule.update(extents)
    return schedule


def nothing(*_: Any) -> None:
    """Returns None: there are no prepared calls."""


prepare = keep = nothing


def attention_forward(problem: Problem, extents: Extents, schedule: Schedule, operands: Operands) -> None:
    """Writes operands.out and operands.stats for every row of every sequence."""
    from fusion_attention.backends.triton.common import layout_table
    from fusion_attention.backends.triton.decode import launch as launch_decode
    from fusion_attention.backends.triton.dense import launch as launch_dense
    from fusion_attention.backends.triton.selected import launch as launch_sparse

    if not len(extents):
        return
    run = launch_decode.run if schedule.decodes else launch_dense.run_forward
    if problem.selects:
        run = launch_sparse.run
    with layout_table.on(layout_table.tensor_of(operands.q).device):
        run(problem, extents, schedule, operands)


def attention_backward(
    problem: Problem, extents: Extents, schedule: Schedule, operands: Operands, grads: Grads
) -> None:
    """Writes all gradients (adds to dbias unless owns_dbias) from the saved statistics and the saved out.

    Bits are the same in every run, except dbias of a broadcast bias, whose sums have no fixed order.
    """
    from fusion_attention.backends.triton.common import layout_table

    if not len(extents):
        if grads.dsink is not None:
            grads.dsink.zero_()
        return
    with layout_table.on(layout_table.tensor_of(operands.q).device):
        if problem.selects:
            from fusion_attention.backends.triton.selected import launch_backward as launch_sparse_backward

            launch_sparse_backward.run(problem, extents, schedule, operands, grads)
            return
        from fusion_attention.backends.triton.dense import launch as launch_dense

        if grads.dbias is None or not grads.owns_dbias:
            launch_dense.run_backward(problem, extents, schedule, operands, grads)
            return
        owned = grads.dbias.keep
        summed = torch.zeros_like(owned, dtype=torch.float32)  # A copy: kernels add to dbias.
        grads = replace(grads, dbias=replace(grads.dbias, keep=summed), owns_dbias=False)
        launch_dense.run_backward(problem, extents, schedule, operands, grads)
        owned.copy_(summed)


def indexer_topk(problem: IndexerProblem, extents: Extents, schedule: Schedule, operands: IndexerOperands) -> None:
    """Writes operands.indices, and operands.values if problem.has_values, for every row of every sequence."""
    from fusion_attention.backends.triton.common import layout_table
    from fusion_attention.backends.triton.indexer import launch as launch_indexer

    if len(extents):
        with layout_table.on(layout_table.tensor_of(operands.q).device):
            launch_indexer.run_topk(problem, extents, schedule, operands)


def indexer_backward(
    problem: IndexerProblem, extents: Extents, schedule: Schedule, operands: IndexerOperands, grads: IndexerGrads
) -> None:
    """Writes dq, dk and dweights from the selected indices; the same bits in every run."""
    from fusion_attention.backends.triton.common import layout_table
    from fusion_attention.backends.triton.indexer import launch as launch_indexer

    if len(extents):
        with layout_table.on(layout_table.tensor_of(operands.q).device):
            launch_indexer.run_backward(problem, extents, schedule, operands, grads)


def indexer_lse(problem: IndexerProblem, extents: Extents, schedule: Schedule, operands: IndexerOperands) -> None:
    """Writes operands.stats: max_j I_j, and sum_j exp(I_j - max), over the keys in the band."""
    from fusion_attention.backends.triton.common import layout_table
    from fusion_attention.backends.triton.indexer import launch_dense_kl_loss

    if len(extents):
        with layout_table.on(layout_table.tensor_of(operands.q).device):
            launch_dense_kl_loss.run_lse(problem, extents, schedule, operands)


def indexer_loss(
    problem: IndexerLossProblem,
    extents: Extents,
    schedule: Schedule,
    operands: IndexerLossOperands,
    grads: IndexerGrads,
) -> None:
    """Writes operands.loss, summed over all rows, and its gradients dq, dk and dweights; the same bits in every run."""
    from fusion_attention.backends.triton.common import layout_table
    from fusion_attention.backends.triton.indexer import launch_loss

    if not len(extents):
        operands.loss.zero_()
        return
    with layout_table.on(layout_table.tensor_of(operands.index.q).device):
        launch_loss.run_loss(problem, extents, schedule, operands, grads)


def pooling(problem: PoolingProblem, extents: Extents, schedule: Schedule, operands: PoolingOperands) -> None:
    """Writes operands.out for every window of every sequence."""
    from fusion_attention.backends.triton.common import layout_table
    from fusion_attention.backends.triton.windows import launch as launch_pooling

    if len(extents):
        with layout_table.on(layout_table.tensor_of(operands.kv).device):
            launch_pooling.run(problem, extents, schedule, operands)


def pooling_backward(
    problem: PoolingProblem, extents: Extents, schedule: Schedule, operands: PoolingOperands, grads: PoolingGrads
) -> None:
    """Writes the gradients of all rows and gates, and of the bias if it is wanted; the same bits in every run."""
    from fusion_attention.backends.triton.common import layout_table
    from fusion_attention.backends.triton.windows import launch as launch_pooling

    if len(extents):
        with layout_table.on(layout_table.tensor_of(operands.kv).device):
            launch_pooling.run_backward(problem, extents, schedule, operands, grads)
