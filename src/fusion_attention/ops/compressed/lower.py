"""Conversion of checked calls of attention with compressed keys to sparse attention with two sources of keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fusion_attention.contract import Bound
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Compressed, Extents
from fusion_attention.ops.compressed.lowered_call import COUNTS, FlashMla
from fusion_attention.ops.sparse.checks import keys_in
from fusion_attention.ops.sparse.lower import extents_of, problem_of, tensors_of
from fusion_attention.ops.sparse.lowered_call import COMPRESSED, Call, Sparse, page_table


def lower(bound: Bound) -> Sparse:
    """Converts `bound`, checked arguments of attention with compressed keys, to an object that back ends compute."""
    return call_of(bound, Sparse)


def call_of(bound: Bound, kind: type[Call]) -> Call:
    """Converts `bound`, checked arguments with two sources of keys, to an object of class `kind` for back ends."""
    n = bound.names
    problem, extents, second = bound.once(lambda n: (problem_of(n), *_extents(n)))
    tensors = tensors_of(n, *COMPRESSED) | {"compressed_table": page_table(n["compressed_table"])}
    if (lists := tensors["sparse_indices"]) is not None:  # one list for all heads
        tensors["sparse_indices"] = lists.expand(*lists.shape[:-2], n["N2"], -1)
    if tensors["key_compressed"] is None:  # a second source without keys
        k = n["key"]
        tensors["key_compressed"] = k.new_zeros((len(n["q_len"]), 0, *k.shape[-2:])[n["layout"] == "TND" :])
    form, compressed = (keys_in(n["layout"], None, n[table]) for table in ("block_table", "compressed_table"))
    return kind(extents, n["layout"], tensors, problem, form, n["return_softmax_lse"], (compressed, second))


def chosen_keys(bound: Bound) -> FlashMla:
    """Converts `bound`, checked arguments with lists of selected keys (one source, no causal band), for back ends."""
    n = bound.names
    problem, extents = bound.once(
        lambda n: (
            replace(problem_of(n), select_count=n["Ko"], compressed_ratio=0),
            replace(extents_of({**n, "sparse_mode": 0}), starts=(n["q_start"], n["kv_start"])),
        )
    )
    tensors = tensors_of(n, *COMPRESSED) | {"sparse_indices": n["ori_sparse_indices"], COUNTS: n["ori_topk_length"]}
    form = keys_in(n["layout"], None, n["block_table"])
    return FlashMla(extents, n["layout"], tensors, problem, form, n["return_softmax_lse"])


def _extents(n: Mapping[str, Any]) -> tuple[Extents, Extents]:
    """Returns the Extents (lengths, bands of visible keys) of a call, and Extents whose kv_len counts compressed keys.
    A compressed key is visible to its last token and later ones, so the number of visible ones follows the causal
    diagonal."""
    q_len, kv_len, none = n["q_len"], n["kv_len"], np.zeros_like(n["q_len"])
    lo, hi, prefix = (n["band"] or Band.causal()).resolve(q_len, kv_len)
    extents, second = Extents(q_len, kv_len, lo, hi, prefix, none), Extents(q_len, n["c_len"], none, none, none, none)
    if n.get("q_start") is not None:  # operators whose sequences may be followed by padding rows
        extents, second = (
            replace(e, starts=(n["q_start"], n[start])) for e, start in ((extents, "kv_start"), (second, "c_start"))
        )
    tokens = kv_len if n["residual"] is None else n["c_len"] * n["ratio"] + n["residual"]
    extents = replace(extents, compressed=Compressed(n["c_len"], tokens - q_len + 1))
    return extents, second
