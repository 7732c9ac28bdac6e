"""cann_ops_transformer's losses of the lightning indexer, whose target probabilities are an argument."""

import torch

from fusion_attention.npu.auxiliary.call import computed
from fusion_attention.npu.interface import Args, from_record
from fusion_attention.ops.auxiliary import losses
from fusion_attention.ops.indexer_loss import target_definitions as targets
from fusion_attention.torch_ops import dispatch

Tensor = torch.Tensor


@from_record(targets.TORCH)
def sparse_lightning_indexer_kl_loss_grad(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return dispatch.in_order(targets.TORCH, args, args["query_index"])


@from_record(targets.TORCH_DENSE)
def dense_lightning_indexer_kl_loss_grad(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return dispatch.in_order(targets.TORCH_DENSE, args, args["query_index"])


@from_record(targets.TORCH_LSE)
def dense_lightning_indexer_softmax_lse(args: Args) -> Tensor:
    return dispatch.in_order(targets.TORCH_LSE, args, args["query_index"])[0]


@computed(losses.KL_LOSS)
@torch.no_grad()
def lightning_indexer_kl_loss(target_score: Tensor, index_probs: Tensor, eps: float, weight_type: str) -> Tensor:
    y = target_score.float().contiguous()  # the order in which torch sums depends on strides
    q = y / (y.sum(-1, keepdim=True) + eps)
    terms = (q.clamp(min=eps).log() - (index_probs.float() + eps).log()) * (y if weight_type == "logits" else q)
    return terms.sum().to(target_score.dtype)


TARGET_LOSSES = (
    lightning_indexer_kl_loss,
    sparse_lightning_indexer_kl_loss_grad,
    dense_lightning_indexer_kl_loss_grad,
    dense_lightning_indexer_softmax_lse,
)
