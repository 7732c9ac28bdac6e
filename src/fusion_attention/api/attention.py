"""The public function attention(): softmax attention with a band, a mask, biases and dropout."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from fusion_attention.backends import BackendName
from fusion_attention.ir.mask import UNLIMITED, Band
from fusion_attention.ops.training.api_definition import EmptyRows, Layout, Lengths
from fusion_attention.torch_ops import attention_forward
from fusion_attention.torch_ops.device_aliases import aliased
from fusion_attention.torch_ops.foreign_arguments import refuse

Tensor = torch.Tensor


# fmt: off
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, layout: Layout = "BSND", heads: int = 0, q_len: Lengths = None,
    kv_len: Lengths = None, q_rope: Tensor | None = None, k_rope: Tensor | None = None, scale: float | None = None,
    band: Band | None = None, sparse_mode: int | None = None, pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED, blocked: Tensor | None = None, bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None, alibi_start: Sequence[int] | None = None, sink: Tensor | None = None,
    keep_prob: float = 1.0, drop_bits: Tensor | None = None, seed: int | None = None, offset: int = 0,
    empty_rows: EmptyRows = "zero", softcap: float = 0.0, blocked_tiles: Tensor | None = None,
    blocked_bits: Tensor | None = None, return_lse: Literal[False] = False, backend: BackendName = "auto",
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, layout: Layout = "BSND", heads: int = 0, q_len: Lengths = None,
    kv_len: Lengths = None, q_rope: Tensor | None = None, k_rope: Tensor | None = None, scale: float | None = None,
    band: Band | None = None, sparse_mode: int | None = None, pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED, blocked: Tensor | None = None, bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None, alibi_start: Sequence[int] | None = None, sink: Tensor | None = None,
    keep_prob: float = 1.0, drop_bits: Tensor | None = None, seed: int | None = None, offset: int = 0,
    empty_rows: EmptyRows = "zero", softcap: float = 0.0, blocked_tiles: Tensor | None = None,
    blocked_bits: Tensor | None = None, return_lse: Literal[True], backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, layout: Layout = "BSND", heads: int = 0, q_len: Lengths = None,
    kv_len: Lengths = None, q_rope: Tensor | None = None, k_rope: Tensor | None = None, scale: float | None = None,
    band: Band | None = None, sparse_mode: int | None = None, pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED, blocked: Tensor | None = None, bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None, alibi_start: Sequence[int] | None = None, sink: Tensor | None = None,
    keep_prob: float = 1.0, drop_bits: Tensor | None = None, seed: int | None = None, offset: int = 0,
    empty_rows: EmptyRows = "zero", softcap: float = 0.0, blocked_tiles: Tensor | None = None,
    blocked_bits: Tensor | None = None, return_lse: bool, backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


@aliased
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout = "BSND",
    heads: int = 0,
    q_len: Lengths = None,
    kv_len: Lengths = None,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    scale: float | None = None,
    band: Band | None = None,
    sparse_mode: int | None = None,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    blocked: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    alibi_start: Sequence[int] | None = None,
    sink: Tensor | None = None,
    keep_prob: float = 1.0,
    drop_bits: Tensor | None = None,
    seed: int | None = None,
    offset: int = 0,
    empty_rows: EmptyRows = "zero",
    softcap: float = 0.0,
    blocked_tiles: Tensor | None = None,
    blocked_bits: Tensor | None = None,
    return_lse: bool = False,
    backend: BackendName = "auto",
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each query row over the keys that band, masks and lengths make visible to it.

        s   = cap(scale * (q . k + q_rope . k_rope)) + bias             cap(x) = softcap * tanh(x / softcap), or x
        out = sum_j keep_j / keep_prob * exp(s_j) * v_j / (sum_j exp(s_j) + exp(sink))

    Differentiable in q, k, v, q_rope, k_rope, bias and sink.

    Args:
        q: query rows, [B, S1, N1, D] in layout BSND; float16, bfloat16 or float32 (float64: backend="golden").
        k: key rows, [B, S2, N2, D]; N1 is a multiple of N2, and query head h uses key head h // (N1 / N2).
        v: value rows, [B, S2, N2, Dv].
        layout: "BSND", "BNSD", "BSH" [B, S, N*D], "SBH" [S, B, N*D], or packed "TND" [T, N, D].
        heads: N1, for BSH and SBH.
        q_len, kv_len: tokens of every sequence (not cumulative). Packed: required (kv_len defaults to q_len).
            Padded: rows after a sequence's length return zeros, keys after it are not visible.
        q_rope, k_rope: rope elements [B, S1, N1, Dr], [B, S2, N2, Dr], in q's layout and dtype.
        scale: factor on the dot products; None: 1 / sqrt(D + Dr).
        band: the interval of keys that each row sees (Band.causal(), Band.window(255, 0), ...); None: all keys.
        sparse_mode: CANN's number of a mask, in place of a band: 0, 4: a window; 1: all keys; 2, 3, 7, 8: causal.
        pre_tokens, next_tokens: visible tokens before (modes 0, 4) and behind (0, 4, 7, 8) the diagonal.
        blocked: bool or uint8, true removes a score; broadcasts to [B, N1, S1, S2].
        bias: added to the scaled scores, in q's dtype; broadcasts to [B, N1, S1, S2]. -inf removes a key, even one
            whose v is NaN.
        alibi_slopes: [N1] or [B, N1], of any floating dtype: the bias is -slope * |key - row|, where the last row and
            the last key have the same position; no gradient.
        alibi_start: positions (tokens) of the first row and of the first key, which replace those of alibi_slopes.
        sink: [N1], of any floating dtype; an additional logit per row and head in the denominator.
        keep_prob: probability that dropout keeps an element; below 1, bits are drawn from (seed, offset) unless
            drop_bits are given.
        drop_bits: uint8, one bit per score of [B, N1, S1, S2] (packed: block by block), 1 = kept, lowest bit first.
        seed, offset: determine the drawn bits; seed None: a seed from torch's default generator.
        empty_rows: result of a row without visible keys: "zero" (lse -inf), or the "mean" of its sequence's v.
        softcap: limits scores to between -softcap and softcap, before any bias (Gemma 2: 50); 0: no limit.
        blocked_tiles: a mask as tiles of 128 rows by 128 keys: int32 [B or 1, N1 or 1, ceil(S1 / 128),
            ceil(S2 / 128)], for each tile -1 (every score removed: the tile is skipped), -2 (none removed), or an index
            into blocked_bits. Packed: S1 and S2 are the longest sequence's.
        blocked_bits: uint8 [tiles, 128, 16], a bit per score of a tile, lowest first, 1: removed.
        return_lse: also return log(sum(exp(s))): float32 [B, N1, S1], packed [T1, N1]; differentiable like out.
        backend: "auto" (set by use_backend(), else by the device), "cpu", "triton" or "golden".
        foreign: parameters of other libraries (is_causal, attn_mask, softmax_scale, ...); they raise an error that
            names the equivalent parameter of this function.

    Returns:
        out in q's layout with Dv elements per head, or (out, lse).

    Raises:
        ContractError: a call that `fusion-attention ops attention` does not allow; the message states the fix.
        BackendError: no back end computes the call; the message lists the reasons.
        TypeError: an unknown parameter; the message suggests the equivalent one.

    Source: this library; the computation of CANN's FlashAttentionScore.

    Example:
        >>> q, k = torch.randn(2, 5, 4, 64), torch.randn(2, 9, 1, 64)
        >>> attention(q, k, k, band=Band.causal()).shape
        torch.Size([2, 5, 4, 64])
    """
    if foreign:
        refuse(attention, foreign)
    args = {
        "q": q, "k": k, "v": v, "layout": layout, "heads": heads, "q_len": q_len, "kv_len": kv_len, "q_rope": q_rope,
        "k_rope": k_rope, "scale": scale, "band": band, "sparse_mode": sparse_mode, "pre_tokens": pre_tokens,
        "next_tokens": next_tokens, "blocked": blocked, "bias": bias, "alibi_slopes": alibi_slopes,
        "alibi_start": alibi_start, "sink": sink, "keep_prob": keep_prob, "drop_bits": drop_bits, "seed": seed,
        "offset": offset, "empty_rows": empty_rows, "softcap": softcap, "blocked_tiles": blocked_tiles,
        "blocked_bits": blocked_bits,
    }  # fmt: skip
    out, max_, sum_ = attention_forward.forward(args, backend, stats=return_lse)
    return (out, max_ + sum_.detach().log()) if return_lse else out
