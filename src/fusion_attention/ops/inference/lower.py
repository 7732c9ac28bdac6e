"""Conversion of a validated call of CANN's IncreFlashAttention to an InferenceCall, which back ends compute.

Parameters that a version of the operator lacks have values without effect (Op.neutral).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Bound, dtype_text
from fusion_attention.ir.mask import INFINITE, Band
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.memory import empty
from fusion_attention.ops.inference.cache import Cache, Scales, per_channel, stored_as
from fusion_attention.ops.inference.checks import page_layout, sizes
from fusion_attention.ops.inference.lowered_call import InferenceCall, extents_of

RESULTS = ("attention_out",)


def geometry(n: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from the arguments `n`: heads, lengths, index of each sequence's first token in the
    KV cache (first), lengths that are computed (used), columns of a mask, and whether padding is on the left."""
    paged, batch = n["block_table"] is not None, n["B"]
    heads = n["num_key_value_heads"] or n["N1"]
    layout = page_layout(n["key"][0]) if paged else n["input_layout"]
    results = [sizes(t, layout, heads) or (0, 0, 0) for t in n["key"]]
    tokens = np.array([size[1] for size in results], np.int64)
    capacity = np.full(batch, INFINITE, np.int64) if paged else np.broadcast_to(tokens, batch)
    given = n["actual_seq_lengths"]
    kv_len = capacity if given is None else np.broadcast_to(given[0], batch) if len(given) == 1 else given[:batch]
    kv_len = np.array(kv_len, np.int64)
    padding = n["kv_padding_size"]
    pads_left = padding is not None and not paged and given is not None and len(results) == 1
    first = np.zeros(batch, np.int64)
    if pads_left:
        first = capacity - max(int(padding[0]), 0) - kv_len
    # A sequence that does not fit before the padding counts as empty, as on the chip.
    used = np.where(first < 0, 0, kv_len)
    columns = int((np.maximum(first, 0) + used).max(initial=0))
    return {
        "N2": heads,
        "S2": int(tokens.max(initial=0)),
        "blocks": results[0][0],
        "capacity": capacity,
        "kv_len": kv_len,
        "first": first,
        "used": used,
        "columns": columns,
        "pads_left": pads_left,
        "cache_layout": layout,
    }


def fresh(n: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Allocates {"attention_out": tensor}, in the query's shape, int8 with quant_scale2; n: arguments by name."""
    q = n["query"]
    return {"attention_out": empty(q, q.shape, q.dtype if n["quant_scale2"] is None else torch.int8)}


def lower(bound: Bound) -> InferenceCall:
    """Converts a validated call `bound` of IncreFlashAttention to an InferenceCall, which back ends compute."""
    n = bound.names
    problem, extents, cache, first = bound.once(_without_tensors)
    stored = n["key"], n["value"], n["block_table"]
    call = InferenceCall(
        problem, extents, n["input_layout"], cache, n["query"], *stored, first, call_cache=bound.call_cache
    )
    if problem.dequant_k != "none":
        call.k_dequant, call.v_dequant = (_scales(n, i) for i in (0, 1))
    if problem.bias != "none":
        call.bias = n["pse_shift"]
    if problem.has_blocked:
        call.blocked = _blocked(n["atten_mask"])
    if problem.out_quant != "none":
        call.out_quant = n["quant_scale2"], n["quant_offset2"]
    return call


def _without_tensors(n: dict[str, Any]) -> tuple[Problem, Extents, Cache, np.ndarray | None]:
    cache = Cache(n["cache_layout"], n["block_size"] if n["block_table"] is not None else 0)
    return _problem(n), _extents(n), cache, np.maximum(n["first"], 0) if n["pads_left"] else None


def _blocked(mask: torch.Tensor) -> torch.Tensor:
    """Returns a mask [B, S], [B, 1, S] or [B, 1, 1, S] in the shape [B, 1, 1, S]."""
    return mask if mask.dim() == 4 else mask.reshape(mask.shape[0], 1, 1, mask.shape[-1])


def _scales(n: dict[str, Any], side: int) -> Scales:
    """Returns dequantisation scale and offset of keys (side 0) or values (1), expanded to [N2, D]; n: arguments."""
    scale, offset = (None if t is None else t[side] for t in (n["antiquant_scale"], n["antiquant_offset"]))
    return per_channel(scale, offset, n["N2"], n["D"])


def _extents(n: dict[str, Any]) -> Extents:
    q_len = np.full(n["B"], n["S1"], np.int64)
    # Several tokens of one step are causal, aligned to the last key.
    band = (Band.causal() if n["S1"] > 1 else Band.full()).resolve(q_len, n["used"])
    return extents_of(q_len, n["used"], band)


def _problem(n: dict[str, Any]) -> Problem:
    kv_dtype = stored_as(n["key"][0], n["query"].dtype)
    scales = n["quant_scale2"]
    bias = "matrix" if n["pse_shift"] is not None and not n["pse_reserved"] else "none"
    return Problem(
        heads_q=n["N1"],
        heads_kv=n["N2"],
        dim_qk=n["D"],
        dim_v=n["D"],
        dtype=dtype_text(n["query"]),
        scale=float(n["scale_value"]),
        bias=bias,
        has_blocked=n["atten_mask"] is not None,
        # Rows that a mask or a bias empties return the mean of V; rows with an empty band return zeros.
        empty_rows="mean_in_band" if n["atten_mask"] is not None or bias != "none" else "zero",
        page_size=n["block_size"] if n["block_table"] is not None else 0,
        kv_dtype=kv_dtype,
        dequant_k="channel" if kv_dtype else "none",
        dequant_v="channel" if kv_dtype else "none",
        out_quant="none" if scales is None else "tensor" if scales.numel() == 1 else "channel",
    )
