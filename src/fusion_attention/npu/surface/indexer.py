"""cann_ops_transformer's lightning indexer, whose keys may be compressed: each represents several tokens."""

import torch

from fusion_attention.npu.interface import Args, from_record
from fusion_attention.ops.indexer import second
from fusion_attention.ops.indexer.call import RESULTS
from fusion_attention.torch_ops import dispatch

Tensor = torch.Tensor


@from_record(second.TORCH)
def lightning_indexer(args: Args) -> tuple[Tensor, Tensor]:
    dispatch.autocast(args, ("query", "key"))
    results = dispatch.results(second.TORCH, args)
    indices = results[RESULTS[0]]
    return indices, results[RESULTS[1]] if args["return_values"] else indices.new_empty(0, dtype=torch.float32)
