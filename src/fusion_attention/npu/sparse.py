"""torch_npu's sparse attention and lightning indexer, with the same names, signatures, defaults and results.

The functions are differentiable in the same inputs as torch_npu's.
"""

import torch

from fusion_attention.npu.interface import Args, from_record
from fusion_attention.ops.block_sparse import definitions as blocks
from fusion_attention.ops.indexer import definitions as indexer
from fusion_attention.ops.sparse import definitions as sparse
from fusion_attention.torch_ops import dispatch

__all__ = [
    "npu_block_sparse_attention",
    "npu_block_sparse_attention_backward",
    "npu_lightning_indexer",
    "npu_lightning_indexer_grad",
    "npu_sparse_flash_attention",
    "npu_sparse_flash_attention_grad",
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
