"""torch_npu's sparse attention, lightning indexer and its losses, with the same names, signatures and results.

The functions are differentiable in the same inputs as torch_npu's.
"""

import torch

from fusion_attention.npu.functions_from_definitions import Args, from_record, in_order
from fusion_attention.ops.block_sparse import definitions as blocks
from fusion_attention.ops.indexer import definitions as indexer
from fusion_attention.ops.indexer_loss import definitions as indexer_loss
from fusion_attention.ops.sparse import definitions as sparse
from fusion_attention.torch_ops import dispatch

Tensor = torch.Tensor
npu_lightning_indexer = in_order(indexer.TORCH, __name__, "query", "query", "key")
npu_lightning_indexer_grad = in_order(indexer.TORCH_GRAD, __name__, "query")
npu_sparse_flash_attention_grad = in_order(sparse.TORCH_GRAD, __name__, "query")
npu_block_sparse_attention = in_order(blocks.TORCH, __name__, "query", *blocks.INPUTS)
npu_block_sparse_attention_backward = in_order(blocks.TORCH_GRAD, __name__, "query")
npu_sparse_lightning_indexer_grad_kl_loss = in_order(indexer_loss.TORCH, __name__, "query")
npu_dense_lightning_indexer_softmax_lse = in_order(indexer_loss.TORCH_LSE, __name__, "query_index")
npu_dense_lightning_indexer_grad_kl_loss = in_order(indexer_loss.TORCH_DENSE, __name__, "query")


@from_record(sparse.TORCH)
def npu_sparse_flash_attention(args: Args) -> tuple[Tensor, Tensor, Tensor]:
    dispatch.autocast(args, ("query", "key", "value", "query_rope", "key_rope"))
    results = dispatch.results(sparse.TORCH, args)
    out = results["attention_out"]
    if args["return_softmax_lse"]:
        return out, results["softmax_max"], results["softmax_sum"]
    return out, out.new_empty(0, dtype=torch.float32), out.new_empty(0, dtype=torch.float32)
