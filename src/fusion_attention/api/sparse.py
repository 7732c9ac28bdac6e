"""The public functions of sparse attention: lightning_indexer() selects keys, sparse_attention() attends to them;
indexer_loss() and indexer_target_loss() are the losses that train the indexer."""

from collections.abc import Sequence
from typing import Literal, overload

import torch

from fusion_attention.backends import BackendName
from fusion_attention.contract import show
from fusion_attention.ops.indexer import api_definition as indexer
from fusion_attention.ops.indexer_loss import api_definition as indexer_loss_record
from fusion_attention.ops.indexer_loss import api_target_definition as target_loss_record
from fusion_attention.ops.sparse import api_definition as sparse
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.device_aliases import aliased

__all__ = ["indexer_loss", "lightning_indexer", "pack_lists", "sparse_attention"]

Tensor = torch.Tensor
Lengths = Sequence[int] | Tensor | None
Layout = Literal["BSND", "TND"]


@aliased
def lightning_indexer(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    top_k: int = 2048,
    *,
    layout: Layout = "BSND",
    q_len: Lengths = None,
    kv_len: Lengths = None,
    causal: bool = True,
    ratio: int = 1,
    residual: Lengths = None,
    page_table: Tensor | None = None,
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]:
    """Selects for every query row the top_k keys of largest score I, and returns their indices and scores.

        I_j = sum_h w_h * max(0, q_h . k_j);  indices, values = the top_k largest I among the visible keys

    The values are differentiable in q, k and weights. The products are not scaled: multiply the weights by the scale.

    Args:
        q: query rows of the indexer, [B, S1, N1, D]; float16, bfloat16 or float32 (float64: backend="golden").
        k: key rows of the indexer, [B, S2, 1, D], one head for all query heads.
        weights: w, one number per row and query head, [B, S1, N1], in q's dtype or float32.
        top_k: number of keys that a row selects.
        layout: "BSND", or packed "TND": [T1, N1, D], [T2, 1, D], [T1, N1].
        q_len, kv_len: tokens of every sequence (not cumulative). Packed: required (kv_len defaults to q_len).
        causal: True: a row sees the keys up to its position, the last row all keys; False: every row sees all keys.
        ratio: tokens per key, as in compressed_attention(): a row at position p sees the first (p + 1) // ratio keys.
            Ratios other than 1 require causal.
        residual: per sequence, the number of tokens after those of the last key: tokens % ratio. None: the rows are
            all tokens of their sequences, with q_len // ratio keys.
        page_table: int32 or int64 [B, M], the pages of every sequence: k is pages [P, page, 1, D].
        backend: "auto", "cpu", "triton" or "golden".

    Returns:
        (indices, values), each [B, S1, 1, top_k], packed [T1, 1, top_k]. indices: int32, keys counted from the first of
        the sequence, by descending score and, among equal scores, ascending index; then -1 if a row sees fewer keys.
        values: their scores in q's dtype; then -inf.

    Raises:
        ContractError: a call that `fusion-attention ops lightning_indexer` does not allow; the message states the fix.
        BackendError: no back end computes the call; the message lists the reasons.

    Source: this library; the computation of CANN's LightningIndexer.

    Example:
        >>> q, k, weights = torch.randn(1, 6, 4, 16), torch.randn(1, 6, 1, 16), torch.rand(1, 6, 4)
        >>> indices, values = lightning_indexer(q, k, weights, 3)
        >>> indices[0, 0, 0].tolist()
        [0, -1, -1]
    """
    args = {
        "query": q, "key": k, "weights": weights, "sparse_count": top_k, "layout": layout, "actual_seq_qlen": q_len,
        "actual_seq_kvlen": kv_len, "causal": causal, "ratio": ratio, "residual": residual, "block_table": page_table,
    }  # fmt: skip
    dispatch.autocast(args, ("query", "key"))
    results = dispatch.results(indexer.RECORD, args, backend)
    return results["sparse_indices_out"], results["sparse_values_out"]


# fmt: off
@overload
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, *, layout: Layout = "BSND", q_len: Lengths = None,
    kv_len: Lengths = None, q_rope: Tensor | None = None, k_rope: Tensor | None = None, scale: float | None = None,
    block: int = 1, causal: bool = True, dim_v: int = 0, sink: Tensor | None = None, page_table: Tensor | None = None,
    return_lse: Literal[False] = False, backend: BackendName = "auto",
) -> Tensor: ...
@overload
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, *, layout: Layout = "BSND", q_len: Lengths = None,
    kv_len: Lengths = None, q_rope: Tensor | None = None, k_rope: Tensor | None = None, scale: float | None = None,
    block: int = 1, causal: bool = True, dim_v: int = 0, sink: Tensor | None = None, page_table: Tensor | None = None,
    return_lse: Literal[True], backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, *, layout: Layout = "BSND", q_len: Lengths = None,
    kv_len: Lengths = None, q_rope: Tensor | None = None, k_rope: Tensor | None = None, scale: float | None = None,
    block: int = 1, causal: bool = True, dim_v: int = 0, sink: Tensor | None = None, page_table: Tensor | None = None,
    return_lse: bool, backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


@aliased
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    *,
    layout: Layout = "BSND",
    q_len: Lengths = None,
    kv_len: Lengths = None,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    scale: float | None = None,
    block: int = 1,
    causal: bool = True,
    dim_v: int = 0,
    sink: Tensor | None = None,
    page_table: Tensor | None = None,
    return_lse: bool = False,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each query row over the keys, or blocks of keys, in its list.

        s_j = scale * (q . k_j + q_rope . k_rope_j)
        out = sum_j exp(s_j) * v_j / (sum_j exp(s_j) + exp(sink)),  j over the selected visible keys

    Differentiable in q, k, v, q_rope, k_rope and sink. docs/sparse_attention.md has the rules by which lists are read.

    Args:
        q: query rows, [B, S1, N1, D]; float16, bfloat16 or float32 (float64: backend="golden").
        k: key rows, [B, S2, N2, D]; N1 is a multiple of N2.
        v: value rows, [B, S2, N2, Dv]; None: the first dim_v elements of k's rows, whose gradient includes both.
        indices: int32 or int64 [B, S1, N2, K]: numbers of the blocks that a row selects, then -1.
        layout: "BSND", or packed "TND": [T1, N1, D], [T2, N2, D], [T1, N2, K].
        q_len, kv_len: tokens of every sequence (not cumulative). Packed: required (kv_len defaults to q_len).
        q_rope, k_rope: rope elements [B, S1, N1, Dr], [B, S2, N2, Dr].
        scale: factor on the dot products; None: 1 / sqrt(D + Dr).
        block: tokens of a block, 1 to 128; entry b selects the tokens b * block to b * block + block - 1.
        causal: True: a row sees the keys up to its position, the last row all keys; False: every row sees all keys.
        dim_v: if v is None, elements of a value row; 0: all of the key's.
        sink: [N1], of any floating dtype; an additional logit per row and head in the denominator.
        page_table: int32 or int64 [B, M], the pages of every sequence: k, v and k_rope are pages [P, page, N2, D].
        return_lse: also return log(sum(exp(s))): float32 [B, N1, S1], packed [T1, N1]; differentiable like out.
        backend: "auto", "cpu", "triton" or "golden".

    Returns:
        out in q's layout with Dv elements per head, or (out, lse); rows without visible keys are 0, with lse -inf.

    Raises:
        ContractError: a call that `fusion-attention ops sparse_attention` does not allow; for an index out of range the
            message names the sequence, the row and the position in the list.
        BackendError: no back end computes the call; the message lists the reasons.

    Source: this library; the computation of CANN's SparseFlashAttention.

    Example:
        >>> q, kv = torch.randn(1, 6, 4, 16), torch.randn(1, 6, 1, 16)
        >>> everything = torch.arange(6).expand(1, 6, 1, 6)
        >>> out = sparse_attention(q, kv, None, everything)
        >>> heads_first = q.transpose(1, 2), kv.transpose(1, 2), kv.transpose(1, 2)
        >>> dense = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        >>> torch.allclose(out, dense.transpose(1, 2), atol=1e-5)
        True
    """
    args = {
        "query": q, "key": k, "value": v, "sparse_indices": indices, "layout": layout, "actual_seq_qlen": q_len,
        "actual_seq_kvlen": kv_len, "query_rope": q_rope, "key_rope": k_rope, "scale_value": scale,
        "sparse_block_size": block, "causal": causal, "dim_v": dim_v, "sinks": sink, "block_table": page_table,
    }  # fmt: skip
    dispatch.autocast(args, ("query", "key", "value", "query_rope", "key_rope"))
    results = dispatch.results(sparse.RECORD, args, backend, complete=return_lse)
    out = results["attention_out"]
    return (out, lse_of(results["softmax_max"], results["softmax_sum"], layout)) if return_lse else out


def pack_lists(indices: Tensor) -> Tensor:
    """Moves the non-negative entries of each list to the front, in their order, and fills the rest with -1.

    sparse_attention() reads a list up to its first negative entry, so lists with negative entries between valid ones,
    for instance from masked_fill, must be packed.

    Args:
        indices: lists, int32 or int64 [..., K].

    Returns:
        The packed lists, of the same shape and dtype.

    Raises:
        ValueError: another dtype, or a 0-dim tensor.

    Source: this library.

    Example:
        >>> pack_lists(torch.tensor([[-1, 7, -1, 2]])).tolist()
        [[7, 2, -1, -1]]
    """
    if indices.dtype not in (torch.int32, torch.int64) or not indices.dim():
        raise ValueError(f"pack_lists: indices: expected int32 or int64 [..., K], got {show(indices)}")
    order = (indices < 0).to(torch.uint8).argsort(dim=-1, stable=True)
    return indices.gather(-1, order).clamp(min=-1)


@aliased
def indexer_loss(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    indices: Tensor | None = None,
    *,
    layout: Layout = "BSND",
    q_len: Lengths = None,
    kv_len: Lengths = None,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    sink: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Loss that trains an indexer: the KL divergence between the attention's and the indexer's probabilities of keys.

        p_j  = mean over heads of exp(scale * (q . k_j + q_rope . k_rope_j) - lse)
        y    = softmax(I),   I_j = sum_h w_h * max(0, index_q_h . index_k_j)
        loss = sum_j p_j * (ln p_j - ln y_j),   dI = y - p

    The sum is over the selected keys of a row, or without indices over its visible keys; with a sink p is divided by 1
    minus the sink's probability. The loss is also summed over all rows: divide it by their number. Differentiable in
    index_q, index_k and weights; the attention's inputs are constants. The gradients are computed together with the
    loss. docs/sparse_attention.md has a training loop.

    Args:
        q, k: query and key rows of the attention, [B, S1, N1, D] and [B, S2, N2, D]; float16, bfloat16 or float32.
        lse: the attention's result (return_lse=True) over the same keys: [B, N1, S1], packed [T1, N1].
        index_q, index_k: query and key rows of the indexer, [B, S1, Ni, Di] and [B, S2, 1, Di], in q's dtype.
        weights: w, one number per row and indexer head, [B, S1, Ni], in q's dtype or float32.
        indices: int32 or int64 [B, S1, 1, K], results of lightning_indexer: the selected keys of every row; None: all
            visible keys, with lse of a dense attention.
        layout: "BSND", or packed "TND": [T1, N1, D], [T2, N2, D], ...
        q_len, kv_len: tokens of every sequence (not cumulative). Packed: required (kv_len defaults to q_len).
        q_rope, k_rope: rope elements of the attention, [B, S1, N1, Dr], [B, S2, N2, Dr].
        scale: the attention's scale; None: 1 / sqrt(D + Dr).
        causal: True: a row sees the keys up to its position, the last row all keys; False: every row sees all keys.
        sink: the attention's sink, float32 [N1].
        backend: "auto", "cpu", "triton" or "golden".

    Returns:
        The loss, a float32 scalar; 0 if no row has a visible key. Probabilities in the logarithms are at least 1e-8, so
        the loss may be slightly below 0.

    Raises:
        ContractError: a call that `fusion-attention ops indexer_loss` does not allow; for an index out of range the
            message names the sequence, the row and the position in the list.
        BackendError: no back end computes the call; the message lists the reasons.

    Source: this library; the computation of CANN's SparseLightningIndexerGradKLLoss and
    DenseLightningIndexerGradKLLoss.

    Example:
        >>> q, k, index_k = torch.randn(1, 6, 4, 16), torch.randn(1, 6, 1, 16), torch.randn(1, 6, 1, 8)
        >>> index_q, weights = torch.randn(1, 6, 2, 8, requires_grad=True), torch.rand(1, 6, 2)
        >>> indices, _ = lightning_indexer(index_q, index_k, weights, 3)
        >>> _, lse = sparse_attention(q, k, None, indices, return_lse=True)
        >>> loss = indexer_loss(q, k, lse, index_q, index_k, weights, indices)
        >>> loss.backward()
        >>> index_q.grad.shape
        torch.Size([1, 6, 2, 8])
    """
    args = {
        "query": q, "key": k, "lse": lse, "query_index": index_q, "key_index": index_k, "weights": weights,
        "sparse_indices": indices, "layout": layout, "actual_seq_qlen": q_len, "actual_seq_kvlen": kv_len,
        "query_rope": q_rope, "key_rope": k_rope, "scale_value": scale, "causal": causal, "sinks": sink,
    }  # fmt: skip
    dispatch.autocast(args, ("query", "key", "query_index", "key_index", "query_rope", "key_rope"))
    return dispatch.results(indexer_loss_record.RECORD, args, backend)["loss"].reshape(())


@aliased
def indexer_target_loss(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    target: Tensor,
    indices: Tensor | None = None,
    *,
    layout: Layout = "BSND",
    q_len: Lengths = None,
    kv_len: Lengths = None,
    causal: bool = True,
    ratio: int = 1,
    residual: Lengths = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Loss that trains an indexer: the KL divergence between given and the indexer's probabilities of keys.

        y    = softmax(I),   I_j = sum_h w_h * max(0, index_q_h . index_k_j)
        loss = sum_j p_j * (ln p_j - ln y_j),   dI = y * sum_j p_j - p

    The sum is over the selected keys of a row, or without indices over its visible keys. The target p is a constant,
    and may sum to less than 1 if the attention has other keys or a sink. The loss is also summed over all rows: divide
    it by their number. Differentiable in index_q, index_k and weights; the gradients are computed with the loss.

    Args:
        index_q, index_k: query and key rows of the indexer, [B, S1, Ni, Di] and [B, S2, 1, Di]; float16, bfloat16 or
            float32.
        weights: w, one number per row and indexer head, [B, S1, Ni], in index_q's dtype or float32.
        target: p, float32, a probability for every entry of indices, [B, S1, 1, K], or without indices for every key,
            [B, S1, 1, S2]. Probabilities of entries and keys that a row does not read are ignored.
        indices: int32 or int64 [B, S1, 1, K], results of lightning_indexer: the selected keys of every row; None: all
            visible keys.
        layout: "BSND", or packed "TND": [T1, Ni, Di], ...; without indices target is [T1, 1, longest kv_len].
        q_len, kv_len: tokens of every sequence (not cumulative). Packed: required (kv_len defaults to q_len).
        causal: True: a row sees the keys up to its position, the last row all keys; False: every row sees all keys.
        ratio, residual: as in lightning_indexer(): tokens per key, and tokens after those of the last key.
        backend: "auto", "cpu", "triton" or "golden".

    Returns:
        The loss, a float32 scalar; 0 if no row has a visible key. p and y in the logarithms are at least 1e-8, so the
        loss may be slightly below the exact sum.

    Raises:
        ContractError: a call that `fusion-attention ops indexer_target_loss` does not allow; for an index out of range
            the message names the sequence, the row and the position in the list.
        BackendError: no back end computes the call; the message lists the reasons.

    Source: this library; the computation of CANN's SparseLightningIndexerKLLossGrad.

    Example:
        >>> index_q, index_k = torch.randn(1, 6, 2, 8, requires_grad=True), torch.randn(1, 6, 1, 8)
        >>> weights, target = torch.rand(1, 6, 2), torch.rand(1, 6, 1, 3).softmax(-1)
        >>> indices, _ = lightning_indexer(index_q, index_k, weights, 3)
        >>> loss = indexer_target_loss(index_q, index_k, weights, target, indices)
        >>> loss.backward()
        >>> index_q.grad.shape
        torch.Size([1, 6, 2, 8])
    """
    args = {
        "query_index": index_q, "key_index": index_k, "weights": weights, "target": target, "sparse_indices": indices,
        "layout": layout, "actual_seq_qlen": q_len, "actual_seq_kvlen": kv_len, "causal": causal, "ratio": ratio,
        "residual": residual,
    }  # fmt: skip
    dispatch.autocast(args, ("query_index", "key_index"))
    return dispatch.results(target_loss_record.RECORD, args, backend)["loss"].reshape(())


def lse_of(max_: Tensor, sum_: Tensor, layout: str) -> Tensor:
    """Returns lse = max + log(sum) as [B, N1, S1] (layout "TND": [T1, N1]) from a softmax's max and sum in CANN's order
    of axes, [B, N2, S1, G] ("TND": [N2, T1, G]), N1 = N2 * G."""
    lse = max_ + sum_.detach().log()  # max and sum of a row without keys are 0, so its lse is -inf
    return lse.movedim(0, 1).flatten(1) if layout == "TND" else lse.mT.flatten(1, 2)
