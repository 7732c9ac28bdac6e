"""torch_npu's losses of the lightning indexer, with the same names, signatures, defaults and results."""

import torch

from fusion_attention.npu.interface import Args, from_record
from fusion_attention.ops.indexer_loss import definitions as indexer_loss
from fusion_attention.torch_ops import dispatch

__all__ = [
    "npu_dense_lightning_indexer_grad_kl_loss",
    "npu_dense_lightning_indexer_softmax_lse",
    "npu_sparse_lightning_indexer_grad_kl_loss",
]

Tensor = torch.Tensor


@from_record(indexer_loss.TORCH)
def npu_sparse_lightning_indexer_grad_kl_loss(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return dispatch.in_order(indexer_loss.TORCH, args, args["query"])


@from_record(indexer_loss.TORCH_LSE)
def npu_dense_lightning_indexer_softmax_lse(args: Args) -> tuple[Tensor, Tensor]:
    return dispatch.in_order(indexer_loss.TORCH_LSE, args, args["query_index"])


@from_record(indexer_loss.TORCH_DENSE)
def npu_dense_lightning_indexer_grad_kl_loss(args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return dispatch.in_order(indexer_loss.TORCH_DENSE, args, args["query"])
