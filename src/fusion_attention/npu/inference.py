"""torch_npu's npu_incre_flash_attention, with the same name, signature, defaults and result, on any device.

The function is not differentiable.
"""

import torch

from fusion_attention.npu.interface import Args, from_record
from fusion_attention.ops.inference import definitions as inference
from fusion_attention.torch_ops import dispatch

__all__ = ["npu_incre_flash_attention"]


@from_record(inference.TORCH)
def npu_incre_flash_attention(args: Args) -> torch.Tensor:
    return dispatch.results(inference.TORCH, args)["attention_out"]
