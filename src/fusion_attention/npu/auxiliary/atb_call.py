"""The calls of ATB's attention functions: lengths, masks, and npu_fused_infer_attention_score into `out`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Op, to_array
from fusion_attention.npu.auxiliary.call import checked, in_place_of
from fusion_attention.npu.fused_inference import npu_fused_infer_attention_score

Tensor = torch.Tensor
CAUSAL = 2048  # rows and columns of the mask that attention takes for its causal mode
MASK_ALONE, CAUSAL_AT_THE_END = 1, 3  # sparse modes


def ends_of(op: Op, given: Mapping[str, Any]) -> np.ndarray:
    """Where the rows of every sequence of a call end, which its record allows."""
    checked(op, given)
    return read(op, given["seq_len"]).cumsum()


def read(op: Op, lengths: Any) -> np.ndarray:
    """Lengths, on the host."""
    result = to_array(lengths)
    if isinstance(result, np.ndarray):
        return result
    raise NotImplementedError(f"{op.name}: a trace knows no lengths: call torch.ops.atb.{op.name}, one node of a graph")


def one_each(query: Tensor) -> np.ndarray:
    """The same of one row of every sequence."""
    return np.arange(1, len(query) + 1)


def causal(query: Tensor) -> dict[str, Any]:
    """What makes attention causal, the last row at the last key."""
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
    """Attention of a checked call, into its `out`.

    Args:
        op, given: the record, and the arguments by its names.
        keys: rows of keys and values, or their pages.
        ends: where the rows of every sequence end.
        kv: ends of packed keys, or how many keys every sequence has in pages.
        mask_arguments: mask and mode.
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
    """Pages [pages, slots, heads * elements]: a view, also of a part of the elements, where there is one head."""
    return cache[:, :, 0] if cache.shape[2] == 1 else cache.flatten(2)
