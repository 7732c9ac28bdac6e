"""Layers that programs import from flash_attn: rotary embedding, RMS norm and cross entropy, computed by torch.

Norms and the loss are torch's operations under flash_attn's names.
"""

from typing import Any

import torch
import torch.nn.functional as F

from fusion_attention.integrations.flash_attn.rotary import apply_rotary_emb

Tensor = torch.Tensor


class RotaryEmbedding(torch.nn.Module):
    """flash_attn.layers.rotary.RotaryEmbedding: rotates qkv [B, S, 3, N, D], or q with kv [B, S, 2, N2, D], by
    position.

    Args:
        dim: the number of rotated elements of a row.
        base: pair i of elements rotates by position * base ** (-2 i / dim).
        interleaved: True: pairs are adjacent elements (0, 1), ...; else (0, dim / 2), (1, dim / 2 + 1), ...
        scale_base: None; xPos scaling is not supported.
        device: device of the frequencies.
    """

    inv_freq: Tensor

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: Any = None, device: Any = None
    ) -> None:
        super().__init__()
        if scale_base is not None:
            raise NotImplementedError("RotaryEmbedding: scale_base: expected None: xPos scaling is not supported")
        self.dim, self.base, self.interleaved = dim, base, interleaved
        frequencies = base ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(
        self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: int | Tensor = 0, max_seqlen: int | None = None
    ) -> Any:
        """Returns qkv with its queries and keys rotated, or (q, kv) with q (`qkv`) and the keys of kv rotated; values
        are unchanged. seqlen_offset: position of the first token, or of each sequence's, [B]."""
        last = seqlen_offset if isinstance(seqlen_offset, int) else int(seqlen_offset.max())
        angles = torch.outer(torch.arange(last + qkv.shape[1], device=qkv.device).float(), self.inv_freq)
        cos, sin = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)

        def turned(x: Tensor) -> Tensor:
            return apply_rotary_emb(x, cos, sin, self.interleaved, seqlen_offsets=seqlen_offset)

        if kv is None:
            q, k, v = qkv.unbind(2)
            return torch.stack((turned(q), turned(k), v), 2)
        k, v = kv.unbind(2)
        return turned(qkv), torch.stack((turned(k), v), 2)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """flash_attn's function rms_norm(): x / sqrt(mean(x^2) + epsilon) * weight, over the last axis."""
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


class RMSNorm(torch.nn.RMSNorm):
    """flash_attn.ops.rms_norm.RMSNorm, computed by torch: x / sqrt(mean(x^2) + eps) * weight, over the last axis."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None) -> None:
        super().__init__(hidden_size, eps, device=device, dtype=dtype)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """flash_attn.losses.cross_entropy.CrossEntropyLoss, computed by torch; without z-loss and parallel computation."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        inplace_backward: bool = False,
    ) -> None:
        super().__init__(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
