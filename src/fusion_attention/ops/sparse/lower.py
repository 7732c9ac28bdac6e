"""Conversion of validated calls of sparse attention, forward and gradient, to objects that back ends compute."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusion_attention.contract import Bound, dtype_text
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.ops.shared.layouts import to_float32
from fusion_attention.ops.shared.params import scale_of
from fusion_attention.ops.sparse.checks import keys_in
from fusion_attention.ops.sparse.lowered_call import (
    DIFFERENTIABLE,
    OTHERS,
    STATISTICS,
    Sparse,
    SparseBackward,
    page_table,
)


def extents_of(n: Mapping[str, Any]) -> Extents:
    """Returns the Extents (lengths, bands of visible keys), causal in sparse mode 3; n: arguments, derived values."""
    band = Band.causal() if n["sparse_mode"] == 3 else Band.full()
    return Extents(n["q_len"], n["kv_len"], *band.resolve(n["q_len"], n["kv_len"]), np.zeros_like(n["q_len"]))


def tensors_of(n: Mapping[str, Any], *further: str) -> dict[str, Any]:
    """Returns {name: input tensor}, as kernels read them, of a call with values `n`; further: names of more tensors."""
    tensors = {name: n[name] for name in (*DIFFERENTIABLE, *OTHERS, *further)}
    if n["K"] == 0:  # Kernels require an entry; -1 ends a list.
        lists = n["sparse_indices"]
        tensors["sparse_indices"] = lists.new_full((*lists.shape[:-1], 1), -1)
    return tensors | {"sinks": to_float32(n["sinks"], n["query"]), "block_table": page_table(n["block_table"])}


def sparse_call(bound: Bound) -> Sparse:
    """Returns the forward call, as back ends compute it, of a validated forward or gradient call of the operator."""
    n = bound.names
    problem, extents = bound.once(lambda n: (problem_of(n), extents_of(n)))
    form = keys_in(n["layout"], n["layout_kv"], n["block_table"])
    return Sparse(extents, n["layout"], tensors_of(n), problem, form, n["return_softmax_lse"])


def lower(bound: Bound) -> Sparse | SparseBackward:
    """Converts a validated call of sparse attention, forward or gradient, to an object that back ends compute."""
    call = sparse_call(bound)
    if "dy" not in bound.op.by_name:
        return call
    return SparseBackward(call, *(bound[name] for name in ("dy", "attention_in", *STATISTICS)))


def problem_of(n: Mapping[str, Any]) -> Problem:
    """Returns the Problem (heads, sizes, dtypes, scale, ...) of a validated call; n: arguments and derived values."""
    rope = n["Dr"] or 0
    return Problem(
        heads_q=n["N1"],
        heads_kv=n["N2"],
        dim_qk=n["D"],
        dim_v=n["Dv"],
        dim_rope=rope if n["query_rope"] is not None else 0,
        dtype=dtype_text(n["query"]),
        scale=scale_of(n["scale_value"], n["D"], rope),
        has_sink=n["sinks"] is not None,
        shares_kv=n["value"] is None,
        page_size=n["Ps"] if n["block_table"] is not None else 0,
        select_count=0 if n["sparse_indices"] is None else max(n["K"], 1),
        select_block=n["sparse_block_size"],
        compressed_ratio=n.get("ratio", 0),
    )
