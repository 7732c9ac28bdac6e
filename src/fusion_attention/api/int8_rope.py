"""divided_rope(), which prepares the rope elements of an int8 query over int8 latents."""

import torch

from fusion_attention.torch_ops.aliases import aliased

Tensor = torch.Tensor


@aliased
def divided_rope(query_rope: Tensor, query_scale: Tensor, key_scale: Tensor | float) -> Tensor:
    """Divides the rope elements of an int8 query for npu_fused_infer_attention_score_v2 with query_quant_mode 3.

    s = (q8 . k8 + q_rope . k_rope) * query_scale * key_scale * softmax_scale

    The operator scales the sum of both products, so floating-point rope elements must be divided by both scales before.
    An omitted division cannot be detected.

    Args:
        query_rope: [.., Dr] in any layout, or BSH [B, S, N*Dr]; key_rope is not divided.
        query_scale: dequant_scale_query: the query's shape without its elements, BSH [B, S, N].
        key_scale: dequant_scale_key, one number.

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
