"""torch_npu's attention for inference by its own names, signatures, defaults and returns, on any device.

The function names its arguments as its record does; torch_ops computes. Nothing is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_attention.ops.inference import records as inference
from fusion_attention.ops.shared.params import ONE, chosen
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.aliases import aliased

__all__ = ["npu_incre_flash_attention"]

Tensor = torch.Tensor
Lengths = Sequence[int] | Tensor | None


@aliased
def npu_incre_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: Lengths = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None,
    dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    kv_padding_size: Tensor | Sequence[int] | None = None,
    num_heads: int = 1,
    scale_value: float = ONE,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
) -> Tensor:
    """Attention of one new token per item over its cache: stacked or paged, of floats or int8.

    S = scale_value * Q K^T + pse_shift;  out = softmax(S over an item's tokens that the mask leaves) V

    Args:
        query: [B, 1, N1*D], BNSD [B, N1, 1, D] or BSND [B, 1, N1, D]; float16, bfloat16 or float32. More tokens than
            one see the cache as the last rows of a prompt do.
        key, value: [B, S, N2*D] and its kin, a list of one such tensor per item, or with a block table pages
            [blocks, block_size, N2*D] or [blocks, N2, block_size, D]; in the query's dtype or int8.
        padding_mask: reserved.
        atten_mask: bool, int8 or uint8 [B, S], [B, 1, S] or [B, 1, 1, S]; 1 removes a token.
        pse_shift: [B or 1, N1, 1, S] in the query's dtype, added to the scaled scores.
        actual_seq_lengths: tokens of every item (one number serves all); None: the whole cache.
        antiquant_scale, antiquant_offset: [2], [2, N2, 1, D], [2, N2, D] or [2, N2*D], keys then values: a stored
            integer means (int8 + offset) * scale.
        block_table: int32 or int64 [B, pages]: where the pages of every item lie.
        dequant_scale1, quant_scale1, dequant_scale2: of an int8 query, which this operator does not take.
        quant_scale2, quant_offset2: 1 or N1*D elements; out = round(out * scale + offset) as int8, halves to even
            (one scale) or away from zero.
        kv_padding_size: int64 [1]: unused slots behind every item, which ends there (left padding).
        num_heads: N1. num_key_value_heads: N2; 0: N1.
        scale_value: factor on the scores; 1.0, not 1 / sqrt(D).
        input_layout: "BSH", "BNSD" or "BSND".
        block_size: tokens of a page. inner_precise: accepted without effect.

    Returns:
        attention_out in the query's shape; int8 where quant_scale2 is given. An item without tokens gives zeros, one
        whose tokens are all masked the mean of its values.

    Raises:
        ContractError: a call that `fusion-attention ops npu_incre_flash_attention` does not allow.
        BackendError: no back end computes it.

    Source: Ascend op-plugin, npu_incre_flash_attention.

    Example:
        >>> q, cache = torch.randn(2, 1, 4 * 64), torch.randn(2, 100, 64)
        >>> out = npu_incre_flash_attention(q, cache, cache, actual_seq_lengths=[7, 100], num_heads=4,
        ...     num_key_value_heads=1, scale_value=0.125)
        >>> list(out.shape)
        [2, 1, 256]
    """
    args = {
        "query": query, "key": key, "value": value, "padding_mask": padding_mask, "atten_mask": atten_mask,
        "pse_shift": pse_shift, "actual_seq_lengths": actual_seq_lengths, "antiquant_scale": antiquant_scale,
        "antiquant_offset": antiquant_offset, "block_table": block_table, "dequant_scale1": dequant_scale1,
        "quant_scale1": quant_scale1, "dequant_scale2": dequant_scale2, "quant_scale2": quant_scale2,
        "quant_offset2": quant_offset2, "kv_padding_size": kv_padding_size, "num_heads": num_heads,
        "scale_value": chosen(scale_value), "input_layout": input_layout, "num_key_value_heads": num_key_value_heads,
        "block_size": block_size, "inner_precise": inner_precise,
    }  # fmt: skip
    return dispatch.results(inference.TORCH, args)["attention_out"]
