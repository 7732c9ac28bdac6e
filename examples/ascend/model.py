"""A small model with DeepSeek's sparse attention, which calls torch_npu on Ascend's chips and plain torch elsewhere.

This file does not use fusion_attention: ../ascend_code.py runs it unchanged on a machine without a chip.
"""

import importlib.util
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if importlib.util.find_spec("torch_npu"):
    import torch_npu


@dataclass(frozen=True)
class Config:
    """The sizes of the model. The chip requires these values of `latent`, `rope` and `index_width`."""

    vocabulary: int = 256
    width: int = 256
    heads: int = 8
    latent: int = 512
    rope: int = 64
    index_heads: int = 8
    index_width: int = 128
    top_k: int = 2048


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "npu":
            return torch_npu.npu_rms_norm(x, self.weight, epsilon=self.eps)[0]
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [B, S, N, D] by angles whose cosines and sines are [1, S, 1, D]."""
    if x.device.type == "npu":
        return torch_npu.npu_rotary_mul(x, cos, sin)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class IndexerLoss(torch.autograd.Function):
    """The indexer's KL loss, whose forward operator also returns the gradients."""

    @staticmethod
    def forward(ctx, query_index, key_index, weights, *rest):  # type: ignore[no-untyped-def]
        query, key, indices, statistics, scale, ropes = rest
        *gradients, loss = torch_npu.npu_sparse_lightning_indexer_grad_kl_loss(
            query, key, query_index, key_index, weights, indices, *statistics, scale,
            query_rope=ropes[0], key_rope=ropes[1], layout="BSND", sparse_mode=3, pre_tokens=65536, next_tokens=65536,
        )  # fmt: skip
        ctx.save_for_backward(*gradients)
        return loss[0]

    @staticmethod
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        return *(upstream * gradient for gradient in ctx.saved_tensors), *[None] * 6


class SparseAttention(nn.Module):
    """Attention to the keys that an indexer selects, and the indexer's loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.scale = config, (config.latent + config.rope) ** -0.5
        self.query = nn.Linear(config.width, config.heads * (config.latent + config.rope), bias=False)
        self.key = nn.Linear(config.width, config.latent + config.rope, bias=False)
        self.key_norm = RMSNorm(config.latent)
        self.out = nn.Linear(config.heads * config.latent, config.width, bias=False)
        self.index_query = nn.Linear(config.width, config.index_heads * config.index_width, bias=False)
        self.index_key = nn.Linear(config.width, config.index_width, bias=False)
        self.index_weights = nn.Linear(config.width, config.index_heads, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        query, query_rope = self.query(x).unflatten(-1, (c.heads, -1)).split([c.latent, c.rope], -1)
        key, key_rope = self.key(x).unsqueeze(2).split([c.latent, c.rope], -1)
        key, query_rope, key_rope = self.key_norm(key), rotary(query_rope, cos, sin), rotary(key_rope, cos, sin)
        still = x.detach()  # the indexer's loss trains the indexer only
        index = (
            self.index_query(still).unflatten(-1, (c.index_heads, -1)),
            self.index_key(still).unsqueeze(2),
            self.index_weights(still) * (c.index_heads * c.index_width) ** -0.5,
        )
        attend = self.fused if x.device.type == "npu" else self.eager
        rows, loss = attend(query, key, query_rope, key_rope, *index)
        return self.out(rows.flatten(2)), loss / x.shape[:2].numel()

    def fused(
        self, query: Tensor, key: Tensor, query_rope: Tensor, key_rope: Tensor, *index: Tensor
    ) -> tuple[Tensor, Tensor]:
        indices, _ = torch_npu.npu_lightning_indexer(
            *(t.detach() for t in index), sparse_count=self.config.top_k, sparse_mode=3
        )
        rows, *statistics = torch_npu.npu_sparse_flash_attention(
            query, key, key, indices, self.scale, query_rope=query_rope, key_rope=key_rope, sparse_block_size=1,
            layout_query="BSND", layout_kv="BSND", sparse_mode=3, attention_mode=2, return_softmax_lse=True,
        )  # fmt: skip
        fixed = [t.detach() for t in (query, key, query_rope, key_rope)]
        loss = IndexerLoss.apply(*index, *fixed[:2], indices, statistics, self.scale, fixed[2:])
        return rows, loss

    def eager(
        self, query: Tensor, key: Tensor, query_rope: Tensor, key_rope: Tensor, *index: Tensor
    ) -> tuple[Tensor, Tensor]:
        index_query, index_key, weights = index
        products = torch.einsum("bihd,bjd->bihj", index_query, index_key[:, :, 0]).relu()
        relevance = (products * weights.unsqueeze(-1)).sum(2)
        past = torch.ones_like(relevance, dtype=torch.bool).tril()
        relevance = relevance.masked_fill(~past, -torch.inf)
        top = relevance.sort(dim=-1, descending=True, stable=True).indices[..., : self.config.top_k]
        chosen = torch.zeros_like(past).scatter(-1, top, True) & past
        scores = torch.einsum("bihd,bjd->bhij", query, key[:, :, 0])
        scores = scores + torch.einsum("bihd,bjd->bhij", query_rope, key_rope[:, :, 0])
        attention = (scores * self.scale).masked_fill(~chosen.unsqueeze(1), -torch.inf).softmax(-1)
        target = attention.detach().mean(1)
        logs = relevance.masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0)
        loss = (torch.special.xlogy(target, target) - target * logs).sum()
        return torch.einsum("bhij,bjd->bihd", attention, key[:, :, 0]), loss


class Model(nn.Module):
    """A model of one layer: takes bytes; returns the loss of the next bytes and the indexer's loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.norm, self.attention, self.last = RMSNorm(config.width), SparseAttention(config), RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.frequencies: Tensor
        self.register_buffer("frequencies", 10000 ** -torch.linspace(0, 1, config.rope // 2 + 1)[:-1])

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens[:, :-1])
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies.float()
        angles = torch.cat((angles, angles), -1)[None, :, None]
        mixed, index_loss = self.attention(self.norm(x), angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        logits = self.head(self.last(x + mixed))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()), index_loss
