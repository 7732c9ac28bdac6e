"""torch's flex_attention(), computed by attention(), with gradients on a CPU too.

A mask is converted to a band, lengths or tiles (`masks.py`), a score_mod to a softcap, slopes or a bias (`scores.py`).
A score_mod that cannot be converted raises BackendError.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion_attention.api.attention import attention
from fusion_attention.integrations.flex_attention import masks, mods, scores
from fusion_attention.integrations.flex_attention.masks import Shape, Visible
from fusion_attention.integrations.flex_attention.scores import Terms
from fusion_attention.patches import Changes, Counted, Layer
from fusion_attention.torch_ops import dispatch

__all__ = ["explain", "flex_attention", "patched"]

_EVERY = Visible(None)
_FULL_BLOCK = 1 << 30  # block size of torch's mask that hides nothing


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, computed by attention(): forward and backward, on any machine.

    It is differentiable in query, key, value and in tensors that a score_mod adds to the score.

    Args:
        query: [B, Hq, L, E]; float16, bfloat16, float32, or (slowly) float64.
        key: [B, Hkv, S, E]; with a block_mask, its batch size may be 1 for any batch size of query.
        value: [B, Hkv, S, Ev].
        score_mod: a function of (score, b, h, q_idx, kv_idx) that returns score * f + t or c * tanh(score * f) + t:
            f does not depend on kv_idx, t does not depend on the score, c is a number; -inf hides a key.
        block_mask: torch's BlockMask, or a mask function of (b, h, q_idx, kv_idx).
        scale: factor on the dot products; None: 1 / sqrt(E).
        enable_gqa: Hq may be a multiple of Hkv.
        return_lse: also return the logarithm of the sum of exp(score), float32 [B, Hq, L]; differentiable.
        kernel_options: no effect.
        return_aux: torch's AuxRequest(lse=...), for a result in an AuxOutput.

    Returns:
        out [B, Hq, L, Ev]; (out, lse) for return_lse, (out, AuxOutput) for return_aux.

    Raises:
        BackendError: a score_mod depends on the score in another way.
        ValueError, NotImplementedError, RuntimeError: tensors or masks do not fit, as in torch.

    Source: torch 2.13. Rows without keys are 0, and their lse is -inf. A BlockMask's mask function decides only within
        its partial blocks, as in torch's compiled code: all keys of a full block are visible, and none of a block that
        is not listed.

    Example:
        >>> q = torch.randn(1, 4, 100, 32, requires_grad=True)
        >>> out = flex_attention(q, q, q, block_mask=lambda b, h, row, key: (row >= key) & (row - key < 16))
        >>> out.sum().backward()
    """
    call = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux)
    if torch.compiler.is_compiling():
        from fusion_attention.torch_ops import trace_constants

        return trace_constants.outside(_flex_attention, *call)
    return _flex_attention(*call)


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    return_aux: Any,
) -> Any:
    _check_tensors(query, key, value, enable_gqa, block_mask)
    _check_mask(query, key, block_mask)
    if return_lse and return_aux is not None:
        raise ValueError(
            "flex_attention: return_lse: expected it or return_aux, got both; use AuxRequest(lse=True) alone"
        )
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(
            "flex_attention: return_aux: expected AuxRequest(lse=...), got max_scores=True, which is not supported"
        )
    items, heads, rows, dim = query.shape
    if key.shape[0] != items:
        key, value = (t.expand(items, -1, -1, -1) for t in (key, value))
    shape = Shape(items, heads, rows, key.shape[2], query.device)
    cast = {"q": query, "k": key, "v": value}
    dispatch.autocast(cast, ("q", "k", "v"))
    visible, terms = _converted(score_mod, block_mask, shape, cast["q"].dtype)
    scale = (dim**-0.5 if scale is None else scale) * terms.factor
    stats = return_lse or bool(return_aux and return_aux.lse)
    autocasts = torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(query.device.type)
    with torch.autocast(query.device.type, enabled=False) if autocasts else nullcontext():  # already cast
        out, lse = _attend(cast["q"], cast["k"], cast["v"], visible, terms, scale, stats=stats)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse)
    return (out, lse) if return_lse else out


def explain(query: Tensor, key: Tensor, score_mod: Callable[..., Any] | None = None, block_mask: Any = None) -> str:
    """Returns as text the arguments of attention() to which a block_mask and a score_mod are converted.

    Masks that are bands are computed fastest, then masks with tiles of 128 x 128. The arguments are those of
    flex_attention().

    Example:
        >>> q = torch.randn(1, 4, 100, 32)
        >>> explain(q, q, lambda s, b, h, row, key: 30 * torch.tanh(s / 30), lambda b, h, row, key: row >= key)
        'band=Band.causal(), softcap=30'
    """
    _check_mask(query, key, block_mask)
    shape = Shape(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
    visible, terms = _converted(score_mod, block_mask, shape, query.dtype)
    words = []
    if _packs(visible, terms):
        words.append(f"{len(visible.q_len or ())} packed sequences, band={visible.band}")
    elif visible.band is not None and not visible.packed:
        words.append(f"band={visible.band}" + (", q_len and kv_len" if visible.q_len else ""))
    elif visible.tiles is not None:
        words.append("tiles")
    words += [f"scale * {terms.factor:.6g}"] if terms.factor != 1 else []
    words += ["a factor per row"] if terms.by_row is not None else []
    words += [f"softcap={terms.softcap:.6g}"] if terms.softcap else []
    words += ["alibi_slopes"] if terms.slopes is not None else []
    words += [f"bias {list(terms.bias.shape)}"] if terms.bias is not None else []
    return ", ".join(words) or "every row sees every key"


# ------------------------------------------------------------------------------------------------------------ checks


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, block_mask: Any) -> None:
    tensors = (query, key, value)
    if any(t.is_nested for t in tensors):
        raise NotImplementedError(
            "flex_attention: query: expected a dense tensor, got a nested one; pad it, or pack it"
        )
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if any(t.ndim != 4 for t in tensors):
        raise NotImplementedError(
            f"flex_attention: query: expected [B, H, L, E] for query, key and value, got {shapes}"
        )
    if query.shape[3] != key.shape[3] or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            "flex_attention: key: expected as many elements in its rows as in the query's, and as many rows as the "
            f"value has, got {shapes}"
        )
    if any(t.device != query.device for t in tensors):
        devices = ", ".join(str(t.device) for t in tensors)
        raise ValueError(f"flex_attention: query: expected query, key and value on one device, got {devices}")
    heads, shared = query.shape[1], key.shape[1]
    if heads != shared and not enable_gqa:
        raise ValueError(
            f"flex_attention: key: expected {heads} heads like the query, got {shared}; pass enable_gqa=True to share "
            "them"
        )
    if heads % max(shared, 1) or heads < shared:
        raise ValueError(
            f"flex_attention: key: expected a number of heads that divides the query's {heads}, got {shared}"
        )
    if query.shape[0] != key.shape[0] and (key.shape[0] != 1 or block_mask is None):
        raise ValueError(
            f"flex_attention: key: expected the query's batch size {query.shape[0]}, or 1 beside a block_mask, got "
            f"{key.shape[0]}"
        )


def _check_mask(query: Tensor, key: Tensor, mask: Any) -> None:
    if mask is None or (callable(mask) and not _is_block_mask(mask)):
        return
    if not _is_block_mask(mask):
        raise TypeError(
            f"flex_attention: block_mask: expected a BlockMask or a function of (b, h, q_idx, kv_idx), got {type(mask)}"
            "; a tensor is the `blocked` of fusion_attention.attention(), where true hides"
        )
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise RuntimeError("Cannot use mask_mod from a sliced BlockMask: set it from that of the mask before slicing")
    lengths, expected = tuple(mask.seq_lengths), (query.shape[2], key.shape[2])
    if lengths != expected and tuple(mask.BLOCK_SIZE) != (_FULL_BLOCK, _FULL_BLOCK):
        raise ValueError(
            f"flex_attention: block_mask: expected one made for q_len={expected[0]} and kv_len={expected[1]}, got one "
            f"for {lengths[0]} and {lengths[1]}; create it again, or crop it with block_mask._adjust(q_len, kv_len)"
        )
    if mask.kv_num_blocks.device != query.device:
        raise RuntimeError(
            f"flex_attention: block_mask: expected it on {query.device} like the query, got {mask.kv_num_blocks.device}"
            "; block_mask.to(device) moves it"
        )


def _is_block_mask(mask: Any) -> bool:
    return hasattr(mask, "kv_num_blocks") and hasattr(mask, "mask_mod")


# -------------------------------------------------------------------------------------------------------- conversion


def _converted(
    score_mod: Callable[..., Any] | None, mask: Any, shape: Shape, dtype: torch.dtype
) -> tuple[Visible, Terms]:
    """Returns (visible keys, terms added to the score): a mask (BlockMask or mask_mod) and a score_mod, converted to
    arguments of attention(). Keys that the score_mod hides (-inf) become part of the mask."""
    if not (shape.items and shape.heads and shape.rows and shape.keys):
        return _EVERY, Terms()
    visible = _EVERY
    if _is_block_mask(mask):
        blocks = tuple(
            getattr(mask, name) for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        )
        captured = (mask.mask_mod, blocks, tuple(mask.BLOCK_SIZE))
        visible = mods.remembered(mask, ("visible", shape), captured, lambda: masks.of_block_mask(mask, shape))
    elif mask is not None:
        visible = _of_function(mask, shape)
    if score_mod is None:
        return visible, Terms()
    terms = scores.terms(score_mod, shape, dtype, alone=mask is None, past=visible.past)
    if terms.mask is not None:
        visible = _of_function(terms.mask, shape)
    return visible, terms


def _of_function(mod: mods.Mod, shape: Shape) -> Visible:
    return mods.remembered(mod, ("visible", shape), (mod,), lambda: masks.of_function(mod, shape))


# ----------------------------------------------------------------------------------------------------------- calling


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, terms: Terms, scale: float, *, stats: bool
) -> tuple[Tensor, Tensor | None]:
    """Calls attention() with the converted mask `visible` and score_mod `terms`; returns (out [B, N, S1, Dv], lse [B,
    N, S1], or None without `stats`)."""
    dtype = q.dtype
    if terms.by_row is not None:
        q, k, v = ((t if dtype == torch.float64 else t.float()) for t in (q, k, v))
        q = q * terms.by_row  # in float32 or float64, so that no digit is lost
    if terms.bias is not None and terms.bias.dtype != q.dtype:
        # attention() needs a bias in the query's dtype; rounding the bias to it would lose digits.
        both = torch.promote_types(terms.bias.dtype, q.dtype)
        q, k, v, bias = (t.to(both) for t in (q, k, v, terms.bias))
        terms = replace(terms, bias=bias)
    words: dict[str, Any] = {"scale": scale, "bias": terms.bias, "alibi_slopes": terms.slopes, "return_lse": stats}
    if terms.softcap:
        words["softcap"] = terms.softcap
    if terms.slopes is not None:
        words["alibi_start"] = [0, 0]
    if q.dtype == torch.float64:
        words["backend"] = "golden"
    out, lse = _packed(q, k, v, visible, words) if _packs(visible, terms) else _padded(q, k, v, visible, words)
    return out.to(dtype), lse


def _packs(visible: Visible, terms: Terms) -> bool:
    """True if the batch items can be computed as packed sequences with a band: the score_mod adds no bias matrix, and
    ALiBi slopes only if each sequence's queries and keys begin at the same index."""
    if not visible.packed or visible.band is None or terms.bias is not None:
        return False
    return terms.slopes is None or (visible.aligned and terms.slopes.ndim == 1)


def _packed(q: Tensor, k: Tensor, v: Tensor, visible: Visible, words: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    items, heads, rows, _ = q.shape
    q_rows, k_rows, v_rows = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    words = {**words, "layout": "TND", "band": visible.band, "q_len": visible.q_len, "kv_len": visible.kv_len}
    out, lse = _called(q_rows, k_rows, v_rows, words)
    out = out.view(items, rows, heads, -1).transpose(1, 2)
    if not _tokens_outside(q):
        out = out.contiguous()
    return out, None if lse is None else lse.view(items, rows, heads).transpose(1, 2)


def _padded(q: Tensor, k: Tensor, v: Tensor, visible: Visible, words: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    if visible.band is not None and not visible.packed:
        words = {**words, "band": visible.band, "q_len": visible.q_len, "kv_len": visible.kv_len}
    elif visible.tiles is not None and q.device.type == "cpu":
        words = {**words, "blocked_tiles": visible.tiles, "blocked_bits": visible.bits}
    elif visible.tiles is not None:  # GPU kernels have no tiles
        words = {**words, "blocked": visible.blocked(q.shape[2], k.shape[2]).to(q.device)}
    if not _tokens_outside(q):
        return _called(q, k, v, {**words, "layout": "BNSD"})
    out, lse = _called(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {**words, "layout": "BSND"})
    return out.transpose(1, 2), lse


def _called(q: Tensor, k: Tensor, v: Tensor, words: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    result = attention(q, k, v, **words)
    return result if isinstance(result, tuple) else (result, None)


def _tokens_outside(q: Tensor) -> bool:
    """True if q [B, N, S, D] is stored in the order [B, S, N, D]; results then get this order too, as torch's do."""
    return q.stride(1) < q.stride(2)


# ---------------------------------------------------------------------------------------------------------- patching


def _uncompiled(layer: Layer) -> Callable[..., Any]:
    """Wraps torch.compile (layer.below) to return flex_attention() unchanged: programs ask for fullgraph=True."""

    @functools.wraps(layer.below)
    def compile(model: Any = None, **options: Any) -> Any:  # torch.compile's parameter name
        if model is flex_attention and layer.on:
            return model
        return layer.below(model, **options)

    return compile


class _Patched(Counted):
    """A context manager that replaces torch's flex_attention in its module and in modules that imported it by name."""

    def begin(self, changes: Changes) -> None:
        """Replaces torch's flex_attention by this module's, and torch.compile for it; called at the first entry."""
        import torch.nn.attention.flex_attention as theirs

        changes.wrap(torch, "compile", _uncompiled)
        function = theirs.flex_attention
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})
            if names.get("flex_attention") is function:
                changes.set(module, "flex_attention", flex_attention)


def patched() -> _Patched:
    """Returns a context manager that replaces torch's flex_attention by this module's, for code that cannot be edited.

    Blocks may be nested. Functions that torch.compile(flex_attention) returned earlier still use torch's.

    Example:
        >>> with patched():
        ...     from torch.nn.attention.flex_attention import flex_attention
    """
    return _PATCHED


# Global, as torch's module is: the first entry makes the change, the last exit restores it.
_PATCHED = _Patched()
