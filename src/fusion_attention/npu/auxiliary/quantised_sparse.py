"""torch_npu's sparse attention and its indexer over int8, by those over floats: integers as what they mean.

What an integer with a float16 scale means is exact in float32, in which both compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_attention.npu.auxiliary.call import checked, in_place_of
from fusion_attention.ops.auxiliary import quantised_sparse
from fusion_attention.ops.indexer import records as indexer
from fusion_attention.ops.sparse import records as sparse
from fusion_attention.ops.sparse.records import LARGEST_INT64
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.aliases import aliased

__all__ = ["npu_kv_quant_sparse_flash_attention", "npu_quant_lightning_indexer"]

Tensor = torch.Tensor
Lengths = Tensor | Sequence[int] | None


@aliased
def npu_quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = LARGEST_INT64,
    next_tokens: int = LARGEST_INT64,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
) -> Tensor:
    """The keys that score highest for every row, by ReLU-weighted heads, of int8 rows.

    I_j = sum_h w_h * max(0, query_scale_h * key_scale_j * (q_h . k_j));  indices = the sparse_count largest I

    Args:
        query: int8 [B, S1, N1, D], or TND [T1, N1, D].
        key: int8 [B, S2, 1, D], TND [T2, 1, D], or PA_BSND [pages, page, 1, D].
        weights: [B, S1, N1] or [T1, N1]; float16, bfloat16 or float32.
        query_dequant_scale, key_dequant_scale: float16 or float32, the shapes of query and key without D.
        query_quant_mode, key_quant_mode: 0.
        query_dtype, key_dtype: None, or 1 (int8).
        all others: as in npu_lightning_indexer.

    Returns:
        int32 [B, S1, 1, K] or [T1, 1, K], as npu_lightning_indexer's indices. The chip rounds scores to float16, so
        that more of them are equal there.

    Raises:
        ContractError: a call that `fusion-attention ops npu_quant_lightning_indexer` does not allow.
        BackendError: no back end computes it.

    Source: Ascend op-plugin, npu_quant_lightning_indexer.

    Example:
        >>> q, key = (torch.randint(-9, 9, shape).to(torch.int8) for shape in ((1, 6, 4, 16), (1, 9, 1, 16)))
        >>> weights, scale, key_scale = torch.rand(1, 6, 4), torch.ones(1, 6, 4), torch.ones(1, 9, 1)
        >>> list(npu_quant_lightning_indexer(q, key, weights, scale, key_scale, 0, 0, sparse_count=4).shape)
        [1, 6, 1, 4]
    """
    args = {
        "query": query, "key": key, "weights": weights, "query_dequant_scale": query_dequant_scale,
        "key_dequant_scale": key_dequant_scale, "query_quant_mode": query_quant_mode, "key_quant_mode": key_quant_mode,
        "actual_seq_qlen": actual_seq_lengths_query, "actual_seq_kvlen": actual_seq_lengths_key,
        "block_table": block_table, "layout": layout_query, "layout_kv": layout_key, "sparse_count": sparse_count,
        "sparse_mode": sparse_mode, "pre_tokens": pre_tokens, "next_tokens": next_tokens, "query_dtype": query_dtype,
        "key_dtype": key_dtype,
    }  # fmt: skip
    given = {**args, **checked(quantised_sparse.INDEXER, args)}
    (key, key_dequant_scale), table = _pages_used((key, key_dequant_scale), block_table)
    wide = {
        "query": query.float() * query_dequant_scale.float().unsqueeze(-1),
        "key": key.float() * key_dequant_scale.float().unsqueeze(-1), "weights": weights.float(), "block_table": table,
    }  # fmt: skip
    args = {p.name: given.get(p.name) for p in indexer.TORCH.params if not p.name.endswith("_out")} | wide
    args["return_values"] = False
    with in_place_of(quantised_sparse.INDEXER):
        result: Tensor = dispatch.results(indexer.TORCH, args)["sparse_indices_out"]
    return result


@aliased
def npu_kv_quant_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    key_dequant_scale: Tensor | None = None,
    value_dequant_scale: Tensor | None = None,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_kv: Lengths = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = LARGEST_INT64,
    next_tokens: int = LARGEST_INT64,
    attention_mode: int = 0,
    quant_scale_repo_mode: int = 1,
    tile_size: int = 128,
    rope_head_dim: int = 64,
    key_dtype: int | None = None,
    value_dtype: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over the blocks of keys that every row selects, latents as int8 with a scale for every tile.

    latent = integers * scale of their tile;  s_j = scale_value * (q . latent_j + q_rope . k_rope_j)
    out = sum_j exp(s_j - max) latent_j / sum,  over the selected keys j

    Args:
        query: [B, S1, N1, D], or TND [T1, N1, D]; float16 or bfloat16. The last rope_head_dim elements are the rope
            part, those before it the latent's.
        key: int8 bytes, [B, S2, 1, W], TND [T2, 1, W], or PA_BSND [pages, page, 1, W]: the latent as int8, the rope
            part in query's dtype, a float32 scale of every tile; W is 656 of D 576.
        value: int8; not read, for the latents are the values.
        key_quant_mode, value_quant_mode: 2. quant_scale_repo_mode: 1.
        key_dequant_scale, value_dequant_scale: reserved.
        tile_size: elements of a latent that share a scale.
        key_dtype, value_dtype: None, or 1 (int8).
        sinks: float32 [N1], one more logit per row and head: its exponential joins the sum.
        all others: as in npu_sparse_flash_attention.

    Returns:
        attention_out: as query, with the latent's elements. Computed in float32, rounded once.

    Raises:
        ContractError: a call that `fusion-attention ops npu_kv_quant_sparse_flash_attention` does not allow.
        BackendError: no back end computes it.

    Source: Ascend op-plugin, npu_kv_quant_sparse_flash_attention.

    Example:
        >>> q, rope = torch.randn(1, 6, 4, 24).half(), torch.randn(1, 9, 1, 8).half()
        >>> parts = torch.ones(1, 9, 1, 16).to(torch.int8), rope, torch.full((1, 9, 1, 2), 0.5)
        >>> key = torch.cat([part.view(torch.int8) for part in parts], -1)
        >>> indices = torch.arange(4, dtype=torch.int32).expand(1, 6, 1, 4)
        >>> out = npu_kv_quant_sparse_flash_attention(
        ...     q, key, key, indices, 0.25, 2, 2, sparse_mode=0, tile_size=8, rope_head_dim=8)
        >>> list(out.shape), out.unique().item()
        ([1, 6, 4, 16], 0.5)
    """
    args = {
        "query": query, "key": key, "value": value, "sparse_indices": sparse_indices, "scale_value": scale_value,
        "key_quant_mode": key_quant_mode, "value_quant_mode": value_quant_mode, "key_dequant_scale": key_dequant_scale,
        "value_dequant_scale": value_dequant_scale, "block_table": block_table,
        "actual_seq_qlen": actual_seq_lengths_query, "actual_seq_kvlen": actual_seq_lengths_kv,
        "sparse_block_size": sparse_block_size, "layout": layout_query, "layout_kv": layout_kv,
        "sparse_mode": sparse_mode, "pre_tokens": pre_tokens, "next_tokens": next_tokens,
        "attention_mode": attention_mode, "quant_scale_repo_mode": quant_scale_repo_mode, "tile_size": tile_size,
        "rope_head_dim": rope_head_dim, "key_dtype": key_dtype, "value_dtype": value_dtype,
        "sinks": sinks,
    }  # fmt: skip
    given = {**args, **checked(quantised_sparse.ATTENTION, args)}
    tile, rope = given["tile_size"], given["rope_head_dim"]
    latent = query.shape[-1] - rope
    (key,), table = _pages_used((key,), block_table)
    parts = key.split([latent, 2 * rope, 4 * (latent // tile)], -1)
    scales = parts[2].contiguous().view(torch.float32).repeat_interleave(tile, -1)
    rows = query.float()
    wide = {
        "query": rows[..., :latent], "query_rope": rows[..., latent:], "block_table": table, "value": None,
        "key": parts[0].float() * scales, "key_rope": parts[1].contiguous().view(query.dtype).float(),
    }  # fmt: skip
    outs = {p.name for p in sparse.TORCH.tensors(output=True)}
    args = {p.name: given.get(p.name) for p in sparse.TORCH.params if p.name not in outs} | wide
    args["return_softmax_lse"] = False
    with in_place_of(quantised_sparse.ATTENTION):
        return dispatch.results(sparse.TORCH, args)["attention_out"].to(query.dtype)


def _pages_used(caches: tuple[Tensor, ...], table: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Of caches [pages, ...] the pages that a table names, and the table with their new numbers: a cache is mostly
    larger than what one call reads. Numbers of no page stay what they are."""
    pages = caches[0].shape[0]
    if table is None or dispatch.is_traced((*caches, table)) or table.numel() >= pages or table.is_meta:
        return caches, table
    there = (table >= 0) & (table < pages)
    used = table[there].unique()
    if not used.numel():
        return caches, table
    result = torch.searchsorted(used, table.clamp(0, pages - 1)).to(table.dtype).where(there, table)
    return tuple(cache.index_select(0, used.to(cache.device)) for cache in caches), result
