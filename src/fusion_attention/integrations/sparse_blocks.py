"""Attention layers of Qwen4 in transformers, in which an indexer chooses blocks of keys for each query.

A query reads the blocks of `indexer_compress_ratio` keys with the largest scores, and the keys after the last complete
block. A block's key is the mean of its indexer keys, and its score the sum over indexer heads of max(0, q . key).
"""

import itertools
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fusion_attention.api.attention import attention
from fusion_attention.api.compress import compress
from fusion_attention.api.sparse import lightning_indexer, sparse_attention
from fusion_attention.integrations.sparse_sequences import Sequences, sequences_of
from fusion_attention.ir.mask import Band

__all__ = ["forward"]

Tensor = torch.Tensor
_CAUSAL = Band.causal()


class Index(NamedTuple):
    """The operands of Qwen4's indexer: queries q, keys before pooling (raw), and the rotary cos and sin of all keys,
    without padding or with padding last."""

    q: Tensor  # [..., heads, D]
    raw: Tensor  # [..., 1, D]
    cos: Tensor  # [..., R]
    sin: Tensor


def forward(
    code: ModuleType,
    module: Any,
    *,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes the forward of a Qwen4 attention layer; returns (output [B, S, hidden], None). code: transformers'
    modeling module of the family. position_embeddings: (cos, sin) of all tokens, cached ones included."""
    batch, rows = hidden_states.shape[:2]
    q, gate = module.q_proj(hidden_states).unflatten(-1, (-1, 2 * module.head_dim)).chunk(2, -1)
    k, v = (f(hidden_states).unflatten(-1, (-1, module.head_dim)) for f in (module.k_proj, module.v_proj))
    cos, sin = position_embeddings
    turns = cos[:, -rows:], sin[:, -rows:]
    q, k = code.apply_rotary_pos_emb(module.q_norm(q), module.k_norm(k), *turns, unsqueeze_dim=2)
    if past_key_values is not None:
        stored = past_key_values.update(k.transpose(1, 2), v.transpose(1, 2), module.layer_idx)
        k, v = (t.transpose(1, 2) for t in stored)
    sequences = sequences_of(attention_mask, q, k, **others)
    indexer = module.indexer
    # Rows before `first` have at most block_topk complete blocks, so they read all their visible keys.
    first: int | None = (indexer.block_topk + 1) * indexer.compress_ratio - 1
    if sequences.longest <= (first or 0):
        first = None
    elif sequences.layout == "TND" or sequences.described != rows:
        first = 0
    index = _index(code, module, sequences, (hidden_states, position_embeddings), past_key_values, first is not None)
    out = _attend(code, module, sequences, (sequences.rows(q), sequences.keys(k), sequences.keys(v)), index, first)
    out = sequences.back(out, batch).flatten(2) * torch.sigmoid(gate.flatten(2))
    return module.o_proj(out), None


def _index(code: ModuleType, module: Any, sequences: Sequences, inputs: Any, cache: Any, used: bool) -> Index | None:
    """Returns the indexer's queries and keys, or None if no query reads chosen blocks (not used); the cache stores the
    indexer's keys in both cases. inputs: (hidden states, (cos, sin)) of the layer."""
    if cache is None and not used:
        return None
    hidden_states, (cos, sin) = inputs
    indexer, rows = module.indexer, hidden_states.shape[1]
    with torch.no_grad():
        dims = [indexer.index_n_heads * indexer.index_head_dim, indexer.index_kv_heads * indexer.index_head_dim]
        q, raw = indexer.index_qk_proj(hidden_states).split(dims, -1)
        if cache is not None:
            raw = cache.update_indexer(raw, module.layer_idx)
        if not used:
            return None
        q = indexer.q_layernorm(q.unflatten(-1, (-1, indexer.index_head_dim)))
        q = code.apply_rotary_pos_emb(q, cos=cos[:, -rows:], sin=sin[:, -rows:], unsqueeze_dim=2)
        tables = (sequences.keys(t.expand(len(raw), -1, -1)) for t in (cos, sin))
        return Index(sequences.rows(q), sequences.keys(raw).unsqueeze(-2), *tables)


@torch.no_grad()
def _lists(code: ModuleType, indexer: Any, index: Index, kv_len: Any, how: dict[str, Any]) -> Tensor:
    """Returns the numbers of the key blocks that each query reads, [..., 1, block_topk + 1]: the blocks that the
    indexer chooses, and the incomplete block of the query's own token, if it has one; unused entries are -1. how:
    layout, q_len and kv_len of these queries."""
    ratio, layout, device = indexer.compress_ratio, how["layout"], index.q.device
    pooled = compress(index.raw, torch.zeros_like(index.raw), ratio=ratio, layout=layout, kv_len=kv_len)
    if layout == "TND":
        ends = list(itertools.accumulate(kv_len, initial=0))
        spans = zip(ends, kv_len, strict=False)
        starts = torch.cat([torch.arange(n // ratio, device=device) * ratio + end for end, n in spans])
        rows = zip(how["q_len"], kv_len, strict=True)
        position = torch.cat([torch.arange(n - count, n, device=device) for count, n in rows])
        real = torch.ones_like(position, dtype=torch.bool)
    else:
        starts = torch.arange(pooled.shape[1], device=device) * ratio
        count, row = index.q.shape[1], torch.arange(index.q.shape[1], device=device)
        keys_of = index.raw.new_full((len(index.raw), 1), index.raw.shape[1], dtype=torch.int64)
        rows_of = torch.full_like(keys_of, count)
        if kv_len is not None:
            keys_of, rows_of = (torch.as_tensor(n, device=device)[:, None] for n in (kv_len, how["q_len"]))
        position, real = keys_of - rows_of + row, row < rows_of
    cos, sin = (t.index_select(-2, starts) for t in (index.cos, index.sin))
    keys = code.apply_rotary_pos_emb(indexer.k_layernorm(pooled), cos=cos, sin=sin, unsqueeze_dim=-2)
    weights = index.q.new_full(index.q.shape[:-1], indexer.index_head_dim**-0.5)
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    tokens: Any = [index.raw.shape[1]] * len(index.raw) if kv_len is None else kv_len
    is_tensor = isinstance(tokens, Tensor)
    blocks, residual = (
        (tokens // ratio, tokens % ratio) if is_tensor else ([n // ratio for n in tokens], [n % ratio for n in tokens])
    )
    call = {**how, "kv_len": blocks, "residual": residual, "ratio": ratio}
    chosen, _ = lightning_indexer(index.q, keys, weights, indexer.block_topk, **call)
    incomplete = (((position + 1) % ratio > 0) & real)[..., None, None]
    last = ((position + 1) // ratio)[..., None, None].to(chosen.dtype)
    none = torch.full_like(last, -1)
    return torch.where(incomplete, torch.cat((last, chosen), -1), torch.cat((chosen, none), -1))


def _attend(
    code: ModuleType, module: Any, sequences: Sequences, rows: Any, index: Index | None, first: int | None
) -> Tensor:
    """Returns the attention output [..., N, D] of rows = (q, k, v), without padding between tokens. The first `first`
    queries of every sequence (None: all) read all visible keys, later ones the blocks that the indexer chooses."""
    q, k, v = rows
    how: dict[str, Any] = {"scale": module.scaling}
    if first is None:
        return attention(q, k, v, band=_CAUSAL, **sequences.lengths(), **how)
    assert index is not None
    outs = []
    if first:
        near_q, near_k, near_v = (t[:, :first] for t in (q, k, v))
        outs.append(attention(near_q, near_k, near_v, band=_CAUSAL, **sequences.lengths(0, first, first), **how))
        q, index = q[:, first:], index._replace(q=index.q[:, first:])
    lengths = sequences.lengths(first)
    lists = _lists(code, module.indexer, index, sequences.kv_len, lengths)
    lists = lists.expand(*lists.shape[:-2], k.shape[-2], -1)
    outs.append(sparse_attention(q, k, v, lists, block=module.indexer.compress_ratio, **lengths, **how))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)
