"""torch_npu's sparse attention and lightning indexer by their own names, signatures, defaults and returns.

Each function names its arguments as its record does; torch_ops computes. Differentiable as torch_npu's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_attention.ops.indexer import records as indexer
from fusion_attention.ops.sparse import records as sparse
from fusion_attention.ops.sparse.records import LARGEST_INT64
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.aliases import aliased

__all__ = [
    "npu_lightning_indexer",
    "npu_lightning_indexer_grad",
    "npu_sparse_flash_attention",
    "npu_sparse_flash_attention_grad",
]

Tensor = torch.Tensor
Lengths = Tensor | Sequence[int] | None


@aliased
def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = LARGEST_INT64,
    next_tokens: int = LARGEST_INT64,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """The keys that score highest for every row, by ReLU-weighted heads.

    I_j = sum_h w_h * max(0, q_h . k_j);  indices, values = the sparse_count largest I among the keys that a row sees

    Args:
        query: [B, S1, N1, D], or TND [T1, N1, D]; float16, bfloat16 or float32. Scale factors belong into weights.
        key: [B, S2, 1, D], TND [T2, 1, D], or PA_BSND [pages, page, 1, D]; one head for all query heads.
        weights: [B, S1, N1] or [T1, N1], in query's dtype or float32.
        actual_seq_lengths_query, actual_seq_lengths_key: tokens of every sequence; TND: cumulative ends, needed.
        block_table: int32 [B, M], the pages of every sequence, for PA_BSND.
        layout_query: "BSND" or "TND". layout_key: as layout_query, or "PA_BSND".
        sparse_count: keys that a row chooses.
        sparse_mode: 0: rows see all keys; 3: causal, the last row sees the last key.
        pre_tokens, next_tokens: without effect.
        return_value: return the scores, which are differentiable in query, key and weights.

    Returns:
        (indices, values): int32 [B, S1, 1, K] or [T1, 1, K], positions within the sequence by descending score and,
        among equals, ascending index, -1 behind the last; values alike in query's dtype, -inf behind the last, or
        empty.

    Raises:
        ContractError: a call that `fusion-attention ops npu_lightning_indexer` does not allow.
        BackendError: no back end computes it.

    Source: Ascend op-plugin, npu_lightning_indexer.

    Example:
        >>> q, k, w = torch.randn(1, 6, 4, 16), torch.randn(1, 9, 1, 16), torch.randn(1, 6, 4)
        >>> indices, values = npu_lightning_indexer(q, k, w, sparse_count=4, return_value=True)
        >>> list(indices.shape), list(values.shape)
        ([1, 6, 1, 4], [1, 6, 1, 4])
    """
    args = {
        "query": query, "key": key, "weights": weights, "actual_seq_qlen": actual_seq_lengths_query,
        "actual_seq_kvlen": actual_seq_lengths_key, "block_table": block_table, "layout": layout_query,
        "layout_kv": layout_key, "sparse_count": sparse_count, "sparse_mode": sparse_mode, "pre_tokens": pre_tokens,
        "next_tokens": next_tokens, "return_values": return_value,
    }  # fmt: skip
    dispatch.autocast(args, ("query", "key"))
    return dispatch.in_order(indexer.TORCH, args, query)


@aliased
def npu_lightning_indexer_grad(
    query: Tensor,
    key: Tensor,
    dy: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_key: Lengths = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = LARGEST_INT64,
    next_tokens: int | None = LARGEST_INT64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of npu_lightning_indexer's values.

    S_hk = q_h . k_idx(k);  dS = dy * w * [S > 0];  dw = sum_k dy * max(0, S);  dq = dS k;  dk_idx(k) += sum_h dS q

    Args:
        query, key, weights: as given to the forward.
        dy: gradient of the values, [B, S1, K] or [B, S1, 1, K] (TND: [T1, K] or [T1, 1, K]).
        sparse_indices: the forward's indices, int32 or int64, in one of these shapes.
        layout: "BSND" or "TND".
        all others: as npu_lightning_indexer.

    Returns:
        (dq, dk, dweights).

    Raises:
        ContractError, BackendError: as npu_lightning_indexer; an index out of range is named by batch, row and slot.

    Source: Ascend op-plugin, npu_lightning_indexer_grad.

    Example:
        >>> q, k, w = torch.randn(1, 6, 4, 16), torch.randn(1, 9, 1, 16), torch.randn(1, 6, 4)
        >>> indices, values = npu_lightning_indexer(q, k, w, sparse_count=4, return_value=True)
        >>> dq, dk, dw = npu_lightning_indexer_grad(q, k, torch.ones_like(values), indices, w)
        >>> list(dw.shape)
        [1, 6, 4]
    """
    args = {
        "query": query, "key": key, "dy": dy, "sparse_indices": sparse_indices, "weights": weights,
        "actual_seq_qlen": actual_seq_lengths_query, "actual_seq_kvlen": actual_seq_lengths_key, "layout": layout,
        "sparse_mode": sparse_mode, "pre_tokens": pre_tokens, "next_tokens": next_tokens,
    }  # fmt: skip
    return dispatch.in_order(indexer.TORCH_GRAD, args, query)


@aliased
def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Lengths = None,
    actual_seq_lengths_kv: Lengths = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = LARGEST_INT64,
    next_tokens: int = LARGEST_INT64,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over the blocks of keys that every row selects.

    s_j = scale * (q . k_j + q_rope . k_rope_j);  out = sum_j exp(s_j - max) v_j / sum, over the selected keys j

    Differentiable in query, key, value, query_rope, key_rope and sinks.

    Args:
        query: [B, S1, N1, D], or TND [T1, N1, D]; float16, bfloat16 or float32.
        key: [B, S2, N2, D], TND [T2, N2, D], or PA_BSND [pages, page, N2, D].
        value: [.., Dv] as key; None: the key's rows, whose gradient then holds both.
        sparse_indices: int32 or int64 [B, S1, N2, K] or [T1, N2, K]: numbers of blocks of a row's own sequence, packed
            to the front; -1 ends a list.
        scale_value: factor on the scores.
        block_table: int32 [B, M], the pages of every sequence, for PA_BSND.
        actual_seq_lengths_query, actual_seq_lengths_kv: tokens of every sequence; TND: cumulative ends, needed.
        query_rope, key_rope: rope parts [.., N1, Dr], [.., N2, Dr].
        sparse_block_size: tokens of a block, 1 to 128.
        layout_query: "BSND" or "TND". layout_kv: as layout_query, or "PA_BSND".
        sparse_mode: 0: rows see all keys; 3: causal, the last row sees the last key.
        pre_tokens, next_tokens: without effect.
        attention_mode: 2 on the chip; the result does not depend on it.
        return_softmax_lse: return row maxima and sums.
        sinks: float32 [N1], one more logit per row and head.

    Returns:
        (attention_out, softmax_max, softmax_sum): the output as query with Dv elements; float32 [B, N2, S1, N1/N2] or
        [N2, T1, N1/N2], 0 and 0 where a row sees no key, or empty.

    Raises:
        ContractError: a call that `fusion-attention ops npu_sparse_flash_attention` does not allow; an index out of
            range is named by batch, row and slot.
        BackendError: no back end computes it.

    Source: Ascend op-plugin, npu_sparse_flash_attention.

    Example:
        >>> q, kv = torch.randn(1, 6, 4, 16), torch.randn(1, 9, 1, 16)
        >>> indices = torch.arange(4).expand(1, 6, 1, 4)
        >>> out, *_ = npu_sparse_flash_attention(q, kv, kv, indices, 0.25, attention_mode=2)
        >>> list(out.shape)
        [1, 6, 4, 16]
    """
    args = {
        "query": query, "key": key, "value": value, "sparse_indices": sparse_indices, "scale_value": scale_value,
        "block_table": block_table, "actual_seq_qlen": actual_seq_lengths_query,
        "actual_seq_kvlen": actual_seq_lengths_kv, "query_rope": query_rope, "key_rope": key_rope,
        "sparse_block_size": sparse_block_size, "layout": layout_query, "layout_kv": layout_kv,
        "sparse_mode": sparse_mode, "pre_tokens": pre_tokens, "next_tokens": next_tokens,
        "attention_mode": attention_mode, "return_softmax_lse": return_softmax_lse, "sinks": sinks,
    }  # fmt: skip
    dispatch.autocast(args, ("query", "key", "value", "query_rope", "key_rope"))
    results = dispatch.results(sparse.TORCH, args)
    out = results["attention_out"]
    if return_softmax_lse:
        return out, results["softmax_max"], results["softmax_sum"]
    return out, out.new_empty(0, dtype=torch.float32), out.new_empty(0, dtype=torch.float32)


@aliased
def npu_sparse_flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    sparse_block_size: int,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = LARGEST_INT64,
    next_tokens: int | None = LARGEST_INT64,
    attention_mode: int | None = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of npu_sparse_flash_attention, from its statistics and its output.

    P = exp(s - max) / sum;  dS = P * (dY . v - dY . out);  dq = scale * dS k;  dk = scale * dS^T q;  dv = P^T dY

    Args:
        d_out: gradient of attention_out, in its shape.
        out, softmax_max, softmax_sum: as the forward returned them, with return_softmax_lse=True.
        actual_seq_qlen, actual_seq_kvlen: tokens of every sequence; TND: cumulative ends, needed.
        layout: "BSND" or "TND", of queries and keys.
        all others: as given to the forward.

    Returns:
        (dq, dk, dv, dq_rope, dk_rope); absent ones are empty. Without a value dk holds what value's gradient would be.

    Raises:
        ContractError, BackendError: as npu_sparse_flash_attention.

    Source: Ascend op-plugin, npu_sparse_flash_attention_grad.

    Example:
        >>> q, kv = torch.randn(1, 6, 4, 16), torch.randn(1, 9, 1, 16)
        >>> indices = torch.arange(4).expand(1, 6, 1, 4)
        >>> saved = npu_sparse_flash_attention(q, kv, kv, indices, 0.25, return_softmax_lse=True)
        >>> dq, dk, dv, *_ = npu_sparse_flash_attention_grad(q, kv, kv, indices, torch.ones_like(q), *saved, 0.25, 1)
        >>> list(dk.shape)
        [1, 9, 1, 16]
    """
    args = {
        "query": query, "key": key, "value": value, "sparse_indices": sparse_indices, "dy": d_out,
        "attention_in": out, "softmax_max": softmax_max, "softmax_sum": softmax_sum, "scale_value": scale_value,
        "sparse_block_size": sparse_block_size, "query_rope": query_rope, "key_rope": key_rope,
        "actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen, "layout": layout,
        "sparse_mode": sparse_mode, "pre_tokens": pre_tokens, "next_tokens": next_tokens,
        "attention_mode": attention_mode,
    }  # fmt: skip
    return dispatch.in_order(sparse.TORCH_GRAD, args, query)
