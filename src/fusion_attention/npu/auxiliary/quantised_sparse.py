"""torch_npu's sparse attention and indexer over int8 rows: the floating-point functions compute on dequantized rows.

The functions compute in float32, in which an int8 times a float16 scale is exact.
"""

import torch

from fusion_attention.npu.auxiliary.call import checked, in_place_of
from fusion_attention.npu.functions_from_definitions import Args, from_record
from fusion_attention.ops.auxiliary_definitions import quantised_sparse
from fusion_attention.ops.indexer import definitions as indexer
from fusion_attention.ops.sparse import definitions as sparse
from fusion_attention.torch_ops import dispatch

Tensor = torch.Tensor


@from_record(quantised_sparse.INDEXER)
def npu_quant_lightning_indexer(args: Args) -> Tensor:
    given = {**args, **checked(quantised_sparse.INDEXER, args)}
    (key, key_scale), table = _pages_used((args["key"], args["key_dequant_scale"]), args["block_table"])
    dequantised = {
        "query": args["query"].float() * args["query_dequant_scale"].float().unsqueeze(-1),
        "key": key.float() * key_scale.float().unsqueeze(-1),
        "weights": args["weights"].float(),
        "block_table": table,
        "return_values": False,
    }
    arguments = {p.name: given.get(p.name) for p in indexer.TORCH.params if not p.name.endswith("_out")} | dequantised
    with in_place_of(quantised_sparse.INDEXER):
        result: Tensor = dispatch.results(indexer.TORCH, arguments)["sparse_indices_out"]
    return result


@from_record(quantised_sparse.ATTENTION)
def npu_kv_quant_sparse_flash_attention(args: Args) -> Tensor:
    given = {**args, **checked(quantised_sparse.ATTENTION, args)}
    tile, rope = given["tile_size"], given["rope_head_dim"]
    query = args["query"]
    latent = query.shape[-1] - rope
    (key,), table = _pages_used((args["key"],), args["block_table"])
    fields = key.split([latent, 2 * rope, 4 * (latent // tile)], -1)
    scales = fields[2].contiguous().view(torch.float32).repeat_interleave(tile, -1)
    rows = query.float()
    dequantised = {
        "query": rows[..., :latent], "query_rope": rows[..., latent:], "block_table": table, "value": None,
        "return_softmax_lse": False,
        "key": fields[0].float() * scales, "key_rope": fields[1].contiguous().view(query.dtype).float(),
    }  # fmt: skip
    outs = {p.name for p in sparse.TORCH.tensors(output=True)}
    arguments = {p.name: given.get(p.name) for p in sparse.TORCH.params if p.name not in outs} | dequantised
    with in_place_of(quantised_sparse.ATTENTION):
        return dispatch.results(sparse.TORCH, arguments)["attention_out"].to(query.dtype)


def _pages_used(caches: tuple[Tensor, ...], table: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Returns the pages of caches [pages, ...] that a page table uses, and the table with the pages renumbered.
    Only these pages are dequantized, because a call usually reads a small fraction of a cache. Invalid page numbers
    are not changed."""
    pages = caches[0].shape[0]
    if table is None or table.dim() != 2 or table.dtype not in (torch.int32, torch.int64):  # None, or refused later
        return caches, table
    if dispatch.is_traced((*caches, table)) or table.numel() >= pages or table.is_meta:
        return caches, table
    there = (table >= 0) & (table < pages)
    used = table[there].unique()
    if not used.numel():
        return caches, table
    result = torch.searchsorted(used, table.clamp(0, pages - 1)).to(table.dtype).where(there, table)
    return tuple(cache.index_select(0, used.to(cache.device)) for cache in caches), result
