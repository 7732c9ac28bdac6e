"""cann_ops_transformer's functions that are made from operator definitions.

SparseFlashMla attends to original and compressed keys, which are also the values; BlockSparseAttention to the blocks of
keys that a block mask marks as visible. Keys of the indexer may be compressed: each represents several tokens. The
target probabilities of the indexer's losses are an argument.
"""

import torch

from fusion_attention.npu.auxiliary.call import computed
from fusion_attention.npu.functions_from_definitions import Args, from_record, in_order
from fusion_attention.ops.auxiliary_definitions import losses
from fusion_attention.ops.block_sparse import definitions as blocks
from fusion_attention.ops.block_sparse import lowered_call as blocks_call
from fusion_attention.ops.compressed import definitions as compressed
from fusion_attention.ops.compressed import l1_norm
from fusion_attention.ops.compressed import lowered_call as compressed_call
from fusion_attention.ops.indexer import second
from fusion_attention.ops.indexer.lowered_call import RESULTS
from fusion_attention.ops.indexer_loss import given_target_definitions as targets
from fusion_attention.torch_ops import dispatch

Tensor = torch.Tensor
sparse_flash_mla_grad = in_order(compressed.TORCH_GRAD, __name__, "query")
block_sparse_attention_grad = in_order(blocks.CANN_GRAD, __name__, "query")
sparse_lightning_indexer_kl_loss_grad = in_order(targets.TORCH, __name__, "query_index")
dense_lightning_indexer_kl_loss_grad = in_order(targets.TORCH_DENSE, __name__, "query_index")
dense_lightning_indexer_softmax_lse = in_order(targets.TORCH_LSE, __name__, "query_index")
sparse_flash_mla_softmax_l1_norm = in_order(l1_norm.TORCH, __name__, "query")


@from_record(compressed.TORCH)
def sparse_flash_mla(args: Args) -> tuple[Tensor, Tensor]:
    dispatch.autocast(args, ("query", "key", "key_compressed"))
    results = dispatch.results(compressed.TORCH, args, complete=args["return_softmax_lse"])
    out = results[compressed_call.OUT]
    return out, results[compressed_call.LSE] if args["return_softmax_lse"] else out.new_zeros((), dtype=torch.float32)


@from_record(blocks.CANN)
def block_sparse_attention(args: Args) -> tuple[Tensor, Tensor]:
    dispatch.autocast(args, blocks.INPUTS)
    results = dispatch.results(blocks.CANN, args)
    lse = results[blocks_call.LSE]
    return results[blocks_call.OUT], lse if args["softmax_lse_flag"] else lse.new_empty(0)


@from_record(second.TORCH)
def lightning_indexer(args: Args) -> tuple[Tensor, Tensor]:
    dispatch.autocast(args, ("query", "key"))
    results = dispatch.results(second.TORCH, args)
    indices = results[RESULTS[0]]
    return indices, results[RESULTS[1]] if args["return_values"] else indices.new_empty(0, dtype=torch.float32)


@computed(losses.KL_LOSS)
@torch.no_grad()
def lightning_indexer_kl_loss(target_score: Tensor, index_probs: Tensor, eps: float, weight_type: str) -> Tensor:
    y = target_score.float().contiguous()  # the order in which torch sums depends on strides
    q = y / (y.sum(-1, keepdim=True) + eps)
    terms = (q.clamp(min=eps).log() - (index_probs.float() + eps).log()) * (y if weight_type == "logits" else q)
    return terms.sum().to(target_score.dtype)
