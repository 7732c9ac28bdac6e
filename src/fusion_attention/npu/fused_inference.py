"""torch_npu's inference attention, with its names, signatures, defaults and results, on any device.

The functions are not differentiable. fused_out.py makes the variant `.out` of the two fused functions.
"""

import torch

from fusion_attention.contract import Op
from fusion_attention.npu import fused_out
from fusion_attention.npu.functions_from_definitions import Args, from_record, in_order
from fusion_attention.ops.fused import definitions as fused
from fusion_attention.ops.fused.output_allocator_definitions import ALLOCATOR_V1, ALLOCATOR_V2
from fusion_attention.ops.inference import definitions as incre
from fusion_attention.torch_ops import dispatch

__all__ = [  # from_record() adds the functions that are made from definitions
    "_npu_fused_infer_attention_score_get_max_workspace",
    "_npu_fused_infer_attention_score_v2_get_max_workspace",
]

Tensor = torch.Tensor


def _both(op: Op, args: Args) -> tuple[Tensor, Tensor]:
    """Calls the attention operator `op`; returns (attention_out, softmax_lse), the latter empty if not requested."""
    result = dispatch.results(op, fused_out.numbered(args))
    out = result["attention_out"]
    lse = result.get("softmax_lse")
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


npu_incre_flash_attention = in_order(incre.TORCH, __name__, "query")
npu_prompt_flash_attention = in_order(fused.TORCH_PFA, __name__, "query")


@fused_out.with_out(fused.TORCH_V1)
@from_record(fused.TORCH_V1)
def npu_fused_infer_attention_score(args: Args) -> tuple[Tensor, Tensor]:
    return _both(fused.TORCH_V1, args)


@fused_out.with_out(fused.TORCH_V2)
@from_record(fused.TORCH_V2)
def npu_fused_infer_attention_score_v2(args: Args) -> tuple[Tensor, Tensor]:
    return _both(fused.TORCH_V2, args)


_npu_fused_infer_attention_score_get_max_workspace = fused_out.workspace_of(
    npu_fused_infer_attention_score, fused.TORCH_V1
)
_npu_fused_infer_attention_score_v2_get_max_workspace = fused_out.workspace_of(
    npu_fused_infer_attention_score_v2, fused.TORCH_V2
)


@from_record(ALLOCATOR_V1)
def _npu_fused_infer_attention_score_infer_output(args: Args) -> tuple[Tensor, Tensor]:
    return fused_out.allocated(fused.TORCH_V1, args)


@from_record(ALLOCATOR_V2)
def _npu_fused_infer_attention_score_v2_infer_output(args: Args) -> tuple[Tensor, Tensor]:
    return fused_out.allocated(fused.TORCH_V2, args)
