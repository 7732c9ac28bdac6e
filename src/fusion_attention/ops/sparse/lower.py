"""Lowering of a checked call of sparse attention to a lowered call (Sparse)."""

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
    """Returns the lengths and bands of a call with values `n`: causal in sparse mode 3, else all keys."""
    band = Band.causal() if n["sparse_mode"] == 3 else Band.full()
    return Extents(n["q_len"], n["kv_len"], *band.resolve(n["q_len"], n["kv_len"]), np.zeros_like(n["q_len"]))


def tensors_of(n: Mapping[str, Any], *further: str) -> dict[str, Any]:
    """Returns {name: input tensor} of a call with values `n`, and those in `further`, as kernels read them."""
    tensors = {name: n[name] for name in (*DIFFERENTIABLE, *OTHERS, *further)}
    if n["K"] == 0:  # Kernels require an entry; -1 ends a list.
        lists = n["sparse_indices"]
        tensors["sparse_indices"] = lists.new_full((*lists.shape[:-1], 1), -1)
    return tensors | {"sinks": to_float32(n["sinks"], n["query"]), "block_table": page_table(n["block_table"])}


def sparse_call(bound: Bound) -> Sparse:
    """Converts a checked forward or gradient call `bound` of sparse attention to its forward call for the back ends."""
    n = bound.names
    problem, extents = bound.once(lambda n: (problem_of(n), extents_of(n)))
    form = keys_in(n["layout"], n["layout_kv"], n["block_table"])
    return Sparse(extents, n["layout"], tensors_of(n), problem, form, n["return_softmax_lse"])


def lower(bound: Bound) -> Sparse | SparseBackward:
    """Converts a checked call `bound` of sparse attention, forward or gradient, to the form that back ends compute."""
    call = sparse_call(bound)
    if "dy" not in bound.op.by_name:
        return call
    return SparseBackward(call, *(bound[name] for name in ("dy", "attention_in", *STATISTICS)))


def problem_of(n: Mapping[str, Any]) -> Problem:
    """Returns the Problem (heads, sizes, dtypes, scale, ...) of a checked call with argument values `n`."""
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
