"""Attention layers of DeepSeek-V3.2 and GLM-5 in transformers, over the keys that their indexers choose.

A row whose visible keys are at most top_k reads all of them, so the first rows of a sequence need no indexer. Later
rows read latents that all heads share ("absorbed": kv_b_proj is multiplied into query and output). A latent takes more
products than an expanded key, so rows that see few keys beyond top_k are dense, with a mask of their chosen keys.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fusion_attention.api.attention import attention
from fusion_attention.api.sparse import indexer_loss, lightning_indexer, sparse_attention
from fusion_attention.integrations.sparse_loss import Loss, computes_loss
from fusion_attention.integrations.sparse_sequences import Sequences, sequences_of
from fusion_attention.ir.mask import Band

__all__ = ["forward"]

Tensor = torch.Tensor
_CAUSAL = Band.causal()


class Latents(NamedTuple):
    """A layer's queries (q without, q_rope with rotary embedding) and keys (low-rank latents that all heads share, and
    k_rope), without padding or with padding last."""

    q: Tensor  # [..., N, nope]
    q_rope: Tensor  # [..., N, rope]
    latent: Tensor  # [..., 1, rank]
    k_rope: Tensor  # [..., 1, rope]


class Index(NamedTuple):
    """Queries q [..., heads, dim], keys k [..., 1, dim], head weights [..., heads] of an indexer, which scores keys."""

    q: Tensor
    k: Tensor
    weights: Tensor


def forward(
    code: ModuleType,
    index_rotation: str,
    shares: bool,
    module: Any,
    *,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    position_ids: Tensor | None = None,
    prev_topk_indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor | None, ...]:
    """Computes the forward of a DeepSeek-V3.2 or GLM-5 attention layer; returns (output [B, S, hidden], None), and the
    chosen keys if it `shares` them with later layers, which get them as prev_topk_indices.

    code: transformers' modeling module of the family. index_rotation: the name of the indexer's rotary function in it.
    attention_mask: bool [B, keys], false for padding; or the number of each packed token's sequence; or None.
    """
    batch = len(hidden_states)
    q_latent = module.q_a_layernorm(module.q_a_proj(hidden_states))
    q = module.q_b_proj(q_latent).unflatten(-1, (-1, module.qk_head_dim))
    q, q_rope = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    latent, k_rope = module.kv_a_proj_with_mqa(hidden_states).unsqueeze(2).split(
        [module.kv_lora_rank, module.qk_rope_head_dim], -1
    )  # fmt: skip
    q_rope, k_rope = code.apply_rotary_pos_emb_interleave(q_rope, k_rope, *position_embeddings, unsqueeze_dim=2)
    latent = module.kv_a_layernorm(latent)
    if past_key_values is not None:
        stored = past_key_values.update(latent.transpose(1, 2), k_rope.transpose(1, 2), module.layer_idx)
        latent, k_rope = (t.transpose(1, 2) for t in stored)
    sequences = sequences_of(attention_mask, q, latent, position_ids, **others)
    first = dense_rows(module, sequences, q.shape[1])
    index = None
    if module.indexer is not None:
        inputs = hidden_states.detach(), q_latent.detach(), position_embeddings
        index = _index(getattr(code, index_rotation), module, sequences, inputs, past_key_values, first is not None)
    rows = Latents(*map(sequences.rows, (q, q_rope)), *map(sequences.keys, (latent, k_rope)))
    out, lists, loss = _attend(module, sequences, rows, index, first, prev_topk_indices)
    if loss is not None:
        module.indexer_loss = Loss(loss / sequences.tokens(q))
    out = module.o_proj(sequences.back(out, batch).flatten(2))
    return (out, None, lists) if shares else (out, None)


def dense_rows(module: Any, sequences: Sequences, rows: int) -> int | None:
    """Returns the number of queries at the start of every sequence that read all their visible keys, because these are
    at most top_k; None if all queries do."""
    top_k = module.config.index_topk
    if module.stage in ("dense", "warmup") or sequences.longest <= top_k:
        return None
    aligned = sequences.layout == "BSND" and sequences.described == rows  # row i is at position i
    return top_k if aligned else 0


def dense_positions(config: Any) -> int:
    """Returns the position below which dense attention with a mask of the chosen keys takes fewer products than
    attention over the chosen latents; at least index_topk. config: the model's configuration."""
    top_k, rank, rope = config.index_topk, config.kv_lora_rank, config.qk_rope_head_dim
    return max(top_k, top_k * (2 * rank + rope) // (config.qk_nope_head_dim + rope + config.v_head_dim))


def _hidden(lists: Tensor, rows: int) -> Tensor:
    """Returns bool [B, 1, rows, rows], true for keys that the indexer did not choose for a query; lists: chosen keys of
    the last n queries, [B, n, K]; earlier queries read all keys. The causal mask is separate."""
    chosen = lists.clamp(0, rows - 1).long()  # rows of padding may list nothing
    hidden = torch.ones(*lists.shape[:-1], rows, dtype=torch.bool, device=lists.device).scatter(-1, chosen, False)
    return torch.nn.functional.pad(hidden, (0, 0, rows - lists.shape[1], 0), value=False)[:, None]


def _index(
    rotate: Callable[..., tuple[Tensor, Tensor]], module: Any, sequences: Sequences, inputs: Any, cache: Any, used: bool
) -> Index | None:
    """Returns the indexer's queries, keys and head weights, or None if no query reads chosen keys (not used); the cache
    stores the keys in both cases. inputs: (hidden states, latent queries, (cos, sin)) of the layer."""
    trains = computes_loss(module)
    if cache is None and not used and not trains:
        return None
    hidden_states, q_latent, (cos, sin) = inputs
    indexer, rope = module.indexer, module.qk_rope_head_dim
    with torch.set_grad_enabled(trains):
        q = indexer.wq_b(q_latent).unflatten(-1, (-1, indexer.head_dim))
        k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
        rotated = rotate(q[..., :rope], k[..., :rope], cos, sin, unsqueeze_dim=2)
        q, k = (torch.cat((a, b[..., rope:]), -1) for a, b in zip(rotated, (q, k), strict=True))
        if cache is not None:
            k = cache.update_indexer(k.squeeze(2), module.layer_idx).unsqueeze(2)
            if not used and not trains:
                return None
        # weights_proj may be float32 in a model of another dtype.
        weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype))
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
        return Index(sequences.rows(q), sequences.keys(k), sequences.rows(weights))


def _attend(
    module: Any, sequences: Sequences, rows: Latents, index: Index | None, first: int | None, lists: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns (output of all queries [..., N, v], chosen keys [B, S - first, 1, K] or None, sum of the indexer's losses
    or None). first: the first query that reads chosen keys; None: all read all keys. lists: chosen keys of another
    layer, for a layer without an indexer."""
    if first is None:
        out, loss = _of_rows(module, rows, index, None, sequences.lengths())
        return out, None, loss
    if index is not None:
        choosing = Index(index.q[:, first:], index.k, index.weights[:, first:])
        with torch.no_grad():
            lists, _ = lightning_indexer(*choosing, module.config.index_topk, **sequences.lengths(first))
    assert lists is not None  # sparse_models.check() refuses a first layer without an indexer
    results, end = [], first
    if first:
        # A loss reads lists of latents, and without factors chosen keys are expanded like others.
        sparse = computes_loss(module) or _factors(module) is None
        end = first if sparse else min(rows.q.shape[-3], dense_positions(module.config))
        near = Latents(*(t[:, :end] for t in rows))
        near_index = None if index is None else Index(*(t[:, :end] for t in index))
        how = sequences.lengths(0, end, end)
        if end > first:
            how["blocked"] = _hidden(lists[:, : end - first, 0], end)
        results.append(_of_rows(module, near, near_index, None, how))
    if not first or end < rows.q.shape[-3]:
        rows = rows._replace(q=rows.q[:, end:], q_rope=rows.q_rope[:, end:])
        index = None if index is None else Index(index.q[:, end:], index.k, index.weights[:, end:])
        chosen = lists[:, end - first :]
        results.append(_of_rows(module, rows, index, chosen, sequences.lengths(end)))
    outs, losses = zip(*results, strict=True)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1), lists, None if None in losses else sum(losses)


def _of_rows(
    module: Any, rows: Latents, index: Index | None, lists: Tensor | None, how: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Returns (out [..., N, v], the indexer's loss or None) of `rows` over the keys of lists [..., 1, K], or, if None,
    over all visible keys. With absorbed latents, a pair of query and key takes 2 rank + rope products instead of nope +
    rope + v, but kv_b_proj is not applied to the keys."""
    trains, factors = computes_loss(module), _factors(module)
    count, keys = (t.shape[-3] for t in (rows.q, rows.latent))
    rank, expanded = module.kv_lora_rank, module.qk_nope_head_dim + module.v_head_dim
    products = count * rank * expanded + count * keys * 2 * rank  # of dense attention over absorbed latents
    fewer = bool(products < keys * rank * expanded + count * keys * expanded)
    if factors is not None and (lists is not None or fewer):
        q, k, v = torch.einsum("...nd,ndr->...nr", rows.q, factors[0]), rows.latent, None
    else:
        q, factors = rows.q, None
        k, v = module.kv_b_proj(rows.latent.squeeze(-2)).unflatten(-1, (q.shape[-2], -1)).split(
            [module.qk_nope_head_dim, module.v_head_dim], -1
        )  # fmt: skip
    words = {**how, "q_rope": rows.q_rope, "k_rope": rows.k_rope.expand(*k.shape[:-1], -1), "scale": module.scaling}
    if lists is None:
        result = attention(q, k, k if v is None else v, band=_CAUSAL, return_lse=trains, **words)
    else:
        result = sparse_attention(q, k, v, lists.expand(*lists.shape[:-2], k.shape[-2], -1), return_lse=trains, **words)
    out, lse = result if isinstance(result, tuple) else (result, None)
    loss = None
    if lse is not None and index is not None:
        loss = indexer_loss(q, k, lse, *index, lists, **words)
    return out if factors is None else torch.einsum("...nr,ndr->...nd", out, factors[1]), loss


def _factors(module: Any) -> tuple[Tensor, Tensor] | None:
    """Returns the rows of kv_b_proj's weight for keys, [N, nope, rank], and for values, [N, v, rank]; None if kv_b_proj
    may compute more than a product with it: an adapter, a quantised layer, hooks, a forward of its own."""
    linear = module.kv_b_proj
    hooks = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
    if type(linear) is not torch.nn.Linear or hooks:
        return None
    up_k, up_v = linear.weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim)).split(
        [module.qk_nope_head_dim, module.v_head_dim], 1
    )  # fmt: skip
    return up_k, up_v
