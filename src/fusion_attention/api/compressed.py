"""The public function compressed_attention(): DeepSeek-V4's attention to a window of keys and to compressed keys."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from fusion_attention.api.sparse import lse_of
from fusion_attention.backends import BackendName
from fusion_attention.ir.mask import Band
from fusion_attention.ops.compressed.api_definition import RECORD
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.device_aliases import aliased

__all__ = ["compressed_attention"]

Tensor = torch.Tensor
Lengths = Sequence[int] | Tensor | None
Layout = Literal["BSND", "TND"]
_CAST = ("query", "key", "key_compressed", "value", "value_compressed")


# fmt: off
@overload
def compressed_attention(
    q: Tensor, k: Tensor, k_compressed: Tensor, indices: Tensor | None = None, *, ratio: int, band: Band | None = None,
    v: Tensor | None = None, v_compressed: Tensor | None = None, layout: Layout = "BSND", q_len: Lengths = None,
    kv_len: Lengths = None, compressed_len: Lengths = None, residual: Lengths = None, scale: float | None = None,
    sink: Tensor | None = None, page_table: Tensor | None = None, compressed_page_table: Tensor | None = None,
    return_lse: Literal[False] = False, backend: BackendName = "auto",
) -> Tensor: ...
@overload
def compressed_attention(
    q: Tensor, k: Tensor, k_compressed: Tensor, indices: Tensor | None = None, *, ratio: int, band: Band | None = None,
    v: Tensor | None = None, v_compressed: Tensor | None = None, layout: Layout = "BSND", q_len: Lengths = None,
    kv_len: Lengths = None, compressed_len: Lengths = None, residual: Lengths = None, scale: float | None = None,
    sink: Tensor | None = None, page_table: Tensor | None = None, compressed_page_table: Tensor | None = None,
    return_lse: Literal[True], backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def compressed_attention(
    q: Tensor, k: Tensor, k_compressed: Tensor, indices: Tensor | None = None, *, ratio: int, band: Band | None = None,
    v: Tensor | None = None, v_compressed: Tensor | None = None, layout: Layout = "BSND", q_len: Lengths = None,
    kv_len: Lengths = None, compressed_len: Lengths = None, residual: Lengths = None, scale: float | None = None,
    sink: Tensor | None = None, page_table: Tensor | None = None, compressed_page_table: Tensor | None = None,
    return_lse: bool, backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


@aliased
def compressed_attention(
    q: Tensor,
    k: Tensor,
    k_compressed: Tensor,
    indices: Tensor | None = None,
    *,
    ratio: int,
    band: Band | None = None,
    v: Tensor | None = None,
    v_compressed: Tensor | None = None,
    layout: Layout = "BSND",
    q_len: Lengths = None,
    kv_len: Lengths = None,
    compressed_len: Lengths = None,
    residual: Lengths = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    page_table: Tensor | None = None,
    compressed_page_table: Tensor | None = None,
    return_lse: bool = False,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each query row over a band of keys and over compressed keys, in one softmax.

        s_j = scale * q . k_j,  j in the band of the row
        t_e = scale * q . k_compressed_e,  e < (position + 1) // ratio: all of these, or those in the row's list
        out = (sum_j exp(s_j) v_j + sum_e exp(t_e) v_compressed_e) / (sum_j exp(s_j) + sum_e exp(t_e) + exp(sink))

    The last row has the position of the last key. Compressed key e represents the tokens e * ratio to
    e * ratio + ratio - 1, and is visible to rows from the last of these tokens on. A token may count in both sources.
    Differentiable in q, k, k_compressed, v, v_compressed and sink. docs/compressed_keys.md has a picture.

    Args:
        q: query rows, [B, S1, N1, D]; float16, bfloat16 or float32 (float64: backend="golden").
        k: key rows, [B, S2, N2, D]; N1 is a multiple of N2.
        k_compressed: compressed key rows, [B, S3, N2, D].
        indices: int32 or int64 [B, S1, N2, K], the numbers of the compressed keys that a row reads, then -1;
            [B, S1, 1, K]: one list for all key heads; None: all compressed keys that the row sees.
        ratio: tokens that a compressed key represents.
        band: the interval of keys in k that each row sees; Band.window(127): the last 128; None: Band.causal().
        v, v_compressed: value rows [B, S2, N2, Dv], [B, S3, N2, Dv]; None: the key rows, whose gradients then include
            those of the values.
        layout: "BSND", or packed "TND": [T1, N1, D], [T2, N2, D], [T3, N2, D], [T1, N2, K].
        q_len, kv_len, compressed_len: rows, keys and compressed keys of every sequence (not cumulative). Packed:
            required (kv_len defaults to q_len).
        residual: tokens of every sequence after those of its last compressed key, 0 to ratio - 1. Positions then count
            from the compressed keys and the residual, and k may have only the last keys, as in a cache of a window.
        scale: factor on the dot products; None: 1 / sqrt(D).
        sink: [N1], of any floating dtype; an additional logit per row and head in the denominator.
        page_table, compressed_page_table: int32 or int64 [B, M], the pages of every sequence: keys are pages
            [P, page, N2, D]. Keys in pages have no gradient.
        return_lse: also return the log-sum-exp over both sources and the sink: float32 [B, N1, S1], packed [T1, N1].
        backend: "auto", "cpu", "triton" or "golden".

    Returns:
        out in q's layout with Dv elements per head, or (out, lse); rows without visible keys are 0, with lse -inf.

    Raises:
        ContractError: a call that `fusion-attention ops compressed_attention` does not allow; for an index out of range
            the message names the sequence, the row and the position in the list.
        BackendError: no back end computes the call; the message lists the reasons.

    Source: this library; the computation of CANN's SparseFlashMla.

    Example:
        >>> q, k = torch.randn(1, 8, 4, 16), torch.randn(1, 8, 1, 16)
        >>> pairs = k.unflatten(1, (4, 2)).mean(2)
        >>> compressed_attention(q, k, pairs, ratio=2, band=Band.window(2)).shape
        torch.Size([1, 8, 4, 16])
    """
    args: dict[str, Any] = {
        "query": q, "key": k, "key_compressed": k_compressed, "sparse_indices": indices, "ratio": ratio,
        "band": band, "value": v, "value_compressed": v_compressed, "layout": layout, "actual_seq_qlen": q_len,
        "actual_seq_kvlen": kv_len, "compressed_len": compressed_len, "residual": residual, "scale_value": scale,
        "sinks": sink, "block_table": page_table, "compressed_table": compressed_page_table,
    }  # fmt: skip
    dispatch.autocast(args, _CAST)
    results = dispatch.results(RECORD, args, backend, complete=return_lse)
    out = results["attention_out"]
    return (out, lse_of(results["softmax_max"], results["softmax_sum"], layout)) if return_lse else out
