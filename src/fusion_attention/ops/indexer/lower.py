"""Lowers a bound call of the indexer to the intermediate representation (Indexer)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusion_attention.contract import Bound, dtype_text
from fusion_attention.ir.problem import IndexerProblem
from fusion_attention.ops.indexer.call import INPUTS, Indexer, IndexerBackward
from fusion_attention.ops.sparse.call import page_table
from fusion_attention.ops.sparse.checks import keys_in
from fusion_attention.ops.sparse.lower import extents_of


def indexer_call(bound: Bound) -> Indexer:
    """The call of a bound record of the indexer."""
    n = bound.names
    problem, extents = bound.once(lambda n: (_problem(n), extents_of(n)))
    form = keys_in(n["layout"], n["layout_kv"], n["block_table"])
    tensors = {name: n[name] for name in INPUTS} | {"block_table": page_table(n["block_table"])}
    return Indexer(extents, n["layout"], tensors, problem, form)


def lower(bound: Bound) -> Indexer | IndexerBackward:
    """A bound record of the indexer, forward or gradient."""
    call = indexer_call(bound)
    if "dy" not in bound.op.by_name:
        return call
    return IndexerBackward(call, bound["dy"], bound["sparse_indices"])


def _problem(n: Mapping[str, Any]) -> IndexerProblem:
    return IndexerProblem(
        heads=n["N1"],
        dim=n["D"],
        dtype=dtype_text(n["query"]),
        weights_dtype=dtype_text(n["weights"]),
        top_k=n["K"],
        has_values=n["return_values"],
        page_size=n["Ps"] if n["block_table"] is not None else 0,
    )
