"""divided_rope(), which divides a query's rope elements by scales, for attention with int8 queries and keys."""

import torch

from fusion_attention.torch_ops.device_aliases import aliased

Tensor = torch.Tensor


@aliased
def divided_rope(query_rope: Tensor, query_scale: Tensor, key_scale: Tensor | float) -> Tensor:
    """Divides query_rope by both scales of an int8 call of npu_fused_infer_attention_score_v2 (query_quant_mode 3).

    s = (q8 . k8 + q_rope . k_rope) * query_scale * key_scale * softmax_scale

    The operator multiplies both products by the scales of the int8 query and key, so the rope elements, which are not
    quantized, must be divided by these scales before the call. The operator cannot detect a missing division.

    Args:
        query_rope: [.., Dr] in any layout, or BSH [B, S, N*Dr]; key_rope is passed to the operator undivided.
        query_scale: the argument dequant_scale_query, of the query's shape without its last axis; BSH: [B, S, N].
        key_scale: the argument dequant_scale_key, one number.

    Returns:
        query_rope / (query_scale * key_scale), in its dtype.

    Raises:
        ValueError: scales that are not one per row and head.

    Example:
        >>> rope, scale = torch.ones(2, 1, 4, 64), torch.full((2, 1, 4), 0.5)
        >>> divided_rope(rope, scale, 0.25)[0, 0, 0, :2]
        tensor([8., 8.])
    """
    if query_scale.dim() == query_rope.dim() and query_scale.shape[:-1] == query_rope.shape[:-1]:
        rows = query_rope.unflatten(-1, (query_scale.shape[-1], -1))
    else:
        rows = query_rope
    if query_scale.shape != rows.shape[:-1]:
        shapes = f"{list(query_scale.shape)} for {list(query_rope.shape)}"
        raise ValueError(f"divided_rope: query_scale: expected one scale per row and head, got {shapes}")
    return (rows / (query_scale * key_scale).unsqueeze(-1)).to(query_rope.dtype).reshape(query_rope.shape)
