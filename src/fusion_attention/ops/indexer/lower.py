"""Conversion of validated calls of the lightning indexer, forward and gradient, to objects that back ends compute."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusion_attention.contract import Bound, dtype_text
from fusion_attention.ir.problem import Extents, IndexerProblem
from fusion_attention.ops.indexer.lowered_call import INPUTS, Indexer, IndexerBackward
from fusion_attention.ops.sparse.lower import extents_of
from fusion_attention.ops.sparse.lowered_call import page_table


def indexer_call(bound: Bound) -> Indexer:
    """Returns the forward call, as back ends compute it, of a validated forward or gradient call of the indexer."""
    n = bound.names
    problem, extents = bound.once(lambda n: (_problem(n), bounded_extents(n)))
    form = bound.op.layout_of(bound.op.by_name["key"], n)  # type: ignore[arg-type]  # a tensor
    tensors = {name: n[name] for name in INPUTS} | {"block_table": page_table(n["block_table"])}
    return Indexer(extents, n["layout"], tensors, problem, n["index_offset"], layout_kv=form)


def bounded_extents(n: Mapping[str, Any]) -> Extents:
    """Returns the Extents (lengths, bands of visible keys) of a call in which each key stands for n["ratio"] tokens. n:
    arguments and derived values; n["residual"]: number of tokens after those of the last key; None: query rows are all
    tokens of the sequence, and the residual is their number modulo ratio."""
    extents, ratio = extents_of(n), n["ratio"]
    if n.get("q_start") is not None:  # operators whose sequences may be followed by unused rows
        extents = replace(extents, starts=(n["q_start"], n["k_start"]))
    if ratio == 1 or n["sparse_mode"] != 3:
        return extents
    behind = n["q_len"] % ratio if n["residual"] is None else n["residual"]
    return replace(extents, hi=n["kv_len"] * ratio + behind - n["q_len"] + 1)


def lower(bound: Bound) -> Indexer | IndexerBackward:
    """Converts a validated call of the lightning indexer, forward or gradient, to an object that back ends compute."""
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
        has_values=bool(n["return_values"]),
        page_size=n["Ps"] if n["block_table"] is not None else 0,
        wide_values=n["wide_values"],
        ratio=n["ratio"] if n["sparse_mode"] == 3 else 1,
    )
