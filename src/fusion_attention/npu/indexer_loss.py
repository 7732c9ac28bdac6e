"""torch_npu's losses of the lightning indexer by their own names, signatures, defaults and returns.

Each function names its arguments as its record does; torch_ops computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_attention.ops.indexer_loss import records as indexer_loss
from fusion_attention.ops.sparse.records import LARGEST_INT64
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.aliases import aliased

__all__ = [
    "npu_dense_lightning_indexer_grad_kl_loss",
    "npu_dense_lightning_indexer_softmax_lse",
    "npu_sparse_lightning_indexer_grad_kl_loss",
]

Tensor = torch.Tensor
Lengths = Sequence[int] | Tensor | None


@aliased
def npu_sparse_lightning_indexer_grad_kl_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_klen: Lengths = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = LARGEST_INT64,
    next_tokens: int | None = LARGEST_INT64,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The indexer's loss over the selected keys, and its gradients.

    p = mean over heads of the attention's probabilities;  y = softmax(sum_h w_h * max(0, query_index_h . key_index))
    loss = sum p * (ln max(p, 1e-8) - ln max(y, 1e-8));  dI = y - p

    Args:
        query, key: of the attention, [B, S1, N1, D] and [B, S2, N2, D], TND [T1, N1, D] and [T2, N2, D].
        query_index, key_index: of the indexer, [B, S1, Ni, Di] and [B, S2, 1, Di] (TND alike), in query's dtype.
        weights: [B, S1, Ni] or [T1, Ni], in query's dtype or float32.
        sparse_indices: int32 or int64 [B, S1, 1, K] or [T1, 1, K], packed to the front; -1 ends a list.
        softmax_max, softmax_sum: the sparse attention's, float32 [B, N2, S1, N1/N2] or [N2, T1, N1/N2].
        scale_value: factor on the attention's scores.
        query_rope, key_rope: rope parts of the attention, [.., N1, Dr] and [.., N2, Dr].
        actual_seq_qlen, actual_seq_klen: tokens of every sequence; TND: cumulative ends, needed.
        layout: "BSND" or "TND".
        sparse_mode: 0: rows see all keys; 3: causal, the last row sees the last key.
        pre_tokens, next_tokens: without effect.
        sinks: float32 [N1], the attention's.

    Returns:
        (d_query_index, d_key_index, d_weights, loss): gradients of the sum over all rows, and that sum, float32 [1].

    Raises:
        ContractError: a call that `fusion-attention ops npu_sparse_lightning_indexer_grad_kl_loss` does not allow; an
            index out of range is named by batch, row and slot.
        BackendError: no back end computes it.

    Source: Ascend op-plugin, npu_sparse_lightning_indexer_grad_kl_loss.

    Example:
        >>> q, k, index_q, index_k = (torch.randn(1, 6, heads, 16) for heads in (4, 1, 2, 1))
        >>> lists, statistics = torch.arange(6).expand(1, 6, 1, 6), torch.full((2, 1, 1, 6, 4), 3.0)
        >>> *gradients, loss = npu_sparse_lightning_indexer_grad_kl_loss(
        ...     q, k, index_q, index_k, torch.rand(1, 6, 2), lists, *statistics, 0.25
        ... )
        >>> [list(gradient.shape) for gradient in gradients], list(loss.shape)
        ([[1, 6, 2, 16], [1, 6, 1, 16], [1, 6, 2]], [1])
    """
    args = {
        "query": query, "key": key, "query_index": query_index, "key_index": key_index, "weights": weights,
        "sparse_indices": sparse_indices, "softmax_max": softmax_max, "softmax_sum": softmax_sum,
        "scale_value": scale_value, "query_rope": query_rope, "key_rope": key_rope,
        "actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_klen, "layout": layout,
        "sparse_mode": sparse_mode, "pre_tokens": pre_tokens, "next_tokens": next_tokens, "sinks": sinks,
    }  # fmt: skip
    return dispatch.in_order(indexer_loss.TORCH, args, query)


@aliased
def npu_dense_lightning_indexer_softmax_lse(
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    *,
    actual_seq_qlen: Lengths = None,
    actual_seq_klen: Lengths = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = LARGEST_INT64,
    next_tokens: int | None = LARGEST_INT64,
) -> tuple[Tensor, Tensor]:
    """The softmax statistics of the indexer's scores over all keys of a row.

    I_j = sum_h w_h * max(0, query_index_h . key_index_j);  max = max_j I_j;  sum = sum_j exp(I_j - max)

    Args:
        query_index, key_index: [B, S1, Ni, Di] and [B, S2, 1, Di], TND [T1, Ni, Di] and [T2, 1, Di].
        weights: [B, S1, Ni] or [T1, Ni], in query_index's dtype or float32.
        actual_seq_qlen, actual_seq_klen: tokens of every sequence; TND: cumulative ends, needed.
        layout: "BSND" or "TND".
        sparse_mode: 0: rows see all keys; 3: causal, the last row sees the last key.
        pre_tokens, next_tokens: without effect.

    Returns:
        (softmax_max, softmax_sum): float32 [B, 1, S1] or [1, T1]; 0 and 0 where a row sees no key.

    Raises:
        ContractError: a call that `fusion-attention ops npu_dense_lightning_indexer_softmax_lse` does not allow.
        BackendError: no back end computes it.

    Source: Ascend op-plugin, npu_dense_lightning_indexer_softmax_lse.

    Example:
        >>> index_q, index_k = torch.randn(1, 6, 2, 16), torch.randn(1, 6, 1, 16)
        >>> top, total = npu_dense_lightning_indexer_softmax_lse(index_q, index_k, torch.rand(1, 6, 2))
        >>> list(top.shape), float(total[0, 0, 0])
        ([1, 1, 6], 1.0)
    """
    args = {
        "query_index": query_index, "key_index": key_index, "weights": weights, "actual_seq_qlen": actual_seq_qlen,
        "actual_seq_kvlen": actual_seq_klen, "layout": layout, "sparse_mode": sparse_mode, "pre_tokens": pre_tokens,
        "next_tokens": next_tokens,
    }  # fmt: skip
    return dispatch.in_order(indexer_loss.TORCH_LSE, args, query_index)


@aliased
def npu_dense_lightning_indexer_grad_kl_loss(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    softmax_max_index: Tensor,
    softmax_sum_index: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_klen: Lengths = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = LARGEST_INT64,
    next_tokens: int | None = LARGEST_INT64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The indexer's loss over all keys that a row sees, and its gradients.

    As npu_sparse_lightning_indexer_grad_kl_loss, with y = exp(I - softmax_max_index) / softmax_sum_index.

    Args:
        softmax_max, softmax_sum: of a dense attention, float32 [B, N2, S1, N1/N2] or [N2, T1, N1/N2].
        softmax_max_index, softmax_sum_index: as npu_dense_lightning_indexer_softmax_lse returned them.
        all others: as npu_sparse_lightning_indexer_grad_kl_loss.

    Returns:
        (d_query_index, d_key_index, d_weights, loss): as there.

    Raises:
        ContractError, BackendError: as there.

    Source: Ascend op-plugin, npu_dense_lightning_indexer_grad_kl_loss.

    Example:
        >>> q, k, index_q, index_k = (torch.randn(1, 6, heads, 16) for heads in (4, 4, 2, 1))
        >>> statistics, weights = torch.full((2, 1, 4, 6, 1), 3.0), torch.rand(1, 6, 2)
        >>> own = npu_dense_lightning_indexer_softmax_lse(index_q, index_k, weights)
        >>> *gradients, loss = npu_dense_lightning_indexer_grad_kl_loss(
        ...     q, k, index_q, index_k, weights, *statistics, *own, 0.25
        ... )
        >>> list(loss.shape)
        [1]
    """
    args = {
        "query": query, "key": key, "query_index": query_index, "key_index": key_index, "weights": weights,
        "softmax_max": softmax_max, "softmax_sum": softmax_sum, "softmax_max_index": softmax_max_index,
        "softmax_sum_index": softmax_sum_index, "scale_value": scale_value, "query_rope": query_rope,
        "key_rope": key_rope, "actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_klen,
        "layout": layout, "sparse_mode": sparse_mode, "pre_tokens": pre_tokens, "next_tokens": next_tokens,
    }  # fmt: skip
    return dispatch.in_order(indexer_loss.TORCH_DENSE, args, query)
