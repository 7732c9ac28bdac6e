"""Conversion of validated calls of the lightning indexer's loss, or of its softmax statistics, for back ends."""

from collections.abc import Mapping
from typing import Any

from fusion_attention.contract import Bound, dtype_text
from fusion_attention.ir.problem import IndexerLossProblem, IndexerProblem
from fusion_attention.ops.indexer.lower import bounded_extents
from fusion_attention.ops.indexer_loss.lowered_call import (
    DIFFERENTIABLE,
    INPUTS,
    TARGET_INPUTS,
    LogSum,
    Loss,
    Statistics,
    TargetLoss,
)
from fusion_attention.ops.shared.layouts import to_float32
from fusion_attention.ops.shared.params import scale_of
from fusion_attention.ops.sparse.lower import extents_of


def lower(bound: Bound) -> Loss | Statistics:
    """Converts a validated call `bound` of an indexer's KL loss, or of its softmax statistics, for back ends."""
    n = bound.names
    if "query" not in bound.op.by_name:
        indexer, extents = bound.once(lambda n: (_indexer(n), extents_of(n)))
        return Statistics(extents, n["layout"], {name: n[name] for name in DIFFERENTIABLE}, indexer)
    problem, extents = bound.once(lambda n: (_loss(n), extents_of(n)))
    tensors = {name: n[name] for name in INPUTS} | {"sinks": to_float32(n["sinks"], n["query"])}
    return Loss(extents, n["layout"], tensors, problem)


def lower_lse(bound: Bound) -> LogSum:
    """Converts a validated call `bound` of the log-sum-exp of an indexer's scores to a LogSum, for back ends."""
    n = bound.names
    indexer, extents = bound.once(lambda n: (_indexer(n), bounded_extents(n)))
    return LogSum(extents, n["layout"], {name: n[name] for name in DIFFERENTIABLE}, indexer)


def lower_target(bound: Bound) -> TargetLoss:
    """Converts a validated call `bound` of an indexer's loss with a target passed to a TargetLoss, for back ends."""
    n, names = bound.names, bound.op.results
    problem, extents = bound.once(lambda n: (_target_loss(n, "loss" not in names), bounded_extents(n)))
    return TargetLoss(extents, n["layout"], {name: n[name] for name in TARGET_INPUTS}, problem, names)


def _target_loss(n: Mapping[str, Any], unit: bool) -> IndexerLossProblem:
    listed = n["sparse_indices"] is not None
    return IndexerLossProblem(
        heads_q=0,
        heads_kv=0,
        dim_qk=0,
        heads_index=n["N1"],
        dim_index=n["D"],
        dtype=dtype_text(n["query_index"]),
        weights_dtype=dtype_text(n["weights"]),
        select_count=n["K"] if listed else 0,
        ratio=_ratio(n),
        unit_target=unit and not listed,
    )


def _indexer(n: Mapping[str, Any]) -> IndexerProblem:
    return IndexerProblem(
        n["N1"], n["D"], dtype_text(n["query_index"]), dtype_text(n["weights"]), top_k=0, ratio=_ratio(n)
    )


def _ratio(n: Mapping[str, Any]) -> int:
    return int(n["ratio"]) if n["sparse_mode"] == 3 else 1


def _loss(n: Mapping[str, Any]) -> IndexerLossProblem:
    rope = n["Dr"] or 0
    return IndexerLossProblem(
        heads_q=n["N1"],
        heads_kv=n["N2"],
        dim_qk=n["D"],
        heads_index=n["Ni"],
        dim_index=n["Di"],
        dim_rope=rope if n["query_rope"] is not None else 0,
        dtype=dtype_text(n["query"]),
        weights_dtype=dtype_text(n["weights"]),
        scale=scale_of(n["scale_value"], n["D"], rope),
        has_sink=n["sinks"] is not None,
        select_count=n["K"] if n["sparse_indices"] is not None else 0,
    )
