"""Attention for transformers' models: register(), then attn_implementation="fusion_attention".

A model calls the mask interface mask() once per forward, and the attention interface attend() in every layer. mask()
returns one of these, which models, caches and checkpoints handle like any mask:

    None                  is_causal and sliding_window of the module apply; the last row has the last key's position
    bool  [B, T]          as None, but false for padding; the last row has position T - 1, later keys are ignored
    int64 [B, S]          the sequence number of each packed token; the tokens of a sequence are adjacent
    bool  [B, 1 or N, S or 1, T]    true for visible keys; is_causal and sliding_window are ignored
    float [B, 1 or N, S or 1, T]    added to the scores; is_causal and sliding_window are ignored
"""

import functools
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import masking_utils
from transformers.utils import logging

from fusion_attention.api.attention import attention
from fusion_attention.api.sparse import sparse_attention
from fusion_attention.contract import ContractWarning
from fusion_attention.integrations import sparse_models
from fusion_attention.integrations.sparse_loss import indexer_loss
from fusion_attention.integrations.transformers_cache import StoredRows
from fusion_attention.integrations.transformers_masks import (
    cached,
    hidden,
    never_changes,
    packed_lengths,
    padding_of,
    read_padding,
)
from fusion_attention.ir.mask import INFINITE, Band
from fusion_attention.patches import Changes, Counted

__all__ = ["TESTED", "attend", "indexer_loss", "mask", "register", "unregister"]

Tensor = torch.Tensor

NAME = "fusion_attention"
# First and last tested release of transformers.
TESTED = ("5.22", "5.23")

_CAUSAL = Band.causal()
_log = logging.get_logger(__name__)


def register(name: str = NAME) -> None:
    """Registers this library as an attention implementation of transformers.

    Call it once per process, before the first model; further calls do nothing.

    Args:
        name: the name for attn_implementation= and set_attn_implementation().

    Warns:
        ContractWarning: the installed release of transformers was not tested with this library.

    Source: this library; docs/with_transformers.md.

    Example:
        >>> register()
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
        >>> model = LlamaModel._from_config(LlamaConfig(**sizes), attn_implementation="fusion_attention")
        >>> model(torch.arange(5)[None]).last_hidden_state.shape
        torch.Size([1, 5, 32])
    """
    if transformers.AttentionInterface._global_mapping.get(name) is attend:
        return
    release = tuple(int(n) for n in re.findall(r"\d+", transformers.__version__)[:2])
    first, last = (tuple(map(int, bound.split("."))) for bound in TESTED)
    if not first <= release <= last:
        warnings.warn(
            f"transformers {transformers.__version__} was not tested with fusion_attention, "
            f"{TESTED[0]} to {TESTED[1]} were: compare a few outputs with attn_implementation='eager'",
            ContractWarning,
            stacklevel=2,
        )
    transformers.AttentionInterface.register(name, attend)
    masking_utils.AttentionMaskInterface.register(name, mask)
    _SPARSE.__enter__()


def unregister(name: str = NAME) -> None:
    """Removes an attention implementation that register() added; models that use it need another one afterwards.

    Source: this library; docs/with_transformers.md.

    Example:
        >>> register("another_name")
        >>> unregister("another_name")
        >>> "another_name" in transformers.AttentionInterface()
        False
    """
    if transformers.AttentionInterface._global_mapping.get(name) is attend:
        del transformers.AttentionInterface._global_mapping[name]
        del masking_utils.AttentionMaskInterface._global_mapping[name]
        _SPARSE.__exit__()


def _serves(config: Any) -> bool:
    return transformers.AttentionInterface._global_mapping.get(config._attn_implementation) is attend


class _Sparse(Counted):
    """Patches the layers of transformers' sparse attention models while an attention implementation is registered."""

    def begin(self, changes: Changes) -> None:
        """Patches transformers' layers with sparse attention, before the first implementation is registered."""
        sparse_models.patch(changes, _serves)


_SPARSE = _Sparse()


class _Code(NamedTuple):
    """Flags of the arguments that a model's modeling code passes to a function of transformers' AttentionInterface."""

    uses_interface: bool  # the code calls the attention interface
    names: bool  # modules have is_causal or pass it; modules without it count as causal
    describes: bool  # is_causal and lengths of packed sequences are passed, as for flash-attn
    windows: bool  # sliding_window is passed to the attention interface
    both_sides: bool  # windows of masks that are not causal have flash-attn's size, which includes the diagonal


def _read_code(configuration: str) -> _Code:
    """Returns the arguments that a model's modeling code passes to the attention function, read from its source; if it
    is not loaded, assumed ones that need masks of four axes. configuration: the module of its configuration."""
    module = sys.modules.get(configuration.replace("configuration_", "modeling_"))
    if module is None or "modeling_" not in module.__name__:
        return _Code(uses_interface=True, names=False, describes=False, windows=False, both_sides=False)
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    names = "is_causal" in text
    passed = (words in text for words in ("sliding_window=", "sliding_window + 1"))
    return _Code("ALL_ATTENTION_FUNCTIONS" in text, names, names and "_supports_flash_attn = True" in text, *passed)


_code_of = functools.cache(_read_code)


def _code(configuration: str) -> _Code:
    """Returns the arguments that a model's code passes to attention (_Code), cached; a constant in compiled graphs."""
    if torch.compiler.is_compiling():
        from fusion_attention.torch_ops import trace_constants

        result: _Code = trace_constants.constant(_read_code, configuration)
        return result
    return _code_of(configuration)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    config: Any = None,
    **others: Any,
) -> Tensor | None:
    """Returns the mask of a forward for attend(): None, bool [B, T] (false for padding), int64 [B, S] (sequence numbers
    of packed tokens), or a mask [B, N or 1, S or 1, T].

    The arguments are those of transformers' sdpa_mask(). allow_is_bidirectional_skip is None for causal masks, because
    transformers passes it for other masks only.

    Raises:
        ValueError: the model's code does not call the attention interface.
    """
    sparse_models.check(config)
    code = _code(type(config).__module__)
    if not code.uses_interface:
        raise ValueError(
            f"{type(config).__name__}: this model computes attention in its own code and calls no attention_interface: "
            f'use attn_implementation="eager" (docs/with_transformers.md lists the supported models)'
        )
    causal = allow_is_bidirectional_skip is None
    # Chunked attention has a local size too, which is not passed to the attention interface.
    window = local_size is None or (
        local_size == getattr(config, "sliding_window", None) and code.windows and (causal or code.both_sides)
    )
    sparse = sparse_models.family_of(config) is not None  # transformers never skips such models' masks
    if sparse and local_size is None:
        allow_is_causal_skip = mask_function is masking_utils.causal_mask_function
    if (code.describes or sparse) and window:
        if allow_is_causal_skip if causal else allow_is_bidirectional_skip:
            end = q_offset + q_length if causal else kv_offset + kv_length
            if not isinstance(end, Tensor) or not torch.compiler.is_compiling():
                keys = _keys(attention_mask, batch_size, kv_length, kv_offset, int(end), others.get("device", "cpu"))
                # Four axes: a module that counts as causal must not apply a band to full (or cross) attention.
                full = keys is not None and not causal and local_size is None
                return _cacheable(keys[:, None, None] if keys is not None and full else keys)
        elif (
            # transformers' and_masks() makes masks of packed sequences. A window of one key does not show sequences.
            causal and attention_mask is None and q_length == kv_length and local_size != 1
            and getattr(mask_function, "__name__", "") == "and_mask" and not others.get("use_vmap")
        ):  # fmt: skip
            return _cacheable(_packed_ids(mask_function, batch_size, q_length, others.get("device", "cpu")))
    result: Tensor | None = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        # sdpa's is_causal starts at the upper left corner, which is wrong for a cache with tokens.
        allow_is_causal_skip=allow_is_causal_skip and (q_length == kv_length or q_length == 1),
        allow_is_bidirectional_skip=code.names and bool(allow_is_bidirectional_skip),
        **others,
    )
    return _cacheable(result)


def _cacheable(mask: Tensor | None) -> Tensor | None:
    """Returns the mask, marked so that results can be cached on it even if it is an inference tensor."""
    if mask is not None and not torch.compiler.is_compiling() and mask.is_inference():
        never_changes(mask)
    return mask


def _keys(
    padding: Tensor | None, batch: int, kv_length: int, kv_offset: int, end: int, device: torch.device | str
) -> Tensor | None:
    """Returns bool [B, end - kv_offset], false for padding, of the keys before `end`; None if all T keys are tokens.
    padding: transformers' 2-D attention_mask, or None."""
    count = end - kv_offset
    if padding is None:
        return None if count == kv_length else torch.ones(1, 1, dtype=torch.bool, device=device).expand(batch, count)
    padding = masking_utils.prepare_padding_mask(padding, count, kv_offset)[:, kv_offset:end]
    if hidden(padding):
        return padding
    return None if count == kv_length and padding_of(padding).kind == "none" else padding


def _packed_ids(function: Callable[..., Any], batch: int, length: int, device: torch.device | str) -> Tensor:
    """Returns int64 [batch, length], the sequence number of every packed token: a token begins a sequence if the mask
    function hides the token before it."""
    items = torch.arange(batch, device=device)[:, None]
    rows = torch.arange(1, length, device=device)[None]
    starts = ~function(items, 0, rows, rows - 1)  # a token that does not see the one before it
    return torch.nn.functional.pad(starts.expand(batch, -1).long().cumsum(1), (1, 0))


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns (one layer's attention [B, S, N, Dv], None), from query [B, N, S, D], key and value [B, Nkv, T, D].

    The second result is the attention weights, if a sparse model's layer must return them. attention_mask: a result of
    mask(); indices [B, S, K] are the keys that a sparse model's indexer chose; the other arguments are those that
    transformers passes to an attention interface.

    Raises:
        ContractError, BackendError: as fusion_attention.attention().
    """
    if sparse_models.asks_for_weights(module, others):
        assert attention_mask is not None  # transformers' code makes one in every call
        how = {"scaling": scaling, "dropout": dropout}
        return sparse_models.weights(module, query, key, value, attention_mask, indices, **how)
    if others.get("output_attentions"):
        _log.warning_once('fusion_attention returns no attention weights: attn_implementation="eager" does.')
    q = query.transpose(1, 2)
    words: dict[str, Any] = {"scale": scaling}
    if dropout:
        words["keep_prob"] = 1.0 - dropout
    if s_aux is not None:
        words["sink"] = s_aux
    if softcap:
        words["softcap"] = softcap
    if position_bias is not None:
        words["bias"] = position_bias.to(q.dtype)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if isinstance(key, StoredRows):
        if isinstance(value, StoredRows):
            answered = key.layer.attend(q, attention_mask, _band(causal, sliding_window), words)
            if isinstance(answered, Tensor):
                return answered, None
            key, value = answered
        else:  # the model computed the values from those of the cache
            key = key.layer.rows()[0]
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    if indices is not None and attention_mask is not None:
        return _selected(q, k, v, attention_mask, indices, words), None
    if attention_mask is not None and attention_mask.dim() == 4:
        _explicit(attention_mask, q, words)
        return attention(q, k, v, **words), None
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        return _padded(q, k, v, attention_mask, causal, sliding_window, words), None
    words["band"] = _band(causal, sliding_window)
    positions = position_ids if causal else None
    q_len, kv_len = packed_lengths(attention_mask, cu_seq_lens_q, cu_seq_lens_k, positions, q, k)
    if q_len is None or len(q_len) == len(q) == 1:
        return attention(q, k, v, **words), None
    return _packed(q, k, v, q_len, kv_len, words), None


def _band(causal: bool, window: int | None, shift: int | None = None) -> Band | None:
    """Returns the Band (range of visible keys) of a layer whose queries see `window` keys, the diagonal included (None:
    no limit). shift None: the last query has the last key's position; else query 0 has the key position `shift`."""
    if window is None and (shift is None or not causal):
        return _CAUSAL if causal else None
    lo = -INFINITE if window is None else 1 - window
    hi = 1 if causal or window is None else window
    return Band(lo, hi) if shift is None else Band(lo if window is None else lo + shift, hi + shift, "start")


def _packed(q: Tensor, k: Tensor, v: Tensor, q_len: Any, kv_len: Any, words: dict[str, Any]) -> Tensor:
    """Returns attention() [B, S, N, Dv] of packed sequences that fill all batch items; words: its further arguments."""
    flat = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
    out = attention(*flat, layout="TND", q_len=q_len, kv_len=kv_len, **words)
    return out.view(*q.shape[:2], *out.shape[1:])


def _padded(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, causal: bool, window: int | None, words: dict[str, Any]
) -> Tensor:
    """Returns attention [B, S, N, Dv] over the keys that are not padding; keys: bool [B, T], true for tokens. The last
    query has position T - 1; k and v may have unused tokens after T. words: further arguments of attention()."""
    rows, length = q.shape[1], keys.shape[1]
    k, v = k[:, :length], v[:, :length]
    one_sequence = rows == length and (causal or window is not None)  # else keys may belong to another sequence
    if hidden(keys):
        return attention(q, k, v, band=_band(causal, window), blocked=~keys[:, None, None], **words)
    kind, first, end = padding_of(keys)
    if kind == "left":
        # Rows after a sequence's end are padding, which needs no result.
        words["q_len"], words["kv_len"] = end if one_sequence else None, end
        return attention(q, k, v, band=_band(causal, window, length - rows), **words)
    words["band"] = _band(causal, window)
    if kind == "run" and one_sequence and "bias" not in words:
        # Padding, tokens, padding: a batch item becomes up to three packed sequences, without a copy.
        lengths = [n for f, e in zip(first, end, strict=True) for n in (f, e - f, length - e) if n]
        return _packed(q, k, v, lengths, lengths, words)
    if kind != "none":
        words["blocked"] = cached(keys, "blocked", torch.logical_not)[:, None, None]
    return attention(q, k, v, **words)


def _explicit(given: Tensor, q: Tensor, words: dict[str, Any]) -> None:
    """Adds the 4-D mask `given` to attention()'s `words`: floats as bias, bool as blocked, or padding as kv_len."""
    if given.is_floating_point():
        bias = given.to(q.dtype)
        words["bias"] = words["bias"] + bias if "bias" in words else bias
    elif given.dtype == torch.bool and hidden(given):
        words["blocked"] = ~given
    elif given.dtype == torch.bool:
        if given.shape[1] == 1 and (given.shape[2] == 1 or given.stride(2) == 0):
            kind, _, end = cached(given, "padding", lambda t: read_padding(t[:, 0, 0]))
            if kind in ("none", "left"):
                if kind == "left":
                    words["kv_len"] = end
                return
        words["blocked"] = cached(given, "blocked", torch.logical_not)
    else:
        raise TypeError(f"attention_mask: expected bool or floating elements in [B, N, S, T], got {given.dtype}")


def _selected(q: Tensor, k: Tensor, v: Tensor, given: Tensor, indices: Tensor, words: dict[str, Any]) -> Tensor:
    """Returns attention [B, S, N, Dv] over the keys `indices` [B, S, K] that the mask `given` [B, 1, S, T] allows."""
    visible = given[:, 0] if given.dtype == torch.bool else given[:, 0] > torch.finfo(given.dtype).min
    indices = indices.long()
    if not words.keys() <= {"scale", "sink"}:
        chosen = torch.zeros_like(visible).scatter(-1, indices, True)
        return attention(q, k, v, blocked=~(chosen & visible)[:, None], **words)
    # sparse_attention() reads a list up to its first negative entry.
    indices = indices.masked_fill(~visible.gather(-1, indices), -1).sort(-1, descending=True).values
    lists = indices[:, :, None].expand(-1, -1, k.shape[2], -1)
    return sparse_attention(q, k, v, lists, causal=False, **words)
