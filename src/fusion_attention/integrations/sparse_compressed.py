"""Attention layers of DeepSeek-V4 in transformers: queries read a window of keys, and compressed keys (pooled tokens).

A layer reads all compressed keys, or those that its indexer chooses. Caches are transformers' classes, so
transformers' code may compute some calls of a sequence and this module others.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch

from fusion_attention.api.attention import attention
from fusion_attention.api.compress import compress
from fusion_attention.api.compressed import compressed_attention
from fusion_attention.api.sparse import indexer_target_loss, lightning_indexer
from fusion_attention.integrations.sparse_loss import Loss, computes_loss
from fusion_attention.integrations.transformers_masks import hidden, packed_lengths, padding_of
from fusion_attention.ir.mask import Band
from fusion_attention.nn.compressed import probabilities

__all__ = ["forward", "indexer_of", "reason_against"]

Tensor = torch.Tensor


class Call(NamedTuple):
    """Lengths, positions and cache of the sequences of one forward of a layer."""

    lengths: list[int] | None  # tokens of each packed sequence; None: a batch of sequences of equal length
    tokens: int  # tokens of a sequence, cached ones included
    positions: Tensor  # int64 [S], each token's position in its sequence; of packed sequences [B * S]
    cache: Any  # transformers' cache of the layer, or None

    def rows(self, t: Tensor) -> Tensor:
        """Returns t [B, S, ...] unchanged, or flattened to [B * S, ...] for packed sequences."""
        return t if self.lengths is None else t.flatten(0, 1)

    def windows(self, ratio: int) -> Tensor:
        """Returns int64 [n], the position of the first of the `ratio` tokens that each new compressed key pools."""
        device = self.positions.device
        if self.lengths is None:
            first = (self.tokens - len(self.positions)) // ratio
            return torch.arange(first, self.tokens // ratio, device=device) * ratio
        return torch.cat([torch.arange(n // ratio, device=device) * ratio for n in self.lengths])

    def length_arguments(self, batch: int, ratio: int) -> dict[str, Any]:
        """Returns lightning_indexer()'s arguments layout, q_len, kv_len, residual; ratio: tokens per compressed key."""
        if self.lengths is None:
            return {"residual": [self.tokens % ratio] * batch}
        kv_len, residual = [n // ratio for n in self.lengths], [n % ratio for n in self.lengths]
        return {"layout": "TND", "q_len": self.lengths, "kv_len": kv_len, "residual": residual}


def forward(
    code: ModuleType,
    module: Any,
    *,
    hidden_states: Tensor,
    position_embeddings: dict[str, tuple[Tensor, Tensor]],
    position_ids: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes the forward of a DeepSeek-V4 layer for arguments that reason_against() accepts; returns (output [B, S,
    hidden], None). code: transformers' modeling module. position_embeddings: (cos, sin) by layer type."""
    cos, sin = position_embeddings[module.rope_layer_type]
    rotate = code.apply_rotary_pos_emb
    q_latent = module.q_a_norm(module.q_a_proj(hidden_states))
    q = module.q_b_norm(module.q_b_proj(q_latent).unflatten(-1, (-1, module.head_dim)))
    q = rotate(q, cos, sin, unsqueeze_dim=2)
    k = rotate(module.kv_norm(module.kv_proj(hidden_states)).unsqueeze(2), cos, sin, unsqueeze_dim=2)
    call = _call(module, hidden_states, attention_mask, position_ids, past_key_values, others)
    if past_key_values is not None:
        rows = k.transpose(1, 2)
        k = past_key_values.update(rows, rows, module.layer_idx)[0].transpose(1, 2)
    inputs = hidden_states, q_latent, position_ids
    padded = attention_mask is not None and attention_mask.dtype == torch.bool
    real = attention_mask[:, -q.shape[1] :] if padded and attention_mask is not None else None
    out = _attend(code, module, call, inputs, (call.rows(q), call.rows(k), real)).view(q.shape)
    out = rotate(out, cos, -sin, unsqueeze_dim=2)
    grouped = out.reshape(*hidden_states.shape[:-1], module.config.o_groups, -1)
    return module.o_b_proj(module.o_a_proj(grouped).flatten(2)), None


def _call(module: Any, rows: Tensor, mask: Tensor | None, position_ids: Tensor, cache: Any, others: Any) -> Call:
    """Returns lengths, positions and cache of a forward over hidden states `rows`, [B, S, hidden]; raises ValueError
    for packed sequences with a cache. others: further arguments of the forward."""
    lengths = _lengths(rows, mask, position_ids, others, cache)
    first = 0 if cache is None else cache.get_seq_length(module.layer_idx)
    tokens = first + rows.shape[1]
    if lengths is None:
        layer = None if cache is None else cache.layers[module.layer_idx]
        return Call(None, tokens, torch.arange(first, tokens, device=rows.device), layer)
    if cache is not None:
        raise ValueError(
            f"{type(module).__name__}: packed sequences: expected no cache, got one (pass use_cache=False)"
        )
    positions = torch.cat([torch.arange(n, device=rows.device) for n in lengths])
    return Call(lengths, tokens, positions, None)


def _lengths(rows: Tensor, mask: Tensor | None, position_ids: Tensor, others: Any, cache: Any) -> Any:
    """Returns the token counts of the packed sequences in rows [B, S, ...], a list or (in a trace) a tensor; None if
    they are not packed. others: further arguments of the forward, such as cu_seq_lens_q."""
    if mask is not None and mask.dtype == torch.bool:
        return None
    fresh = cache is None or cache.get_seq_length() == 0
    ends = others.get("cu_seq_lens_q")
    lengths, _ = packed_lengths(mask, ends, None, position_ids if fresh else None, rows, rows)
    return None if lengths is None or len(lengths) == len(rows) == 1 else lengths


def reason_against(layer: Any, given: dict[str, Any]) -> str:
    """Returns the reason why forward() cannot compute a call of `layer`, or ""; given: the call's arguments by name."""
    mask, positions, rows = given["attention_mask"], given["position_ids"], given["hidden_states"]
    cache, count = given.get("past_key_values"), given["hidden_states"].shape[1]
    if mask is not None and mask.dim() == 4:
        return "a four-dimensional attention_mask may hide any key"
    lengths = _lengths(rows, mask, positions, given, cache)
    if lengths is not None:
        return "lengths of packed sequences are not read in a trace" if isinstance(lengths, Tensor) else ""
    # No token reads padding on the right of complete sequences; other padding would become part of compressed keys.
    if mask is not None and (cache is not None or hidden(mask) or padding_of(mask).kind in ("run", "scattered")):
        return "compressed keys contain padding (to train padded batches: on the right, with use_cache=False)"
    if hidden(positions):
        return ""
    first = 0 if cache is None else cache.get_seq_length(layer.layer_idx)
    agrees = positions == torch.arange(first, first + count, device=positions.device)
    if mask is not None:
        agrees = agrees | ~mask[:, mask.shape[1] - count :]
    return "" if agrees.all() else "position_ids are not those of the tokens"


def indexer_of(layer: Any) -> Any:
    """Returns the indexer, the module that scores keys, of a layer; None if it has none."""
    return getattr(layer.compressor, "indexer", None)


def _attend(code: ModuleType, module: Any, call: Call, inputs: Any, projected: Any) -> Tensor:
    """Returns the attention output of queries and keys `projected` = (q, k, real), [B, S, N, D] or packed [B * S, N,
    D]; stores the indexer's loss on the layer. real: bool [B, S], false for padding, or None. inputs: (hidden states,
    latent queries, position_ids)."""
    q, k, real = projected
    band, sink = Band.window(module.sliding_window - 1), module.sinks
    how: dict[str, Any] = {"band": band, "sink": sink, "scale": module.scaling}
    if call.lengths is not None:
        how |= {"layout": "TND", "q_len": call.lengths}
    compressor, indexer = module.compressor, indexer_of(module)
    if compressor is None:
        return attention(q, k, k, **how)
    ratio = compressor.compress_rate
    entries = _entries(code, compressor, "compressor", call, inputs[0], indexer is not None)
    trains = computes_loss(module)
    index, lists, batch = None, None, len(inputs[0])
    if indexer is not None:
        most = entries.shape[1] if call.lengths is None else max(call.lengths) // ratio
        chooses = module.stage not in ("dense", "warmup") and most > indexer.index_topk
        index = _index(code, indexer, call, inputs, chooses or trains, trains)
        if chooses and index is not None:
            with torch.no_grad():
                lengths = call.length_arguments(batch, ratio)
                lists, _ = lightning_indexer(*index, indexer.index_topk, ratio=ratio, **lengths)
    if call.lengths is None:
        how["residual"] = [call.tokens % ratio] * batch
    else:
        how["compressed_len"] = [n // ratio for n in call.lengths]
    result = compressed_attention(q, k, entries, lists, ratio=ratio, return_lse=trains, **how)
    if not isinstance(result, tuple):
        return result
    out, lse = result
    if index is not None:
        module.indexer_loss = Loss(_loss(module, call, LossOperands(q, entries, lse, *index), lists, real))
    return out


def _entries(code: ModuleType, compressor: Any, name: str, call: Call, x: Tensor, overlap: bool) -> Tensor:
    """Returns the T compressed keys [B, T, 1, D] of a compressor or an indexer, cached ones included. name:
    "compressor" or "indexer", in the cache. x: hidden states. overlap: a compressed key also pools the tokens of the
    previous window."""
    ratio, cache = compressor.compress_rate, call.cache
    windows = call.windows(ratio)
    kv, gate = compressor.kv_proj(x), compressor.gate_proj(x)
    if cache is not None:
        kv, gate, _ = cache.store_compression_weights(name, kv, gate)
    if cache is None or kv.shape[1]:
        pooled = _pooled(compressor, name, call, kv, gate, overlap)
        new = compressor.kv_norm(pooled)
        turns = compressor.rotary_emb(new, position_ids=windows[None], layer_type=compressor.rope_layer_type)
        batched = new[None] if call.lengths is not None else new
        new = code.apply_rotary_pos_emb(batched.unsqueeze(2), *turns, unsqueeze_dim=2)
        new = new.flatten(0, 1) if call.lengths is not None else new
    else:
        new = kv.new_zeros(len(x), 0, 1, compressor.head_dim)
    if cache is not None:
        new = cache.update_compressor_states(name, new.squeeze(2)).unsqueeze(2)
    return new


def _pooled(compressor: Any, name: str, call: Call, kv: Tensor, gate: Tensor, overlap: bool) -> Tensor:
    """Returns the pooled keys of complete windows of tokens, [B, windows, D] or packed [windows, D], before
    normalization, from outputs of kv_proj and gate_proj, [B, tokens, D], or 2 * D if windows overlap."""
    ratio, cache, dim = compressor.compress_rate, call.cache, compressor.head_dim
    bias = compressor.position_bias
    if cache is None:
        gate = call.rows(gate) + bias[call.positions % ratio]
    else:  # the cache returns complete windows only
        gate = gate + bias.repeat(gate.shape[1] // ratio, 1)
    dtype, kv = kv.dtype, call.rows(kv)
    prior: Any = None, None
    if overlap and cache is not None:
        prior = cache.update_overlap_state(name, *(t.unflatten(1, (-1, ratio)) for t in (kv, gate)), dim)
        if prior[0] is not None:  # prepend the previous window; only the first half of its elements is read
            kv, gate = (
                torch.cat((torch.cat((old, torch.zeros_like(old)), -1).to(t.dtype), t), 1)
                for old, t in zip(prior, (kv, gate), strict=True)
            )
    how: dict[str, Any] = {} if call.lengths is None else {"layout": "TND", "kv_len": call.lengths}
    pooled = compress(kv.to(gate.dtype).unsqueeze(-2), gate.unsqueeze(-2), ratio=ratio, overlap=overlap, **how)
    pooled = pooled.squeeze(-2).to(dtype)
    return pooled if prior[0] is None else pooled[:, 1:]


def _index(
    code: ModuleType, indexer: Any, call: Call, inputs: Any, used: bool, trains: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the indexer's (queries, keys, head weights), or None if no query reads chosen keys (not used); the cache
    stores the keys in both cases. trains: records gradients of the indexer's parameters."""
    if call.cache is None and not used:
        return None
    x, q_latent, position_ids = inputs
    with torch.set_grad_enabled(trains):
        x = x.detach()
        keys = _entries(code, indexer, "indexer", call, x, overlap=True)
        if not used:
            return None
        q = indexer.q_b_proj(q_latent.detach()).unflatten(-1, (-1, indexer.head_dim))
        turns = indexer.rotary_emb(x, position_ids=position_ids, layer_type=indexer.rope_layer_type)
        q = code.apply_rotary_pos_emb(q, *turns, unsqueeze_dim=2)
        scorer = indexer.scorer
        weights = scorer.weights_proj(x)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        weights = weights * (scorer.weights_scaling * scorer.softmax_scale)
        return call.rows(q), keys, call.rows(weights)


class LossOperands(NamedTuple):
    """The operands of an indexer's loss, [B, S, ...] or packed [B * S, ...].
    They are the attention's queries, compressed keys and lse, then the indexer's queries, keys and head weights."""

    q: Tensor
    entries: Tensor
    lse: Tensor
    index_q: Tensor
    index_k: Tensor
    weights: Tensor


def _loss(module: Any, call: Call, rows: LossOperands, lists: Tensor | None, real: Tensor | None) -> Tensor:
    """Returns the indexer's loss, the mean over tokens of KL(attention's probabilities || the indexer's softmax).
    lists: chosen compressed keys of each query, or None. real: bool [B, S], false for padding, or None."""
    ratio = module.compressor.compress_rate
    if call.lengths is None:
        tokens: Any = rows.q.shape[0] * rows.q.shape[1] if real is None else real.sum().clamp(min=1)
        return _of_batch(rows, lists, real, ratio, call.tokens) / tokens
    losses, row, key = [], 0, 0
    for length in call.lengths:
        row_range, key_range = slice(row, row + length), slice(key, key + length // ratio)
        one = LossOperands(
            rows.q[None, row_range], rows.entries[None, key_range], rows.lse[row_range].mT[None],
            rows.index_q[None, row_range], rows.index_k[None, key_range], rows.weights[None, row_range],
        )  # fmt: skip
        losses.append(_of_batch(one, None if lists is None else lists[None, row_range], None, ratio, length))
        row, key = row_range.stop, key_range.stop
    return torch.stack(losses).sum() / row


def _of_batch(rows: LossOperands, lists: Tensor | None, real: Tensor | None, ratio: int, tokens: int) -> Tensor:
    """Returns the sum over queries [B, S, ...] of the indexer's loss, KL(attention's probabilities || its softmax), for
    sequences of `tokens` tokens. lists: chosen compressed keys [B, S, 1, K]. real: [B, S], false: padding."""
    if not rows.entries.shape[1]:
        return rows.index_q.new_zeros((), dtype=torch.float32)
    target = probabilities(rows.q, rows.entries, rows.lse, lists, ratio, tokens % ratio)
    if real is not None:
        target = target.where(real[..., None, None], 0)
    how: dict[str, Any] = {"ratio": ratio, "residual": [tokens % ratio] * len(rows.q)}
    loss = indexer_target_loss(rows.index_q, rows.index_k, rows.weights, target, lists, **how)
    mass = target.sum(-1)
    return loss - torch.xlogy(mass, mass).sum()  # mass * KL(target / mass || ...); same gradient
