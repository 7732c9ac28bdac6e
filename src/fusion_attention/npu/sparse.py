"""torch_npu's sparse attention, lightning indexer and its losses, with the same names, signatures and results.

The functions are differentiable in the same inputs as torch_npu's.
"""

import torch

from fusion_attention.npu.interface import Args, from_record
from fusion_attention.ops.block_sparse import definitions as blocks
from fusion_attention.ops.indexer import definitions as indexer
from fusion_attention.ops.indexer_loss import definitions as indexer_loss
from fusion_attention.ops.sparse import definitions as sparse
from fusion_attention.torch_ops import dispatch

__all__ = [
    "npu_block_sparse_attention",
    "npu_block_sparse_attention_backward",
    "npu_dense_lightning_indexer_grad_kl_loss",
    "npu_dense_lightning_indexer_softmax_lse",
    "npu_lightning_indexer",
    "npu_lightning_indexer_grad",
    "npu_sparse_flash_attention",
    "npu_sparse_flash_attention_grad",
    "npu_sparse_lightning_indexer_grad_kl_loss",
]

Tensor = torch.Tensor


@from_record(indexer.TORCH)
def npu_lightning_indexer(args: Args) -> tuple[Tensor, Tensor]:
    dispatch.autocast(args, ("query", "key"))
    return dispatch.in_order(indexer.TORCH, args, args["query"])


@from_record(indexer.TORCH_GRAD)
def npu_lightning_indexer_grad(args: Args) -> tuple[Tensor, Tensor, Tensor]:
    return dispatch.in_order(indexer.TORCH_GRAD, args, args["query"])


@from_record(sparse.TORCH)
def npu_sparse_flash_attention(args: Args) -> tuple[Tensor, Tensor, Tensor]:
    dispatch.autocast(args, ("query", "key", "value", "query_rope", "key_rope"))
    results = dispatch.results(sparse.TORCH, args)
    out = results["attention_out"]
    if args["return_softmax_lse"]:
        return out, results["softmax_max"], results["softmax_sum"]
    return out, out.new_empty(0, dtype=torch.float32), out.new_empty(0, dtype=torch.float32)


@from_record(sparse.TORCH_GRAD)
def npu_sparse_flash_attention_grad(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return dispatch.in_order(sparse.TORCH_GRAD, args, args["query"])


@from_record(blocks.TORCH)
def npu_block_sparse_attention(args: Args) -> tuple[Tensor, Tensor]:
    dispatch.autocast(args, blocks.INPUTS)
    return dispatch.in_order(blocks.TORCH, args, args["query"])


@from_record(blocks.TORCH_GRAD)
def npu_block_sparse_attention_backward(args: Args) -> tuple[Tensor, Tensor, Tensor]:
    return dispatch.in_order(blocks.TORCH_GRAD, args, args["query"])


@from_record(indexer_loss.TORCH)
def npu_sparse_lightning_indexer_grad_kl_loss(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return dispatch.in_order(indexer_loss.TORCH, args, args["query"])


@from_record(indexer_loss.TORCH_LSE)
def npu_dense_lightning_indexer_softmax_lse(args: Args) -> tuple[Tensor, Tensor]:
    return dispatch.in_order(indexer_loss.TORCH_LSE, args, args["query_index"])


@from_record(indexer_loss.TORCH_DENSE)
def npu_dense_lightning_indexer_grad_kl_loss(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return dispatch.in_order(indexer_loss.TORCH_DENSE, args, args["query"])
