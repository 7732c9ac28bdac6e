"""cann_ops_transformer's attention to two sources of keys that are values too: SparseFlashMla."""

import torch

from fusion_attention.contract import bind
from fusion_attention.npu.interface import Args, from_record
from fusion_attention.ops.compressed import records
from fusion_attention.ops.compressed.l1_norm import l1_norm
from fusion_attention.torch_ops import dispatch

Tensor = torch.Tensor


@from_record(records.TORCH)
def sparse_flash_mla(args: Args) -> tuple[Tensor, Tensor]:
    dispatch.autocast(args, ("query", "key", "key_compressed"))
    results = dispatch.results(records.TORCH, args, complete=args["return_softmax_lse"])
    out = results[records.OUT]
    return out, results[records.LSE] if args["return_softmax_lse"] else out.new_zeros((), dtype=torch.float32)


@from_record(records.TORCH_GRAD)
def sparse_flash_mla_grad(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dkey, dcompressed, dsinks = dispatch.in_order(records.TORCH_GRAD, args, args["query"])
    none = dq.new_empty(0, dtype=torch.float32)
    listed = none
    if args["sparse_indices"] is not None:
        with torch.no_grad():
            listed = l1_norm(records.call_of_gradient(bind(records.TORCH_GRAD, args)), args[records.LSE])
    return dq, dkey, dcompressed, dsinks, none, listed


SHARED_KEYS = (sparse_flash_mla, sparse_flash_mla_grad)
