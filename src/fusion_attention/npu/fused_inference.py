"""torch_npu's fused attention for inference by its own names, signatures, defaults and returns, on any device.

Functions name their arguments as their records do; torch_ops computes. Nothing is differentiable. `.out` of the two
fused functions, and what callers ask before it, stand in fused_out.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Op
from fusion_attention.npu import fused_out
from fusion_attention.ops.fused import records as fused
from fusion_attention.ops.shared.params import ONE
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.aliases import aliased

__all__ = [
    "_npu_fused_infer_attention_score_get_max_workspace",
    "_npu_fused_infer_attention_score_infer_output",
    "_npu_fused_infer_attention_score_v2_get_max_workspace",
    "_npu_fused_infer_attention_score_v2_infer_output",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_prompt_flash_attention",
]

Tensor = torch.Tensor
Lengths = Sequence[int] | np.ndarray | Tensor | None


def _both(op: Op, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(attention_out, softmax_lse) of a call by the names of its function."""
    result = dispatch.results(op, fused_out.canonical(op.name, given))
    out = result["attention_out"]
    lse = result.get("softmax_lse")
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


@aliased
def npu_prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: Lengths = None,
    deq_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = ONE,
    pre_tokens: int = 2147483647,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: Lengths = None,
    sparse_mode: int = 0,
) -> Tensor:
    """Attention of prompts: padded rows, or packed ones.

    S = scale_value * Q K^T + pse_shift;  out = softmax(S over the keys that mask, mode and window leave) V

    Args:
        query: [B, S1, N1*D], BNSD [B, N1, S1, D], BSND [B, S1, N1, D], TND [T1, N1, D], NSD or SH; floats, or int8.
        key, value: [B, S2, N2*D] and its kin, in the query's dtype; value rows may be shorter.
        padding_mask: reserved.
        atten_mask: bool, int8 or uint8 [S1, S2], [B or 1, S1, S2] or [B or 1, 1, S1, S2]; 1 hides a key. Modes 2 to 4
            take torch.ones(2048, 2048, dtype=torch.bool).triu(1).
        pse_shift: [B or 1, N1, S1 or 1, S2] in the query's dtype, added to the scaled scores.
        actual_seq_lengths, actual_seq_lengths_kv: rows and keys of every item (one number serves all); TND: cumulative
            ends. None: all.
        deq_scale1, quant_scale1, deq_scale2: of int8 rows: scores = integers * deq_scale1, weights = round(
            quant_scale1 * exp(score - max)), out = integers * deq_scale2, which undoes quant_scale1 too.
        quant_scale2, quant_offset2: 1 or N1*Dv elements; out = round(out * scale + offset) as int8, halves to even (one
            scale) or away from zero.
        num_heads: N1. num_key_value_heads: N2; 0: N1.
        scale_value: factor on the scores; 1.0, not 1 / sqrt(D).
        pre_tokens, next_tokens: the window beside a mask in mode 0 and in mode 4. The default next_tokens is 0: with a
            mask in mode 0 the call is causal too. Without a mask, mode 0 sees all keys.
        input_layout: "BSH", "BNSD", "BSND", "BNSD_BSND" (the output is BSND), "TND", "NSD" or "SH".
        sparse_mode: 0 to 4; 10 to 14 are the same.

    Returns:
        attention_out; int8 where quant_scale2 is given, float16 of other int8 rows. Rows that see no key are zeros,
        those that the mask alone empties the mean of the values.

    Raises:
        ContractError: a call that `fusion-attention ops npu_prompt_flash_attention` does not allow.
        BackendError: no back end computes it.

    Source: Ascend op-plugin, npu_prompt_flash_attention.

    Example:
        >>> q, k = torch.randn(2, 5, 4 * 64), torch.randn(2, 7, 64)
        >>> out = npu_prompt_flash_attention(q, k, k, num_heads=4, num_key_value_heads=1, scale_value=0.125)
        >>> list(out.shape)
        [2, 5, 256]
    """
    args = fused_out.canonical(fused.TORCH_PFA.name, {
        "query": query, "key": key, "value": value, "padding_mask": padding_mask, "atten_mask": atten_mask,
        "pse_shift": pse_shift, "actual_seq_lengths": actual_seq_lengths, "deq_scale1": deq_scale1,
        "quant_scale1": quant_scale1, "deq_scale2": deq_scale2, "quant_scale2": quant_scale2,
        "quant_offset2": quant_offset2, "num_heads": num_heads, "scale_value": scale_value,
        "pre_tokens": pre_tokens, "next_tokens": next_tokens, "input_layout": input_layout,
        "num_key_value_heads": num_key_value_heads, "actual_seq_lengths_kv": actual_seq_lengths_kv,
        "sparse_mode": sparse_mode,
    })  # fmt: skip
    return dispatch.results(fused.TORCH_PFA, args)["attention_out"]


@fused_out.with_out(fused.TORCH_V1)
@aliased
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Lengths = None,
    actual_seq_lengths_kv: Lengths = None,
    dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    key_antiquant_scale: Tensor | None = None,
    key_antiquant_offset: Tensor | None = None,
    value_antiquant_scale: Tensor | None = None,
    value_antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None,
    query_padding_size: Tensor | Sequence[int] | np.ndarray | None = None,
    kv_padding_size: Tensor | Sequence[int] | np.ndarray | None = None,
    key_shared_prefix: Tensor | None = None,
    value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: Lengths = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    key_rope_antiquant_scale: Tensor | None = None,
    num_heads: int = 1,
    scale: float = ONE,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of prompts and of new tokens over a cache: stacked, packed or paged, of floats or integers.

    S = scale * (Q K^T + Q_rope K_rope^T) + pse_shift;  out = softmax(S over the keys that are seen) V

    Args:
        query: [B, S1, N1*D], BNSD [B, N1, S1, D], BSND [B, S1, N1, D], TND [T1, N1, D], NTD or NSD; floats, or int8.
        key, value: as the query lies, with N2 heads; a list of one tensor per item; or with a block table pages
            [blocks, block_size, N2*D], [blocks, N2, block_size, D] or [blocks, N2, D/d0, block_size, d0] with d0 of 32
            bytes. Of the query's dtype, int8, or int32 that holds eight integers of four bits, the first one lowest.
        pse_shift: [B or 1, N1, S1 or 1, keys] in the query's dtype, added to the scaled scores.
        atten_mask: bool, int8 or uint8; 1 hides a key. Modes 0 and 1: [S1, keys], [B or 1, S1, keys] or
            [B or 1, 1, S1, keys]; modes 2 to 4: torch.ones(2048, 2048, dtype=torch.bool).triu(1); mode 9: [B, S1, S1].
        actual_seq_lengths: query rows of every item; packed layouts: cumulative ends, needed.
        actual_seq_lengths_kv: keys of every item; packed keys: cumulative ends; pages: lengths, always, and needed.
        dequant_scale1, quant_scale1, dequant_scale2: of int8 rows, as npu_prompt_flash_attention's.
        quant_scale2, quant_offset2: 1 or N1*Dv elements; out = round(out * scale + offset) as int8.
        antiquant_scale, antiquant_offset: [2], [2, N2*D] or (antiquant_mode 1) [2, B, keys], keys then values: a stored
            integer means (stored + offset) * scale.
        key_antiquant_scale, key_antiquant_offset, value_antiquant_scale, value_antiquant_offset: the same apart; by
            key_antiquant_mode and value_antiquant_mode 0: one number or [N2*D], 1: [B, keys], 2: [N2],
            3: [B, N2, keys], 4: [blocks, block_size], 5: [blocks, N2, block_size].
        block_table: int32 or int64 [B, pages]: where the pages of every item lie. block_size: their slots.
        query_padding_size, kv_padding_size: int64 [1]: unused slots behind every item, which ends there.
        key_shared_prefix, value_shared_prefix, actual_shared_prefix_len: keys in front of every item's own; how many.
        query_rope, key_rope: further elements of query and key, [.., 64], which share the scale.
        key_rope_antiquant_scale: reserved.
        num_heads: N1. num_key_value_heads: N2; 0: N1.
        scale: factor on the scores; 1.0, not 1 / sqrt(D).
        pre_tokens, next_tokens: the window beside a mask in mode 0, and in mode 4.
        input_layout: "BSH", "BNSD", "BSND", "TND", "NTD", "NSD"; behind a _ the output's: "BNSD_BSND", "TND_NTD", ...
        sparse_mode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to
            the lower right, 9 tree. One-token queries outside packed layouts see every key that the mask leaves.
        inner_precise: bit 1: rows that a mask empties are zeros, not the mean of the values.
        softmax_lse_flag: whether softmax_lse is computed.

    Returns:
        (attention_out, softmax_lse): lse = max + ln(sum) as float32 [B, N1, S1, 1], packed [T1, N1, 1]; +inf where a
        row sees no key. Not asked for: without elements.

    Raises:
        ContractError: a call that `fusion-attention ops npu_fused_infer_attention_score` does not allow.
        BackendError: no back end computes it.

    Source: Ascend op-plugin, npu_fused_infer_attention_score. `npu_fused_infer_attention_score.out(..., workspace=None,
    out=[attention_out, softmax_lse])` writes into tensors that are given.

    Example:
        >>> q, pages = torch.randn(5, 4, 64), torch.randn(8, 16, 64)
        >>> table = torch.tensor([[0, 3], [5, 1]], dtype=torch.int32)
        >>> mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        >>> out, _ = npu_fused_infer_attention_score(q, pages, pages, atten_mask=mask, sparse_mode=3,
        ...     input_layout="TND", actual_seq_lengths=[4, 5], actual_seq_lengths_kv=[20, 31],
        ...     block_table=table, block_size=16, num_heads=4, num_key_value_heads=1, scale=0.125)
        >>> list(out.shape)
        [5, 4, 64]
    """
    return _both(fused.TORCH_V1, {
        "query": query, "key": key, "value": value, "pse_shift": pse_shift, "atten_mask": atten_mask,
        "actual_seq_lengths": actual_seq_lengths, "actual_seq_lengths_kv": actual_seq_lengths_kv,
        "dequant_scale1": dequant_scale1, "quant_scale1": quant_scale1, "dequant_scale2": dequant_scale2,
        "quant_scale2": quant_scale2, "quant_offset2": quant_offset2, "antiquant_scale": antiquant_scale,
        "antiquant_offset": antiquant_offset, "key_antiquant_scale": key_antiquant_scale,
        "key_antiquant_offset": key_antiquant_offset, "value_antiquant_scale": value_antiquant_scale,
        "value_antiquant_offset": value_antiquant_offset, "block_table": block_table,
        "query_padding_size": query_padding_size, "kv_padding_size": kv_padding_size,
        "key_shared_prefix": key_shared_prefix, "value_shared_prefix": value_shared_prefix,
        "actual_shared_prefix_len": actual_shared_prefix_len, "query_rope": query_rope, "key_rope": key_rope,
        "key_rope_antiquant_scale": key_rope_antiquant_scale, "num_heads": num_heads, "scale": scale,
        "pre_tokens": pre_tokens, "next_tokens": next_tokens, "input_layout": input_layout,
        "num_key_value_heads": num_key_value_heads, "sparse_mode": sparse_mode, "inner_precise": inner_precise,
        "block_size": block_size, "antiquant_mode": antiquant_mode, "key_antiquant_mode": key_antiquant_mode,
        "value_antiquant_mode": value_antiquant_mode, "softmax_lse_flag": softmax_lse_flag,
    })  # fmt: skip


@fused_out.with_out(fused.TORCH_V2)
@aliased
def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    block_table: Tensor | None = None,
    dequant_scale_query: Tensor | None = None,
    dequant_scale_key: Tensor | None = None,
    dequant_offset_key: Tensor | None = None,
    dequant_scale_value: Tensor | None = None,
    dequant_offset_value: Tensor | None = None,
    dequant_scale_key_rope: Tensor | None = None,
    quant_scale_out: Tensor | None = None,
    quant_offset_out: Tensor | None = None,
    quant_scale_p: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = ONE,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
    value_dtype: int | None = None,
    query_rope_dtype: int | None = None,
    key_rope_dtype: int | None = None,
    key_shared_prefix_dtype: int | None = None,
    value_shared_prefix_dtype: int | None = None,
    dequant_scale_query_dtype: int | None = None,
    dequant_scale_key_dtype: int | None = None,
    dequant_scale_value_dtype: int | None = None,
    dequant_scale_key_rope_dtype: int | None = None,
    out_dtype: int | torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """npu_fused_infer_attention_score with sinks and a scale per query row; other names, and a few parameters fewer.

    Args:
        query, key, value, query_rope, key_rope, pse_shift, atten_mask, block_table, num_key_value_heads, pre_tokens,
            next_tokens, input_layout, sparse_mode, block_size, inner_precise: as npu_fused_infer_attention_score's.
        actual_seq_qlen, actual_seq_kvlen: its actual_seq_lengths and actual_seq_lengths_kv.
        dequant_scale_query: float32, of int8 rows with float rope parts (query_quant_mode 3): the query's shape without
            D. query_rope then comes divided by it and by dequant_scale_key, which multiply both products.
        dequant_scale_key, dequant_offset_key, dequant_scale_value, dequant_offset_value: its key_antiquant_scale and so
            on; key_quant_mode, value_quant_mode: its key_antiquant_mode and value_antiquant_mode.
        quant_scale_out, quant_offset_out: its quant_scale2 and quant_offset2.
        learnable_sink: [N1], one more logit per head in every denominator.
        num_query_heads, softmax_scale, return_softmax_lse: its num_heads, scale and softmax_lse_flag.
        out_dtype: of the output beside int8 rows or quant_scale_out: torch.int8, float16, bfloat16, or its number.
        dequant_scale_key_rope, quant_scale_p, query_dtype, key_dtype, value_dtype, query_rope_dtype, key_rope_dtype,
            key_shared_prefix_dtype, value_shared_prefix_dtype, dequant_scale_query_dtype, dequant_scale_key_dtype,
            dequant_scale_value_dtype, dequant_scale_key_rope_dtype: reserved.

    Returns:
        (attention_out, softmax_lse), as npu_fused_infer_attention_score.

    Raises:
        ContractError: a call that `fusion-attention ops npu_fused_infer_attention_score_v2` does not allow.
        BackendError: no back end computes it.

    Source: Ascend op-plugin, npu_fused_infer_attention_score_v2, which has an `.out` too.

    Example:
        >>> q, k = torch.randn(2, 1, 4, 64), torch.randn(2, 9, 1, 64)
        >>> out, lse = npu_fused_infer_attention_score_v2(q, k, k, input_layout="BSND", actual_seq_kvlen=[9, 4],
        ...     learnable_sink=torch.zeros(4), num_query_heads=4, num_key_value_heads=1, softmax_scale=0.125,
        ...     return_softmax_lse=True)
        >>> list(out.shape), list(lse.shape)
        ([2, 1, 4, 64], [2, 4, 1, 1])
    """
    return _both(fused.TORCH_V2, {
        "query": query, "key": key, "value": value, "query_rope": query_rope, "key_rope": key_rope,
        "pse_shift": pse_shift, "atten_mask": atten_mask, "actual_seq_qlen": actual_seq_qlen,
        "actual_seq_kvlen": actual_seq_kvlen, "block_table": block_table,
        "dequant_scale_query": dequant_scale_query, "dequant_scale_key": dequant_scale_key,
        "dequant_offset_key": dequant_offset_key, "dequant_scale_value": dequant_scale_value,
        "dequant_offset_value": dequant_offset_value, "dequant_scale_key_rope": dequant_scale_key_rope,
        "quant_scale_out": quant_scale_out, "quant_offset_out": quant_offset_out, "quant_scale_p": quant_scale_p,
        "learnable_sink": learnable_sink, "num_query_heads": num_query_heads,
        "num_key_value_heads": num_key_value_heads, "softmax_scale": softmax_scale, "pre_tokens": pre_tokens,
        "next_tokens": next_tokens, "input_layout": input_layout, "sparse_mode": sparse_mode,
        "block_size": block_size, "query_quant_mode": query_quant_mode, "key_quant_mode": key_quant_mode,
        "value_quant_mode": value_quant_mode, "inner_precise": inner_precise,
        "return_softmax_lse": return_softmax_lse, "query_dtype": query_dtype, "key_dtype": key_dtype,
        "value_dtype": value_dtype, "query_rope_dtype": query_rope_dtype, "key_rope_dtype": key_rope_dtype,
        "key_shared_prefix_dtype": key_shared_prefix_dtype, "value_shared_prefix_dtype": value_shared_prefix_dtype,
        "dequant_scale_query_dtype": dequant_scale_query_dtype, "dequant_scale_key_dtype": dequant_scale_key_dtype,
        "dequant_scale_value_dtype": dequant_scale_value_dtype,
        "dequant_scale_key_rope_dtype": dequant_scale_key_rope_dtype, "out_dtype": out_dtype,
    })  # fmt: skip


_npu_fused_infer_attention_score_get_max_workspace = fused_out.workspace_of(
    npu_fused_infer_attention_score, fused.TORCH_V1
)
_npu_fused_infer_attention_score_v2_get_max_workspace = fused_out.workspace_of(
    npu_fused_infer_attention_score_v2, fused.TORCH_V2
)


@aliased
def _npu_fused_infer_attention_score_infer_output(
    query: Tensor,
    value: Tensor,
    *,
    input_layout: str = "BSH",
    quant_scale2: Tensor | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_lse_flag: bool = False,
    query_rope: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Memory for the results of npu_fused_infer_attention_score, for its `.out`; nothing is computed.

    Args:
        query, value, input_layout, quant_scale2, block_table, num_heads, num_key_value_heads, softmax_lse_flag,
            query_rope: as the call's.

    Returns:
        (attention_out, softmax_lse), not initialised.

    Raises:
        ContractError: an unknown layout, or tensors that do not fit it.

    Source: Ascend op-plugin, _npu_fused_infer_attention_score_infer_output.

    Example:
        >>> out, lse = _npu_fused_infer_attention_score_infer_output(torch.zeros(2, 3, 256), torch.zeros(2, 9, 64),
        ...     num_heads=4, num_key_value_heads=1)
        >>> list(out.shape), list(lse.shape)
        ([2, 3, 256], [0])
    """
    return fused_out.buffer(fused.TORCH_V1, {
        "query": query, "value": value, "input_layout": input_layout, "quant_scale2": quant_scale2,
        "block_table": block_table, "num_heads": num_heads, "num_key_value_heads": num_key_value_heads,
        "softmax_lse_flag": softmax_lse_flag, "query_rope": query_rope,
    })  # fmt: skip


@aliased
def _npu_fused_infer_attention_score_v2_infer_output(
    query: Tensor,
    value: Tensor,
    *,
    query_dtype: int | None = None,
    value_dtype: int | None = None,
    input_layout: str = "BSH",
    quant_scale_out: Tensor | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    return_softmax_lse: bool = False,
    query_rope: Tensor | None = None,
    out_dtype: int | torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Memory for the results of npu_fused_infer_attention_score_v2, for its `.out`; nothing is computed.

    Args:
        query, value, query_dtype, value_dtype, input_layout, quant_scale_out, block_table, num_query_heads,
            num_key_value_heads, return_softmax_lse, query_rope, out_dtype: as the call's.

    Returns:
        (attention_out, softmax_lse), not initialised.

    Raises:
        ContractError: an unknown layout, or tensors that do not fit it.

    Source: Ascend op-plugin, _npu_fused_infer_attention_score_v2_infer_output.

    Example:
        >>> rows = torch.zeros(5, 4, 64)
        >>> out, lse = _npu_fused_infer_attention_score_v2_infer_output(rows, rows, input_layout="TND",
        ...     num_query_heads=4, return_softmax_lse=True)
        >>> list(out.shape), list(lse.shape)
        ([5, 4, 64], [5, 4, 1])
    """
    return fused_out.buffer(fused.TORCH_V2, {
        "query": query, "value": value, "query_dtype": query_dtype, "value_dtype": value_dtype,
        "input_layout": input_layout, "quant_scale_out": quant_scale_out, "block_table": block_table,
        "num_query_heads": num_query_heads, "num_key_value_heads": num_key_value_heads,
        "return_softmax_lse": return_softmax_lse, "query_rope": query_rope, "out_dtype": out_dtype,
    })  # fmt: skip
