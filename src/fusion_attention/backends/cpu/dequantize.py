"""Conversion of stored keys and values (int8, int4, float16, ...) to float32, and of results to int8, in torch."""

from dataclasses import replace

import torch

from fusion_attention.ir.memory_views import Dequant, PagedView, RowView
from fusion_attention.ir.problem import Operands, Problem


def keys(problem: Problem, operands: Operands, b: int, which: slice) -> torch.Tensor:
    """Returns the keys at positions `which` of sequence b, [heads_kv, keys, dim_qk] in float32; stored integers are
    converted, but not multiplied by their scales."""
    return _rows(problem, operands.k, operands.k_common, b, which)


def values(problem: Problem, operands: Operands, b: int, which: slice) -> torch.Tensor:
    """Returns the values at positions `which` of sequence b, [heads_kv, keys, dim_v] in float32; stored integers are
    converted, but not multiplied by their scales."""
    return _rows(problem, operands.v, operands.v_common, b, which)


def dequantized(stored: torch.Tensor, dequant: Dequant | None, b: int, which: slice) -> torch.Tensor:
    """Returns (stored + offset) * scale for the keys or values at positions `which` of sequence b, [heads_kv, keys,
    dim].

    stored: the result of keys() or values(). dequant: scales and offsets; None: `stored` is returned unchanged.
    """
    if dequant is None:
        return stored
    heads = stored.shape[0]
    if dequant.offset is not None:
        stored = stored + dequant.offset.sequence(b, heads, which.stop)[:, which]
    return stored * dequant.scale.sequence(b, heads, which.stop)[:, which]


def rounded(problem: Problem, operands: Operands, x: torch.Tensor) -> torch.Tensor:
    """Returns results x [heads_q, rows, dim_v] as out stores them: unchanged, or for an int8 output x * out_scale +
    out_offset, rounded and saturated."""
    if problem.out_quant == "none":
        return x
    assert operands.out_scale is not None
    x = x * operands.out_scale[:, None]
    if operands.out_offset is not None:
        x = x + operands.out_offset[:, None]
    full = x.round() if problem.out_quant == "tensor" else x.trunc() + ((x - x.trunc()) * 2).trunc()
    return full.nan_to_num(0.0).clamp(-128, 127)


def _rows(problem: Problem, cache: RowView | PagedView, common: RowView | None, b: int, which: slice) -> torch.Tensor:
    """Returns keys or values at positions `which` of sequence b, [heads_kv, keys, dim] in float32. The first positions
    are rows of `common`, a prefix of all sequences."""
    shared, parts = problem.common_keys, []
    if common is not None and which.start < shared:
        stop = min(which.stop, shared)
        parts.append(_numbers(problem, common, 0, slice(which.start, stop)))
    if which.stop > shared:
        parts.append(_numbers(problem, cache, b, slice(max(which.start - shared, 0), which.stop - shared)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _numbers(problem: Problem, view: RowView | PagedView, b: int, which: slice) -> torch.Tensor:
    """Returns the rows at positions `which` of sequence b of a strided view, [heads_kv, keys, dim] in float32; int4
    pairs in bytes are unpacked."""
    heads = problem.heads_kv
    if problem.kv_dtype != "int4":
        return view.sequence(b, heads, which.stop)[:, which].float()
    packed = replace(view, dim=-(-view.dim // 2)).sequence(b, heads, which.stop)[:, which].int()
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., : view.dim]
    return ((nibbles ^ 8) - 8).float()
