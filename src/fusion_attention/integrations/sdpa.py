"""torch's scaled_dot_product_attention(), computed by attention().

patched() replaces torch's function for code that cannot be edited. torch computes calls that this library does not
support (other dtypes and devices, tensor subclasses) and reports the errors of invalid ones.
"""

import functools
import math
from typing import Any

import torch

from fusion_attention.api.attention import attention
from fusion_attention.ir.mask import Band
from fusion_attention.patches import Changes, Counted, Layer
from fusion_attention.torch_ops.autograd_guards import forward_mode
from fusion_attention.torch_ops.device_aliases import crosses

__all__ = ["patched", "scaled_dot_product_attention"]

Tensor = torch.Tensor
_TORCHS = torch._C._nn.scaled_dot_product_attention
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEVICES = ("cpu", "cuda")
_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_ELEMENTS = 768  # largest head dimension
_LARGEST = torch.finfo(torch.float32).max
_CAUSAL = Band.causal("start")


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with the same arguments and the same meaning.

        out = dropout(softmax(scale * query @ key^T + mask)) @ value

    It is differentiable in query, key, value and a mask of floats. torch computes calls that this library does not
    support: float64 and other dtypes, devices except "cpu", "cuda" and an installed "npu", tensor subclasses, head
    dimensions above 768, a mask of floats in another dtype than query's, a mask together with is_causal, torch.func,
    and calls that torch refuses.

    Args:
        query: [..., N, L, E], [N, L, E] or [L, E]; leading axes of query, key and value broadcast. Or a nested tensor
            of layout torch.jagged, [B, N, j, E]; then key and value are nested too.
        key: [..., N, S, E]; fewer heads broadcast (one head) or are shared (enable_gqa).
        value: [..., N, S, Ev]; fewer heads as for key.
        attn_mask: broadcasts to [..., N, L, S]. bool: true for a visible key; floats are added to the score. A row
            without keys is zero, as in torch.
        dropout_p: probability of dropout, drawn from torch's default generator, but with other draws than torch's.
        is_causal: row i sees the keys up to i, counted from the upper left corner.
        scale: factor on the products; None: 1 / sqrt(E).
        enable_gqa: N / N_kv consecutive query heads share a head of key and value.

    Returns:
        [..., N, L, Ev], in query's dtype.

    Source: torch.nn.functional.scaled_dot_product_attention.

    Example:
        >>> q = torch.randn(2, 4, 5, 16)
        >>> scaled_dot_product_attention(q, q, q, is_causal=True).shape
        torch.Size([2, 4, 5, 16])
    """
    call = query, key, value, attn_mask, dropout_p, is_causal
    out = _ours(*call, scale, enable_gqa)
    return _TORCHS(*call, scale=scale, enable_gqa=enable_gqa) if out is None else out


class patched(Counted):
    """Replaces torch.nn.functional.scaled_dot_product_attention inside a block or a function.

    The replacement works in every thread, for code that looks the function up in torch.nn.functional at each call:
    torch.nn.MultiheadAttention, transformers' "sdpa", diffusers, timm. A function imported earlier by name, compiled
    code, and torch's fused encoder layers still use torch's.

    Example:
        >>> layer, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(1, 5, 16)
        >>> with patched():
        ...     layer(x, x, x, need_weights=False)[0].shape
        torch.Size([1, 5, 16])
    """

    def begin(self, changes: Changes) -> None:
        """Replaces scaled_dot_product_attention by a patch, which `changes` records, when the first block begins."""
        changes.wrap(torch.nn.functional, "scaled_dot_product_attention", _wrapper)


def _wrapper(layer: Layer) -> Any:
    """Returns a scaled_dot_product_attention() computed by this library; calls that it does not support go to
    layer.below, the function that the patch replaces."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        call = query, key, value, attn_mask, dropout_p, is_causal
        out = _ours(*call, scale, enable_gqa) if layer.on else None
        return layer.below(*call, scale=scale, enable_gqa=enable_gqa) if out is None else out

    return functools.wraps(layer.below)(scaled_dot_product_attention)


def _ours(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor | None:
    """Returns SDPA's result, computed by attention(); None if torch must compute the call. grouped: enable_gqa."""
    if not 0 <= dropout_p < 1 or (is_causal and mask is not None):
        return None
    if not torch.compiler.is_compiling() and (torch._C._are_functorch_transforms_active() or forward_mode()):
        return None  # torch.func and forward-mode differentiation are not supported
    if scale is not None and not abs(scale) < _LARGEST:
        return None
    how: dict[str, Any] = {"scale": scale, "keep_prob": 1 - dropout_p, "band": _CAUSAL if is_causal else None}
    if isinstance(query, Tensor) and query.is_nested:
        return None if mask is not None else _jagged(query, key, value, grouped, how)
    if not _computed(query, key, value):
        return None
    result = _batched(query, key, value, grouped)
    if result is None:
        return None
    q, k, v, lead = result
    if mask is not None:
        # torch's CPU kernel does not check the mask's device and would read its memory.
        if isinstance(mask, Tensor) and mask.device != q.device:
            raise RuntimeError(
                f"scaled_dot_product_attention: attn_mask: expected it on {q.device}, where query is, got it on "
                f"{mask.device} (attn_mask.to(query.device))"
            )
        if not _fits(mask, q, (*lead, q.shape[1], q.shape[2], k.shape[2])):
            return None
        if len(lead) > 1 and mask.dim() > 3:
            one = math.prod(mask.shape[:-3]) == 1
            mask = mask.flatten(0, -4) if one else mask.expand(*lead, *mask.shape[-3:]).flatten(0, len(lead) - 1)
        if mask.dtype == torch.bool:
            how["blocked"] = mask.logical_not()
        else:
            how["bias"] = mask
    if len(lead) == 1 and q.stride(1) < q.stride(2):
        # The query is a view of [B, S, N, E], as projections write it; the result gets this memory order, as in torch.
        out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **how)
        return out.transpose(1, 2)
    out = attention(q, k, v, layout="BNSD", **how)
    out = out.reshape(*lead, *out.shape[1:])
    return out if max(query.dim(), key.dim(), value.dim()) > 2 else out.squeeze(0)


def _computed(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if this library supports the dtype, device and shape of query, key and value."""
    if type(query) not in _TENSOR_TYPES or type(key) not in _TENSOR_TYPES or type(value) not in _TENSOR_TYPES:
        return False
    device, dtype = query.device, query.dtype
    return (
        dtype in _DTYPES
        and key.dtype == dtype == value.dtype
        and (device.type in _DEVICES or crosses(device))
        and key.device == device == value.device
        and min(query.dim(), key.dim(), value.dim()) > 1
        and 0 < query.shape[-1] <= _ELEMENTS
        and 0 < value.shape[-1] <= _ELEMENTS
        and query.shape[-1] == key.shape[-1]
        and key.shape[-2] == value.shape[-2]
    )


def _batched(
    query: Tensor, key: Tensor, value: Tensor, grouped: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]] | None:
    """Returns (q, k, v as [B, N, S, E] with broadcast heads, the leading axes of the result); None if the shapes do not
    fit. grouped: True if key and value may have fewer heads than query (enable_gqa)."""
    if query.dim() == key.dim() == value.dim() == 4:  # a fast path for the usual case
        (batch, heads, *_), (batch_k, heads_k, *_), (batch_v, heads_v, *_) = query.shape, key.shape, value.shape
        fits = heads_k in (heads, 1) or (grouped and heads_k and not heads % heads_k)
        if batch == batch_k == batch_v and heads and heads_k == heads_v and fits:
            return query, key, value, (batch,)
    axes = max(query.dim(), key.dim(), value.dim(), 3)
    q, k, v = (t[(None,) * (axes - t.dim())] for t in (query, key, value))
    heads, heads_k, heads_v = q.shape[-3], k.shape[-3], v.shape[-3]
    if not grouped:
        counts = {heads, heads_k, heads_v} - {1}
        if len(counts) > 1:
            return None
        heads = max(counts, default=1)
        shared = 1 if heads_k == heads_v == 1 else heads
    elif heads_k != heads_v or not heads_k or heads % heads_k:
        return None
    else:
        shared = heads_k
    if not heads:
        return None
    try:
        lead = tuple(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]))
    except RuntimeError:
        return None
    batch = math.prod(lead)

    def expanded(t: Tensor, n: int) -> Tensor:
        if t.dim() == 4 and t.shape[0] == batch and t.shape[1] == n:
            return t
        return t.expand(*lead, n, *t.shape[-2:]).reshape(batch, n, *t.shape[-2:])

    return expanded(q, heads), expanded(k, shared), expanded(v, shared), lead


def _fits(mask: Tensor, q: Tensor, shape: tuple[int, ...]) -> bool:
    """True if attention() can use a mask: it is bool or of q's dtype, and broadcasts to the scores' `shape`."""
    return (
        type(mask) in _TENSOR_TYPES
        and mask.dtype in (torch.bool, q.dtype)
        and 2 <= mask.dim() <= len(shape)
        and all(size in (1, full) for size, full in zip(reversed(mask.shape), reversed(shape), strict=False))
    )


def _jagged(query: Any, key: Any, value: Any, grouped: bool, how: dict[str, Any]) -> Tensor | None:
    """Returns the attention of nested tensors [B, N, j, E], computed as packed sequences; None if torch must compute
    it. grouped: enable_gqa. how: further arguments of attention()."""
    three = (query, key, value)
    if not all(isinstance(t, Tensor) and t.is_nested and t.layout == torch.jagged and t.dim() == 4 for t in three):
        return None
    if not all(t._ragged_idx == 2 and t.lengths() is None for t in three):
        return None
    if query.shape[0] != key.shape[0]:
        return None
    # In a trace only one symbolic length shows that lengths are equal.
    if key.shape[2] != value.shape[2] and (
        torch.compiler.is_compiling() or not torch.equal(key.offsets(), value.offsets())
    ):
        return None
    q = query.values().transpose(0, 1)  # [tokens, N, E]
    # One view per tensor: a trace of nested tensors does not identify two views of one tensor.
    k = q if key is query else key.values().transpose(0, 1)
    v = k if value is key else value.values().transpose(0, 1)
    heads, shared = q.shape[1], k.shape[1]
    if not _computed(q, k, v) or not shared or heads % shared or (not grouped and heads != shared):
        return None
    q_len = query.offsets().diff()
    kv_len = None if query.shape[2] == key.shape[2] else key.offsets().diff()
    out = attention(q, k, v, layout="TND", q_len=q_len, kv_len=kv_len, **how)
    return torch.nested.nested_tensor_from_jagged(out, query.offsets()).transpose(1, 2)
