"""Lowering of a checked call with compressed keys to a call of ops/sparse with two sources of keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from fusion_attention.contract import Bound, dtype_text
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Compressed, Extents, Problem
from fusion_attention.ops.compressed.lowered_call import COUNTS, FlashMla, placed
from fusion_attention.ops.shared.layouts import to_float32
from fusion_attention.ops.shared.params import scale_of
from fusion_attention.ops.sparse.checks import keys_in
from fusion_attention.ops.sparse.lowered_call import COMPRESSED, DIFFERENTIABLE, OTHERS, Sparse, page_table

Call = TypeVar("Call", bound=Sparse)


def lower(bound: Bound) -> Sparse:
    """Lowers a checked call (`bound`) of compressed attention."""
    return call_of(bound, Sparse)


def call_of(bound: Bound, kind: type[Call]) -> Call:
    """Lowers a checked call (`bound`) with two sources of keys to a call of class `kind`."""
    n = bound.names
    problem, extents, second = bound.once(lambda n: (_problem(n), *_extents(n)))
    tensors = {name: n[name] for name in (*DIFFERENTIABLE, *OTHERS, *COMPRESSED)}
    if n["K"] == 0:  # Kernels require an entry; -1 ends a list.
        lists = n["sparse_indices"]
        tensors["sparse_indices"] = lists.new_full((*lists.shape[:-1], 1), -1)
    if (lists := tensors["sparse_indices"]) is not None:  # one list for all heads
        tensors["sparse_indices"] = lists.expand(*lists.shape[:-2], n["N2"], -1)
    if tensors["key_compressed"] is None:  # a second source without keys
        k, form = n["key"], n["layout"]
        tensors["key_compressed"] = k.new_zeros((len(n["q_len"]), 0, *k.shape[-2:])[form == "TND" :])
    tensors |= {"sinks": to_float32(n["sinks"], n["query"])}
    tensors |= {name: page_table(n[name]) for name in ("block_table", "compressed_table")}
    layouts = (keys_in(n["layout"], None, n[table]) for table in ("block_table", "compressed_table"))
    form, compressed = layouts
    return kind(extents, n["layout"], tensors, problem, form, n["return_softmax_lse"], (compressed, second))


def chosen_keys(bound: Bound) -> FlashMla:
    """Lowers a checked call (`bound`) with lists of keys (ori_sparse_indices), one source and no causal band."""
    n = bound.names
    problem, extents = bound.once(lambda n: (_problem_of_chosen(n), _extents_of_chosen(n)))
    tensors = {name: n[name] for name in (*DIFFERENTIABLE, *COMPRESSED)} | {COUNTS: n["ori_topk_length"]}
    tensors |= {"sparse_indices": n["ori_sparse_indices"], "sinks": to_float32(n["sinks"], n["query"])}
    tensors["block_table"] = page_table(n["block_table"])
    form = keys_in(n["layout"], None, n["block_table"])
    return FlashMla(extents, n["layout"], tensors, problem, form, n["return_softmax_lse"])


def _extents_of_chosen(n: Mapping[str, Any]) -> Extents:
    q_len, kv_len = n["q_len"], n["kv_len"]
    extents = Extents(q_len, kv_len, *Band.full().resolve(q_len, kv_len), np.zeros_like(q_len))
    return placed(extents, n["q_start"], n["kv_start"])


def _problem_of_chosen(n: Mapping[str, Any]) -> Problem:
    return replace(_problem(n), select_count=n["Ko"], compressed_ratio=0)


def _extents(n: Mapping[str, Any]) -> tuple[Extents, Extents]:
    """The Extents of a call, and Extents whose kv_len are the numbers of compressed keys.

    A compressed key is visible to its last token and later ones, so the number of visible ones follows the causal
    diagonal.
    """
    q_len, kv_len, none = n["q_len"], n["kv_len"], np.zeros_like(n["q_len"])
    lo, hi, prefix = (n["band"] or Band.causal()).resolve(q_len, kv_len)
    extents, second = Extents(q_len, kv_len, lo, hi, prefix, none), Extents(q_len, n["c_len"], none, none, none, none)
    if n.get("q_start") is not None:  # operators whose sequences may be followed by padding rows
        extents, second = placed(extents, n["q_start"], n["kv_start"]), placed(second, n["q_start"], n["c_start"])
    tokens = kv_len if n["residual"] is None else n["c_len"] * n["ratio"] + n["residual"]
    extents = replace(extents, compressed=Compressed(n["c_len"], tokens - q_len + 1))
    return extents, second


def _problem(n: Mapping[str, Any]) -> Problem:
    return Problem(
        heads_q=n["N1"],
        heads_kv=n["N2"],
        dim_qk=n["D"],
        dim_v=n["Dv"],
        dtype=dtype_text(n["query"]),
        scale=scale_of(n["scale_value"], n["D"]),
        has_sink=n["sinks"] is not None,
        shares_kv=n["value"] is None,
        page_size=n["Ps"] if n["block_table"] is not None else 0,
        select_count=0 if n["sparse_indices"] is None else max(n["K"], 1),
        compressed_ratio=n["ratio"],
    )
