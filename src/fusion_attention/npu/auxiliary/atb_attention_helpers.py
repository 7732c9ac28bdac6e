"""Helpers of ATB's attention functions: lengths, masks, and the call of npu_fused_infer_attention_score."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Op, to_array
from fusion_attention.npu.auxiliary.call import checked, in_place_of
from fusion_attention.npu.fused_inference import npu_fused_infer_attention_score

Tensor = torch.Tensor
CAUSAL = 2048  # rows and columns of the compressed causal mask
MASK_ALONE, CAUSAL_AT_THE_END = 1, 3  # sparse modes


def ends_of(op: Op, given: Mapping[str, Any]) -> np.ndarray:
    """Checks the arguments `given` of `op`; returns the cumulative sums of the lengths `seq_len`, int64 [sequences]."""
    checked(op, given)
    return read(op, given["seq_len"]).cumsum()


def read(op: Op, lengths: Any) -> np.ndarray:
    """Returns lengths (list or tensor) as an int64 array on the host; NotImplementedError in a trace, where they have
    no values, with the name of the operator `op`."""
    result = to_array(lengths)
    if isinstance(result, np.ndarray):
        return result
    raise NotImplementedError(
        f"{op.name}: lengths have no values in a trace (call torch.ops.atb.{op.name}, which is one node of a graph)"
    )


def one_each(query: Tensor) -> np.ndarray:
    """Returns int [1, 2, ..., tokens]: the cumulative ends of sequences with one row each, for query [tokens, ...]."""
    return np.arange(1, len(query) + 1)


def causal(query: Tensor) -> dict[str, Any]:
    """Returns arguments of npu_fused_infer_attention_score for causal attention whose last row sees the last key:
    atten_mask, a bool upper triangle, and sparse_mode."""
    triangle = torch.ones(CAUSAL, CAUSAL, dtype=torch.bool, device=query.device).triu(1)
    return {"atten_mask": triangle, "sparse_mode": CAUSAL_AT_THE_END}


def attend(
    op: Op,
    given: Mapping[str, Any],
    keys: tuple[Tensor, Tensor],
    ends: np.ndarray,
    kv: np.ndarray | Tensor,
    **mask_arguments: Any,
) -> None:
    """Computes attention by npu_fused_infer_attention_score, and writes the result to the tensor given["out"].

    Args:
        op, given: the operator definition, and its checked arguments by name.
        keys: (keys, values) as packed rows [tokens, heads, elements] or pages [pages, slots, heads, elements].
        ends: cumulative ends of each sequence's query rows.
        kv: cumulative ends of each sequence's packed keys, or its number of keys in pages.
        mask_arguments: atten_mask and sparse_mode.
    """
    table = given.get("block_table")
    if table is not None:
        keys = _pages(keys[0]), _pages(keys[1])
        mask_arguments |= {"block_table": table, "block_size": keys[0].shape[1]}
    rows = int(ends[-1]) if len(ends) else 0
    if not rows:
        return
    if table is None:
        keys = keys[0][:rows], keys[1][:rows]
    lengths = {"actual_seq_lengths": ends.tolist(), "actual_seq_lengths_kv": read(op, kv).tolist()}
    heads = {"num_heads": given["num_heads"], "num_key_value_heads": given["num_kv_heads"]}
    in_pages = {"key": "key_cache", "value": "value_cache", "actual_seq_lengths_kv": "context_lens"}
    named = {"actual_seq_lengths_kv": "seq_len"} if table is None else in_pages
    with in_place_of(op, atten_mask="mask", actual_seq_lengths="seq_len", scale="scale_value", **named):
        numbers = {"input_layout": "TND", "scale": given["scale_value"], **lengths, **heads, **mask_arguments}
        result, _ = npu_fused_infer_attention_score(given["query"][:rows], keys[0], keys[1], **numbers)
    given["out"][:rows].copy_(result)


def _pages(cache: Tensor) -> Tensor:
    """Returns a paged cache [pages, slots, heads, elements] as [pages, slots, heads * elements]."""
    return cache[:, :, 0] if cache.shape[2] == 1 else cache.flatten(2)
