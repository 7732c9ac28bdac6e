"""Conversion of a validated call of CANN's fused inference attention to an InferenceCall, which back ends compute.

geometry.py derives lengths and shapes. Parameters that an operator definition lacks have values without effect
(Op.neutral).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_attention.contract import Bound, dtype_text, members
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.memory import empty
from fusion_attention.ops.fused.geometry import lse_shape, of_inputs, of_output, out_dtype, out_shape
from fusion_attention.ops.inference.cache import UNSCALED, Cache, Scales, per_channel, stored_as
from fusion_attention.ops.inference.lowered_call import LSE, InferenceCall, extents_of

Tensor = torch.Tensor

PROMPT_RESULTS = ("attention_out",)
RESULTS = ("attention_out", LSE)


def fresh(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocates {name: result}: attention_out and, if requested, softmax_lse; n: arguments and derived values."""
    q = n["query"]
    results = {"attention_out": empty(q, out_shape(n), out_dtype(n))}
    if n["has_lse"]:
        results[LSE] = empty(q, lse_shape(n), torch.float32)
    return results


@dataclass(frozen=True)
class _Settled:
    """Parts of an InferenceCall that depend only on shapes, dtypes and lengths; calls that agree in these share them.

    Attributes:
        problem: the attention's parameters (heads, sizes, dtypes, ...) if keys and values are different memory.
        shared: the parameters if they are the same memory.
    """

    problem: Problem
    shared: Problem
    extents: Extents
    cache: Cache


def lower(bound: Bound) -> InferenceCall:
    """Converts a validated call `bound` of fused inference attention to an InferenceCall, which back ends compute."""
    n = bound.names
    settled: _Settled = bound.once(_settle)
    key, value = members(n["key"]), members(n["value"])
    latent = n["query_rope"] is not None and _same_memory(key, value)
    problem = settled.shared if latent else settled.problem
    call = InferenceCall(
        *(problem, settled.extents, _prepared(of_inputs(n["input_layout"])), settled.cache, n["query"]),
        *(key, None if latent else value, n["block_table"]),
        call_cache=bound.call_cache,
        out_layout=_prepared(of_output(n["input_layout"])),
        lse_by_batch=n["input_layout"] == "NSD",
    )
    if n["softmax_lse_flag"]:
        call.names = RESULTS
    elif n["has_lse"]:
        call.absent = RESULTS[1:]
    call.first = n["kv_first"] if n["kv_padding_size"] is not None else None
    call.q_first = n["q_first"] if n["query_padding_size"] is not None else None
    if problem.bias != "none":
        call.bias = n["pse_shift"]
    if problem.has_blocked:
        call.tree = n["mask_kind"] == "tree"
        call.blocked = n["atten_mask"] if call.tree else _blocked(n)
    if problem.dim_rope:
        call.q_rope, call.k_rope = n["query_rope"], members(n["key_rope"])
    if problem.common_keys:
        call.k_common, call.v_common = n["key_shared_prefix"], n["value_shared_prefix"]
    call.sink = n["learnable_sink"]
    call.k_dequant, call.v_dequant = _scales(n, 0), _scales(n, 1)
    if problem.has_row_scale:
        call.row_scale = n["dequant_scale_query"], n["key_antiquant_scale"]
    if problem.has_weight_scale:
        call.weight_scale = n["quant_scale1"]
    if problem.out_quant != "none":
        call.out_quant = n["quant_scale2"], n["quant_offset2"]
    return call


def _settle(n: dict[str, Any]) -> _Settled:
    cache = Cache(_prepared(n["cache_layout"]), n["page"])
    problem, extents = _problem(n), _extents(n)
    return _Settled(problem, replace(problem, shares_kv=True), extents, cache)


def _prepared(layout: str) -> str:
    """Returns the layout itself, but "NTD" (packed tokens) for "NSD", which has one sequence."""
    return "NTD" if layout == "NSD" else layout


def _same_memory(key: tuple[Tensor, ...], value: tuple[Tensor, ...]) -> bool:
    """True if keys and values are the same memory, as MLA's latents are; kernels then read it once."""
    k, v = key[0], value[0]
    same = len(key) == len(value) == 1 and (k.is_cpu or k.is_cuda) and k.device == v.device
    return same and k.data_ptr() == v.data_ptr() and k.shape == v.shape and k.stride() == v.stride()


def _blocked(n: Mapping[str, Any]) -> Tensor:
    """Returns atten_mask, not compressed, viewed with axes that broadcast to [B, N1, S1, S2]; n: arguments by name."""
    mask: Tensor = n["atten_mask"]
    if mask.dim() == 4:
        return mask
    if mask.dim() == 2 and n["one_token"]:
        return mask[:, None, None]
    return mask.reshape(-1, 1, *mask.shape[-2:])


def _extents(n: dict[str, Any]) -> Extents:
    q_len, kv_len = n["q_used"], n["common"] + n["kv_used"]
    return extents_of(q_len, kv_len, fused_band(n).resolve(q_len, kv_len))


def fused_band(n: Mapping[str, Any]) -> Band:
    """Returns the band of keys that each row sees, from the sparse mode and window in `n`, the call's derived values.
    Masks that are not compressed hide further keys as a matrix."""
    match n["mode"]:
        case 2:
            return Band.causal("start")
        case 3:
            return Band.causal()
        case 4:
            return Band.window(n["pre"], n["next"])
        case 0 if n["query_padding_size"] is None and n["kv_padding_size"] is None:
            return Band.window(n["pre"], n["next"], "start")
        case _:
            return Band.full()


# -------------------------------------------------------------------------------------------------------- quantisation


def _is_full(n: Mapping[str, Any]) -> bool:
    """True if query, keys, values and weights are all int8, with one scale each; n: arguments by name."""
    return n["query"].dtype == torch.int8 and n["query_quant_mode"] == 0


def _kind(n: Mapping[str, Any], side: int) -> str:
    """Returns the kind of dequantisation scales of keys (side 0) or values (1): "none", "channel" or "token"."""
    if members(n["key"])[0].dtype not in (torch.int8, torch.int32):
        return "none"
    if n["query"].dtype == torch.int8:
        # With rope and an int8 query, the key's scale multiplies q . k and the rope product, so row_scale includes it.
        return "channel" if _is_full(n) or side else "none"
    name = ("key", "value")[side]
    mode = n["antiquant_mode"] if n["key_antiquant_scale"] is None else n[f"{name}_antiquant_mode"]
    return "channel" if mode in (0, 2) else "token"


def _scales(n: Mapping[str, Any], side: int) -> Scales:
    """Returns the dequantisation Scales (scale, offset) of keys (side 0) or values (1); n: arguments by name."""
    kind, name = _kind(n, side), ("key", "value")[side]
    if kind == "none":
        return UNSCALED
    if _is_full(n):
        scale, offset, mode = n[("dequant_scale1", "dequant_scale2")[side]], None, 0
    elif n["key_antiquant_scale"] is None:
        scale, offset = n["antiquant_scale"][side], n["antiquant_offset"]
        offset, mode = None if offset is None else offset[side], n["antiquant_mode"]
    else:
        scale, offset = n[f"{name}_antiquant_scale"], n[f"{name}_antiquant_offset"]
        mode = n[f"{name}_antiquant_mode"]
    if kind == "channel":
        return per_channel(scale, offset, n["N2"], (n["D"], n["Dv"])[side])

    def by_head(t: Tensor | None) -> Tensor | None:
        if t is None or mode in (3, 5):
            return t
        return t.reshape(-1, 1, t.shape[-1])  # all heads share a scale

    return Scales(by_head(scale), by_head(offset), "pages" if mode in (4, 5) else "tokens")


def _problem(n: dict[str, Any]) -> Problem:
    query, scales, key = n["query"], n["quant_scale2"], members(n["key"])[0]
    rope, integers, blocked = n["query_rope"], query.dtype == torch.int8, n["mask_kind"] in ("full", "tree")
    bias = "matrix" if n["pse_shift"] is not None and not n["pse_reserved"] else "none"
    dtype = query.dtype if not integers else torch.float16 if rope is None else rope.dtype
    return Problem(
        heads_q=n["N1"],
        heads_kv=n["N2"],
        dim_qk=n["D"],
        dim_v=n["Dv"],
        dim_rope=0 if rope is None else n["Dr"],
        dtype=dtype_text(query) if not integers else str(dtype).removeprefix("torch."),
        scale=float(n["scale_value"]),
        bias=bias,
        has_blocked=blocked,
        has_sink=n["learnable_sink"] is not None,
        # Rows that a mask or a bias empties return the mean of V; rows that mode and lengths empty return zeros.
        empty_rows="mean_in_band" if (blocked or bias != "none") and not n["inner_precise"] & 2 else "zero",
        page_size=n["page"],
        kv_dtype=stored_as(key, dtype),
        dequant_k=_kind(n, 0),
        dequant_v=_kind(n, 1),
        out_quant="none" if scales is None else "tensor" if scales.numel() == 1 else "channel",
        common_keys=n["common"],
        has_row_scale=integers and not _is_full(n),
        has_weight_scale=_is_full(n),
    )
