"""The Triton back end: all operations on NVIDIA GPUs. The first computation imports Triton, this module does not."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from fusion_attention.backends.triton.common import shapes
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.ir.pooling import PoolingOperands, PoolingProblem
from fusion_attention.ir.problem import (
    PLAIN_SELECTION,
    AnyProblem,
    Extents,
    IndexerLossOperands,
    IndexerLossProblem,
    IndexerProblem,
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
    """Returns True if kernels run in Triton's interpreter, on the CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def against_device(device: torch.device) -> list[str]:
    """Returns the reasons, as sentences, why a device cannot run the Triton kernels; [] if it can."""
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
    """Returns a sentence for each size of a problem that no tile shape of the operation's kernels supports on the
    device; [] if all are supported."""
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


def refused(table: Iterable[tuple[str, object, tuple[object, ...]]]) -> list[str]:
    """Returns a sentence for each (property, given value, accepted values) of `table` whose value is not accepted."""
    return [
        f"the triton back end computes {what} {', '.join(map(str, accepted))}, not {given}."
        for what, given, accepted in table
        if given not in accepted
    ]


def against_dense(problem: Problem, device: torch.device, op_kind: str) -> list[str]:
    """Returns a sentence for each property of a problem that dense and decode kernels do not support."""
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
    unknown += against_shape(p, device, op_kind)
    if (p.page_size or p.kv_dtype) and p.dropout != "none":
        unknown.append("the triton back end computes no dropout with a paged or quantised cache.")
    if (p.page_size or p.kv_dtype) and p.empty_rows != "zero":
        unknown.append("the triton back end computes empty rows as zeros only, with a paged or quantised cache.")
    return unknown


def reasons_against(problem: AnyProblem, device: torch.device | str, op_kind: str = "") -> list[str]:
    """Returns a sentence for each property of problem or device that an operation ("": any) does not support."""
    p, where = problem, torch.device(device)
    against = against_device(where)
    table: list[tuple[str, object, tuple[object, ...]]] = [("dtype", p.dtype, DTYPES)]
    if isinstance(p, IndexerProblem | IndexerLossProblem):
        table.append(("weights_dtype", p.weights_dtype, DTYPES))
    elif isinstance(p, Problem) and p.selects:
        what = "select_count" if p.select_count else "compressed_ratio"
        table += [(f"{name} with {what}", getattr(p, name), (value,)) for name, value in PLAIN_SELECTION.items()]
    elif isinstance(p, Problem):
        return against + against_dense(p, where, op_kind)
    against += refused(table)
    if isinstance(p, PoolingProblem) or p.dtype not in DTYPES or (chip := shapes.chip_of(where)) is None:
        return against
    return against + shapes_sparse.against(p, op_kind, chip)


def schedule(problem: AnyProblem, extents: Extents, op_kind: str) -> Schedule:
    """Returns an operation's Schedule for given lengths: kernel launches and tile tables, which the first run makes."""
    from fusion_attention.backends.triton.common import launching
    from fusion_attention.backends.triton.decode import launch as launch_decode

    if isinstance(problem, Problem) and op_kind == "attention_forward" and not problem.selects:
        return launching.plan(extents, op_kind, launch_decode.serves(problem, extents))
    return launching.plan(extents, op_kind)


def workspace_bytes(problem: AnyProblem, extents: Extents, op_kind: str) -> int:
    """Returns the most bytes that an operation allocates besides operands and results."""
    planned = schedule(problem, extents, op_kind)
    launches, _ = _launches(problem, planned)
    return int(launches.workspace_bytes(problem, planned))


# Operation -> (module, name of its function), and the same of attention to selected keys.
LAUNCHES = {
    "attention_forward": ("dense.launch", "run_forward"), "attention_backward": ("dense.launch", "run_backward"),
    "indexer_topk": ("indexer.launch", "run_topk"), "indexer_backward": ("indexer.launch", "run_backward"),
    "indexer_lse": ("indexer.launch_loss", "run_lse"), "indexer_loss": ("indexer.launch_loss", "run_loss"),
    "pooling": ("window_pooling.launch", "run"), "pooling_backward": ("window_pooling.launch", "run_backward"),
}  # fmt: skip
OF_SELECTED = {
    "attention_forward": ("selected.launch", "run"),
    "attention_backward": ("selected.launch_backward", "run"),
}
_imported = functools.lru_cache(importlib.import_module)


def _launches(problem: AnyProblem, schedule: Schedule) -> tuple[Any, str]:
    """Returns (module, name of its function) that launches a schedule's kernels, such as (decode.launch, "run")."""
    home, name = (OF_SELECTED if isinstance(problem, Problem) and problem.selects else LAUNCHES)[schedule.op_kind]
    if schedule.decodes:
        home, name = "decode.launch", "run"
    return _imported(f"{__name__}.{home}"), name


def reschedule(problem: AnyProblem, extents: Extents, op_kind: str, schedule: Schedule) -> Schedule:
    """Sets other key lengths of the same query rows in `schedule`, in place, and returns it; CUDA graphs that were
    captured with it then use these lengths."""
    schedule.update(extents)
    return schedule


def nothing(*_: Any) -> None:
    """Returns None: this back end has no functions that repeat a call."""


prepare = keep = nothing


def _run(problem: Any, extents: Extents, schedule: Schedule, operands: Any, grads: Any = None) -> None:
    """Launches the kernels of the schedule's operation, which write the results to the views in `operands` or `grads`.
    Results have the same bits in every run, except the dbias of a broadcast bias, whose sums have no fixed order."""
    from fusion_attention.backends.triton.common import layout_table

    if not len(extents):
        cleared = operands.loss if isinstance(operands, IndexerLossOperands) else getattr(grads, "dsink", None)
        if cleared is not None:
            cleared.zero_()
        return
    if grads is None and not schedule.rows:  # Forwards write rows alone. A graph may capture this call first.
        return
    launches, name = _launches(problem, schedule)
    rows = operands.index if isinstance(operands, IndexerLossOperands) else operands
    first = rows.kv if isinstance(rows, PoolingOperands) else rows.q
    with layout_table.on(layout_table.tensor_of(first).device):
        getattr(launches, name)(problem, extents, schedule, operands, *(() if grads is None else (grads,)))


attention_forward = attention_backward = _run
indexer_topk = indexer_backward = indexer_lse = indexer_loss = _run
pooling = pooling_backward = _run
