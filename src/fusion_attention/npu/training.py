"""torch_npu's training attention, with its names, signatures, defaults and results, on any device.

training_call.py runs the calls. The functions are differentiable in query, key, value, pse (a bias of scores), rope
tensors and sink.
"""

import torch

from fusion_attention.npu import training_call
from fusion_attention.npu.functions_from_definitions import Args, from_record
from fusion_attention.npu.fused_out import with_copies
from fusion_attention.ops.training import definitions as training

Tensor = torch.Tensor


@from_record(training.TORCH_V1)
def npu_fusion_attention(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    return training_call.forward(training.TORCH_V1, args)


@from_record(training.TORCH_V2)
def npu_fusion_attention_v2(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    return training_call.forward(training.TORCH_V2, args)


@with_copies(training.TORCH_V3, "attention_out", "softmax_max", "softmax_sum", "softmax_out", "seed", "offset")
@from_record(training.TORCH_V3, host=2)
def npu_fusion_attention_v3(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *tensors, seed, offset, _ = training_call.forward(training.TORCH_V3, args)
    drawn = seed.reshape(1) if isinstance(seed, Tensor) else torch.tensor([seed])
    return (*tensors, drawn, torch.tensor([offset]))  # type: ignore[return-value]


@from_record(training.TORCH_GRAD_V1)
def npu_fusion_attention_grad(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, _, _, dpse, dsink = training_call.backward(training.TORCH_GRAD_V1, args)
    return dq, dk, dv, dpse, dsink


@from_record(training.TORCH_GRAD_V2)
def npu_fusion_attention_grad_v2(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dq_rope, dk_rope, dpse, dsink = training_call.backward(training.TORCH_GRAD_V2, args)
    return dq, dk, dv, dpse, dq_rope, dk_rope, dsink


@with_copies(training.TORCH_GRAD_V3, "dq", "dk", "dv", "dpse", "dsink")
@from_record(training.TORCH_GRAD_V3)
def npu_fusion_attention_grad_v3(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, _, _, dpse, dsink = training_call.backward(training.TORCH_GRAD_V3, args)
    return dq, dk, dv, dpse, dsink
