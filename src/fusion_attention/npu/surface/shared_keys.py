"""cann_ops_transformer's SparseFlashMla: attention to original and compressed keys, which are also the values."""

import torch

from fusion_attention.npu.interface import Args, from_record
from fusion_attention.ops.compressed import definitions, l1_norm
from fusion_attention.ops.compressed.call import LSE, OUT
from fusion_attention.torch_ops import dispatch

Tensor = torch.Tensor


@from_record(definitions.TORCH)
def sparse_flash_mla(args: Args) -> tuple[Tensor, Tensor]:
    dispatch.autocast(args, ("query", "key", "key_compressed"))
    results = dispatch.results(definitions.TORCH, args, complete=args["return_softmax_lse"])
    out = results[OUT]
    return out, results[LSE] if args["return_softmax_lse"] else out.new_zeros((), dtype=torch.float32)


@from_record(definitions.TORCH_GRAD)
def sparse_flash_mla_grad(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q = args["query"]
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
    results = dispatch.in_order(definitions.TORCH_GRAD, args, q)
    return results


@from_record(l1_norm.TORCH)
def sparse_flash_mla_softmax_l1_norm(args: Args) -> Tensor:
    return dispatch.results(l1_norm.TORCH, args)[l1_norm.OUT]


SHARED_KEYS = (sparse_flash_mla, sparse_flash_mla_grad, sparse_flash_mla_softmax_l1_norm)
