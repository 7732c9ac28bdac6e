"""Computes the layers of fusion_attention.nn with masks and softmax, one sequence at a time."""

from typing import Any

import torch
from torch import Tensor

from fusion_attention import nn as dsa


def one_sequence(
    q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, weights: Tensor, keys: Tensor, scale: float
) -> Tensor:
    """Returns the loss of a sequence: q [S, N1, D], k [S, N2, D] (rope parts appended), keys bool [S, S]."""
    with torch.no_grad():
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        p = scores.masked_fill(~keys, -torch.inf).softmax(-1).mean(0)
    index = (torch.einsum("ihd,jd->ihj", index_q, index_k[:, 0]).relu() * weights[..., None]).sum(1)
    index = index.masked_fill(~keys, -torch.inf)
    logs = index.log_softmax(-1).masked_fill(~keys, 0)
    return (torch.special.xlogy(p, p) - p * logs).sum()


LATENT: dict[str, Any] = {"q_rank": 20, "kv_rank": 16, "nope_dim": 8, "rope_dim": 6, "v_dim": 10}
HEADS = 4
DIM, TOP_K = 32, 5
INDEX: dict[str, Any] = {"index_heads": 3, "index_dim": 12, "top_k": TOP_K}


def make(form: str, stage: dsa.Stage = "sparse") -> dsa.SparseAttention:
    """Makes a layer with random weights; form: "latent", "heads" or "grouped"."""
    torch.manual_seed(0)
    if form == "latent":
        layer: dsa.SparseAttention = dsa.SparseLatentAttention(DIM, HEADS, **LATENT, **INDEX)
    else:
        layer = dsa.SparseSelfAttention(DIM, HEADS, kv_heads=2 if form == "grouped" else None, **INDEX)
    dsa.set_stage(layer, stage)
    return layer


def turned(rows: Tensor, positions: Tensor, width: int, neighbours: bool = False) -> Tensor:
    """Applies rotary embedding to [S, heads, D] with complex numbers, at least in float32."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    pairs = rows[..., :width].to(dtype).unflatten(-1, (-1, 2) if neighbours else (2, -1))
    pairs = pairs if neighbours else pairs.transpose(-1, -2)
    rate = torch.tensor([10000.0 ** (-2 * i / width) for i in range(width // 2)], dtype=dtype)
    angle = (positions[:, None] * rate)[:, None]
    spun = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    spun = spun.flatten(-2) if neighbours else spun.transpose(-1, -2).flatten(-2)
    return torch.cat([spun.to(rows.dtype), rows[..., width:]], -1)


def plain_rows(layer: Any, x: Tensor, width: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v [S, heads, D] and the indexer's query input of one sequence; MLA's weights are not absorbed."""
    at = torch.arange(len(x))
    if isinstance(layer, dsa.SparseSelfAttention):
        q, k, v = (f(x).unflatten(-1, (-1, layer.head_dim)) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
        return turned(q, at, width), turned(k, at, width), v, x
    nope, rope = LATENT["nope_dim"], LATENT["rope_dim"]
    q_latent = layer.q_a_layernorm(layer.q_a_proj(x))
    q = layer.q_b_proj(q_latent).unflatten(-1, (HEADS, -1))
    latent, k_rope = layer.kv_a_proj_with_mqa(x).split([LATENT["kv_rank"], rope], -1)
    kv = layer.kv_b_proj(layer.kv_a_layernorm(latent)).unflatten(-1, (HEADS, -1))
    k_rope = turned(k_rope[:, None], at, rope, neighbours=True).expand(-1, HEADS, -1)
    q = torch.cat([q[..., :nope], turned(q[..., nope:], at, rope, neighbours=True)], -1)
    return q, torch.cat([kv[..., :nope], k_rope], -1), kv[..., nope:], q_latent


def output_and_loss(layer: Any, x: Tensor, width: int = 8) -> tuple[Tensor, Tensor]:
    """Returns the output of a layer in its stage for one sequence [S, DIM], and the loss summed over rows.

    width: number of elements that rope rotates; latent layers use LATENT's.
    """
    q, k, v, query = plain_rows(layer, x, width)
    indexer, width = layer.indexer, LATENT["rope_dim"] if isinstance(layer, dsa.SparseLatentAttention) else width
    at = torch.arange(len(x))
    index_q = turned(indexer.wq_b(query.detach()).unflatten(-1, (indexer.heads, -1)), at, width)
    index_k = turned(indexer.k_norm(indexer.wk(x.detach()))[:, None], at, width)
    weights = indexer.weights_proj(x.detach()) / (indexer.heads * indexer.head_dim) ** 0.5
    scores = (torch.einsum("ihd,jd->ihj", index_q, index_k[:, 0]).relu() * weights[..., None]).sum(1)
    keys = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    if layer.stage == "sparse":
        order = (
            scores.masked_fill(~keys, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, : indexer.top_k]
        )
        keys = keys & torch.zeros_like(keys).scatter_(1, order, True)
    loss = x.new_zeros(())
    if layer.stage != "dense":
        loss = one_sequence(q, k, index_q, index_k, weights, keys, q.shape[-1] ** -0.5)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    p = (torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5).masked_fill(~keys, -torch.inf).softmax(-1)
    out = layer.o_proj(torch.einsum("hij,jhd->ihd", p, v).flatten(1))
    return out, loss
