"""Lowers a bound call of the indexer's loss or of its statistics to the intermediate representation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusion_attention.contract import Bound, dtype_text
from fusion_attention.ir.problem import IndexerLossProblem, IndexerProblem
from fusion_attention.ops.indexer_loss.call import DIFFERENTIABLE, INPUTS, Loss, Statistics
from fusion_attention.ops.shared.layouts import wide
from fusion_attention.ops.shared.params import scale_of
from fusion_attention.ops.sparse.lower import extents_of


def lower(bound: Bound) -> Loss | Statistics:
    """A bound record of the loss, or of the indexer's statistics."""
    n = bound.names
    if "query" not in bound.op.by_name:
        indexer, extents = bound.once(lambda n: (_indexer(n), extents_of(n)))
        return Statistics(extents, n["layout"], {name: n[name] for name in DIFFERENTIABLE}, indexer)
    problem, extents = bound.once(lambda n: (_loss(n), extents_of(n)))
    tensors = {name: n[name] for name in INPUTS} | {"sinks": wide(n["sinks"], n["query"])}
    return Loss(extents, n["layout"], tensors, problem)


def _indexer(n: Mapping[str, Any]) -> IndexerProblem:
    return IndexerProblem(n["N1"], n["D"], dtype_text(n["query_index"]), dtype_text(n["weights"]), top_k=0)


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
