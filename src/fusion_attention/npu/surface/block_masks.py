"""cann_ops_transformer's attention to the blocks of keys that a block mask marks as visible: BlockSparseAttention."""

import torch

from fusion_attention.npu.interface import Args, from_record
from fusion_attention.ops.block_sparse import definitions
from fusion_attention.ops.block_sparse.call import LSE, OUT
from fusion_attention.torch_ops import dispatch

Tensor = torch.Tensor


@from_record(definitions.CANN)
def block_sparse_attention(args: Args) -> tuple[Tensor, Tensor]:
    dispatch.autocast(args, definitions.INPUTS)
    results = dispatch.results(definitions.CANN, args)
    lse = results[LSE]
    return results[OUT], lse if args["softmax_lse_flag"] else lse.new_empty(0)


@from_record(definitions.CANN_GRAD)
def block_sparse_attention_grad(args: Args) -> tuple[Tensor, Tensor, Tensor]:
    return dispatch.in_order(definitions.CANN_GRAD, args, args["query"])


BLOCK_MASKS = (block_sparse_attention, block_sparse_attention_grad)
