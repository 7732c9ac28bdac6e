"""The losses of indexers in transformers' models; layers store them until indexer_loss() reads them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Loss", "computes_loss", "indexer_loss"]

Tensor = torch.Tensor


class Loss:
    """Holds the indexer's loss of a layer's last forward; copies and pickles have none: a graph cannot be copied."""

    def __init__(self, value: Tensor | None = None) -> None:
        self.value = value

    def __reduce__(self) -> tuple[type[Loss], tuple[()]]:
        return Loss, ()


def computes_loss(layer: Any) -> bool:
    """True if a forward computes the indexer's loss: training, stage "warmup" (all keys) or "sparse" (chosen keys)."""
    staged = layer.stage in ("warmup", "sparse") and layer.indexer is not None
    return staged and layer.training and torch.is_grad_enabled()


def indexer_loss(model: torch.nn.Module) -> Tensor:
    """Returns the sum of the indexers' losses in a model's last forward, and removes the losses from the layers.

        loss = sum over layers of mean over tokens of KL(p || softmax(I))

    p is the mean over heads of the attention's probabilities, I are the indexer's scores. Layers compute a loss in
    training mode after fusion_attention.nn.set_stage(model, "warmup") (over all keys) or "sparse" (over chosen keys).
    Only parameters of indexers get a gradient from it.

    Args:
        model: a transformers model with attn_implementation="fusion_attention".

    Returns:
        A scalar tensor.

    Raises:
        ValueError: no layer has a loss.

    Source: this library; the schedule of DeepSeek-V3.2.

    Example:
        >>> from transformers import DeepseekV32Config, DeepseekV32Model
        >>> from fusion_attention.integrations.transformers import register
        >>> from fusion_attention.nn import set_stage
        >>> register()
        >>> sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
        >>> sizes |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
        >>> sizes |= {"v_head_dim": 8, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4}
        >>> sizes |= {"vocab_size": 64, "num_hidden_layers": 1, "first_k_dense_replace": 1}
        >>> model = DeepseekV32Model._from_config(DeepseekV32Config(**sizes), attn_implementation="fusion_attention")
        >>> set_stage(model.train(), "sparse")
        >>> out = model(torch.arange(12)[None], use_cache=False).last_hidden_state
        >>> (out.square().mean() + indexer_loss(model)).backward()
        >>> model.layers[0].self_attn.indexer.wk.weight.grad.shape
        torch.Size([16, 32])
    """
    losses: list[Any] = []
    for module in model.modules():
        stored = vars(module).pop("indexer_loss", None)
        if isinstance(stored, Loss) and stored.value is not None:
            losses.append(stored.value)
    if not losses:
        raise ValueError(
            "indexer_loss: model: expected layers with a loss, got none (call fusion_attention.nn.set_stage(model, "
            '"sparse") and model.train(), and forward with gradients; gradient checkpoints need use_reentrant=False)'
        )
    return torch.stack(losses).sum()
