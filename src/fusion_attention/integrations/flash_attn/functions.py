"""flash_attn's functions on padded and packed tensors, computed by attention().

Every function is differentiable in q, k and v.
"""

from typing import Any

import torch

from fusion_attention.api.attention import attention
from fusion_attention.integrations.flash_attn.argument_conversion import (
    NO_WINDOW,
    Window,
    band_of,
    capped,
    lengths_of,
    returned,
)
from fusion_attention.integrations.flash_attn.paged import attend_pages

Tensor = torch.Tensor
Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn.flash_attn_func: attention of padded tensors.

        s   = cap(softmax_scale * q . k) - slope * |i + S2 - S1 - j|     for row i and key j
        out = dropout(softmax(s over the visible keys)) v

    Args:
        q: [B, S1, N1, D]; float16, bfloat16 or (unlike flash-attn) float32.
        k, v: [B, S2, N2, D]; N1 is a multiple of N2.
        dropout_p: probability of dropout, drawn from torch's default generator.
        softmax_scale: factor on the products; None: 1 / sqrt(D).
        causal: row i sees keys 0 to i + S2 - S1, so the last row sees all keys.
        window_size: (left, right): row i sees keys i + S2 - S1 - left to i + S2 - S1 + right; -1: no limit. Two numbers
            or a tensor of two.
        softcap: above 0, cap(x) = softcap * tanh(x / softcap); else cap(x) = x.
        alibi_slopes: float32 [N1] or [B, N1], the slope of each query head.
        deterministic: no effect; gradients are always deterministic.
        return_attn_probs: also return lse, float32 [B, N1, S1], and None. Unlike flash-attn's, lse is differentiable;
            it is -inf for a row without keys.

    Returns:
        out [B, S1, N1, D], or (out, lse, None). A row without keys is zero.

    Source: flash_attn 2.8, flash_attn_interface.py.

    Example:
        >>> q, k = torch.randn(2, 5, 4, 64), torch.randn(2, 9, 2, 64)
        >>> flash_attn_func(q, k, k, causal=True, window_size=(128, 0)).shape
        torch.Size([2, 5, 4, 64])
    """
    how: dict[str, Any] = {"scale": softmax_scale, "band": band_of(causal, window_size), "softcap": capped(softcap)}
    how |= {"alibi_slopes": alibi_slopes, "keep_prob": 1 - dropout_p, "return_lse": return_attn_probs}
    return returned(attention(q, k, v, **how), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Computes flash_attn_func() with keys and values in one tensor kv [B, S2, 2, N2, D], without a copy.

    Source: flash_attn 2.8, flash_attn_interface.py.

    Example:
        >>> flash_attn_kvpacked_func(torch.randn(2, 5, 4, 64), torch.randn(2, 9, 2, 2, 64)).shape
        torch.Size([2, 5, 4, 64])
    """
    k, v = kv.unbind(-3)
    how: Any = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(q, k, v, *how)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Computes flash_attn_func() with query, key and value in one tensor qkv [B, S, 3, N, D], without a copy.

    Source: flash_attn 2.8, flash_attn_interface.py.

    Example:
        >>> flash_attn_qkvpacked_func(torch.randn(2, 5, 3, 4, 64), causal=True).shape
        torch.Size([2, 5, 4, 64])
    """
    q, k, v = qkv.unbind(-3)
    how: Any = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(q, k, v, *how)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor = 0,
    max_seqlen_k: int | Tensor = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """flash_attn.flash_attn_varlen_func: attention of packed sequences.

    Other arguments are those of flash_attn_func(), applied per sequence.

    Args:
        q: [T1, N1, D], T1 the tokens of all sequences.
        k, v: [T2, N2, D]; with block_table pages [pages, size, N2, D], and no result is differentiable.
        cu_seqlens_q, cu_seqlens_k: [B + 1], cumulative lengths with a leading 0. Values of a tensor on a GPU are
            cached on the host until the tensor changes.
        max_seqlen_q, max_seqlen_k: no effect.
        block_table: [B, pages per sequence], int32: page numbers of each sequence.

    Returns:
        out [T1, N1, D], or (out, lse, None) with lse [N1, T1].

    Source: flash_attn 2.8, flash_attn_interface.py.

    Example:
        >>> q, ends = torch.randn(7, 4, 64), torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, q, q, ends, ends, 4, 4, causal=True).shape
        torch.Size([7, 4, 64])
    """
    q_len = lengths_of(cu_seqlens_q, "cu_seqlens_q")
    kv_len = q_len if cu_seqlens_k is cu_seqlens_q else lengths_of(cu_seqlens_k, "cu_seqlens_k")
    how: dict[str, Any] = {"scale": softmax_scale, "band": band_of(causal, window_size), "softcap": capped(softcap)}
    how |= {"alibi_slopes": alibi_slopes}
    if block_table is not None:
        pages = attend_pages(q, k, v, block_table, q_len, kv_len, **how)
        return returned(pages if return_attn_probs else pages[0], return_attn_probs, packed=True)
    how |= {"keep_prob": 1 - dropout_p, "return_lse": return_attn_probs}
    result = attention(q, k, v, layout="TND", q_len=q_len, kv_len=kv_len, **how)
    return returned(result, return_attn_probs, packed=True)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor = 0,
    max_seqlen_k: int | Tensor = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Computes flash_attn_varlen_func() with keys and values in one tensor kv [T2, 2, N2, D], without a copy.

    Source: flash_attn 2.8, flash_attn_interface.py.

    Example:
        >>> q, ends = torch.randn(7, 4, 64), torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> flash_attn_varlen_kvpacked_func(q, torch.randn(7, 2, 2, 64), ends, ends, 4, 4).shape
        torch.Size([7, 4, 64])
    """
    k, v = kv.unbind(-3)
    ends: Any = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    how: Any = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, *ends, *how)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Computes flash_attn_varlen_func() with query, key and value in one tensor qkv [T, 3, N, D], without a copy.

    Source: flash_attn 2.8, flash_attn_interface.py.

    Example:
        >>> ends = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.randn(7, 3, 4, 64), ends, 4).shape
        torch.Size([7, 4, 64])
    """
    q, k, v = qkv.unbind(-3)
    ends: Any = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    how: Any = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, *ends, *how)
