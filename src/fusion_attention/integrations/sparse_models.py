"""Families of transformers' models with sparse attention: their releases, functions and patches."""

import functools
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from transformers.utils import logging

from fusion_attention.integrations import sparse_blocks, sparse_compressed, sparse_latent
from fusion_attention.integrations.sparse_sequences import expressible, matrix
from fusion_attention.patches import Changes, Layer

Tensor = torch.Tensor
_log = logging.get_logger(__name__)


class Family(NamedTuple):
    """A family of transformers' models with sparse attention: class names, releases, and functions for its layers."""

    name: str  # the name in error texts
    config: str  # name of the configuration's class
    layer: str  # name of the attention layer's class
    releases: tuple[str, ...]  # of transformers, whose layer code the patch can replace
    # Replaces the layer's forward; takes the family's modeling module and `options` before its arguments.
    forward: Callable[..., Any]
    faults: Callable[[Any], list[str]]  # takes a configuration, returns its contradictions, one sentence each
    # Takes a layer and the arguments of its forward, returns the reason why `forward` cannot compute the call, or "".
    reason_against: Callable[[Any, dict[str, Any]], str]
    options: tuple[Any, ...] = ()  # further arguments of `forward`
    bias: bool = False  # transformers' code of the layer needs float masks, which it adds to scores
    stages: bool = True  # the indexer can be trained
    traced: bool = True  # torch.compile may trace the function; other functions run outside the graph


def _latent_faults(config: Any) -> list[str]:
    """Returns a sentence for each contradiction in a configuration of DeepSeek-V3.2 or GLM-5."""
    kinds = getattr(config, "indexer_types", ["full"] * config.num_hidden_layers)
    rules = {
        f"index_topk: expected at least 1, got {config.index_topk}": config.index_topk >= 1,
        f"index_head_dim: expected at least qk_rope_head_dim ({config.qk_rope_head_dim}), got {config.index_head_dim}":
            config.index_head_dim >= config.qk_rope_head_dim,
        f"num_key_value_heads: expected num_attention_heads ({config.num_attention_heads}), got "
        f"{config.num_key_value_heads}": config.num_key_value_heads == config.num_attention_heads,
        f"layer_types: expected indexed_attention in {config.num_hidden_layers} layers, got {config.layer_types}":
            list(config.layer_types) == ["indexed_attention"] * config.num_hidden_layers,
        f"indexer_types: expected 'full' or 'shared' for {config.num_hidden_layers} layers, first 'full', got {kinds}":
            len(kinds) == config.num_hidden_layers and {*kinds} <= {"full", "shared"} and kinds[0] == "full",
    }  # fmt: skip
    return [text for text, holds in rules.items() if not holds]


def _latent_reason(layer: Any, given: dict[str, Any]) -> str:
    """Returns the reason why this library cannot compute a call of a DeepSeek-V3.2, GLM-5 or Qwen4 layer, or ""."""
    if not expressible(given["attention_mask"], given["hidden_states"].shape[1]):
        return "a four-dimensional attention_mask may hide any key"
    return ""


def _compressed_faults(config: Any) -> list[str]:
    """Returns a sentence for each contradiction in a configuration of DeepSeek-V4."""
    rates = {kind: config.compress_rates.get(kind, 0) for kind in {*config.layer_types} - {"sliding_attention"}}
    rules = {
        f"index_topk: expected at least 1, got {config.index_topk}": config.index_topk >= 1,
        f"sliding_window: expected at least 1, got {config.sliding_window}": config.sliding_window >= 1,
        f"num_key_value_heads: expected 1, got {config.num_key_value_heads}": config.num_key_value_heads == 1,
        f"compress_rates: expected at least 1 for every kind of layer, got {rates}":
            all(rate >= 1 for rate in rates.values()),
        f"index_head_dim: expected at least the {config.qk_rope_head_dim} elements that rotate, got "
        f"{config.index_head_dim}": config.index_head_dim >= config.qk_rope_head_dim,
    }  # fmt: skip
    return [text for text, holds in rules.items() if not holds]


def _block_faults(config: Any) -> list[str]:
    """Returns a sentence for each invalid setting of a Qwen4 configuration that transformers does not reject, or []."""
    if "indexed_attention" in config.layer_types and config.indexer_budget is None:
        return ["indexer_budget: expected a number for layers of indexed_attention, got None"]
    return []


_BOTH = ("5.22", "5.23")
FAMILIES = {
    "deepseek_v32": Family(
        "DeepSeek-V3.2", "DeepseekV32Config", "DeepseekV32Attention", _BOTH,
        sparse_latent.forward, _latent_faults, _latent_reason, options=("apply_rotary_pos_emb", False),
    ),
    "glm_moe_dsa": Family(
        "GLM-5", "GlmMoeDsaConfig", "GlmMoeDsaAttention", _BOTH,
        sparse_latent.forward, _latent_faults, _latent_reason, options=("apply_rotary_pos_emb_interleave", True),
    ),
    "deepseek_v4": Family(
        "DeepSeek-V4", "DeepseekV4Config", "DeepseekV4Attention", _BOTH,
        sparse_compressed.forward, _compressed_faults, sparse_compressed.reason_against, bias=True, traced=False,
    ),
    "qwen4_exp": Family(
        "Qwen4", "Qwen4ExpTextConfig", "Qwen4ExpTextAttention", ("5.23",),
        sparse_blocks.forward, _block_faults, _latent_reason, stages=False, traced=False,
    ),
}  # fmt: skip


def family_of(config: Any) -> Family | None:
    """Returns the Family whose configuration class, as transformers defines it, `config` has; None for others."""
    kind = type(config).__module__.removeprefix("transformers.models.").partition(".")[0]
    family = FAMILIES.get(kind)
    return family if family is not None and family.config == type(config).__name__ else None


def check(config: Any) -> None:
    """Checks the configuration of a model with sparse attention; other models pass.

    Raises:
        ValueError: the family does not support the installed release of transformers, or the configuration contradicts
            itself.
    """
    family = family_of(config)
    if family is None:
        return
    name = type(config).__name__
    if not served(family):
        raise ValueError(
            f"{name}: fusion_attention serves {family.name} in transformers {' and '.join(family.releases)}, got "
            f'{transformers.__version__}: use attn_implementation="eager" or install one of these releases'
        )
    if faults := family.faults(config):
        raise ValueError(f"{name}: {'; '.join(faults)} (correct the configuration)")


def served(family: Family) -> bool:
    """True if the installed release of transformers is one that the integration of a model family supports."""
    return ".".join(re.findall(r"\d+", transformers.__version__)[:2]) in family.releases


def patch(changes: Changes, serves: Callable[[Any], bool]) -> None:
    """Patches transformers' layers of all models with sparse attention, now or when their module is imported; serves:
    takes a configuration, True if its attention is this library's. changes: records the patches."""
    for kind, family in FAMILIES.items():
        if served(family):
            change = functools.partial(_patch, changes, family, serves)
            changes.when_loaded(f"transformers.models.{kind}.modeling_{kind}", change)


def _patch(changes: Changes, family: Family, serves: Callable[[Any], bool], module: ModuleType) -> None:
    """Replaces forward() of a family's layer class in its modeling module; `changes` records the patch. serves: takes a
    configuration, returns True if its attention implementation is this library's."""
    owner, compute = getattr(module, family.layer), functools.partial(family.forward, module, *family.options)
    if family.stages:
        changes.set(owner, "stage", None)  # fusion_attention.nn.set_stage() sets it on a layer
    if family.bias:
        changes.set(owner, "indexer", property(sparse_compressed.indexer_of))
    changes.wrap(owner, "forward", lambda layer: _forward(layer, family, compute, serves))


def _forward(
    layer: Layer, family: Family, compute: Callable[..., Any], serves: Callable[[Any], bool]
) -> Callable[..., Any]:
    """Returns a forward for a family's layer class that calls compute(layer, **arguments), or transformers' own forward
    (layer.below) for models (serves(config) is False) and calls that this library does not compute."""
    original = layer.below
    names = original.__code__.co_varnames[1 : original.__code__.co_argcount]

    def serve(self: Any, given: dict[str, Any]) -> Any:
        if reason := _reason_against(family, self, given):
            if not torch.compiler.is_compiling():
                _log.warning_once(f"fusion_attention: {reason}: the layers are computed by transformers' own code")
            return layer.below(self, **{**given, "attention_mask": _matrix(family, self, given)})
        return compute(self, **given)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **given: Any) -> Any:
        if not serves(self.config):
            return layer.below(self, *args, **given)
        given = {**dict(zip(names, args, strict=False)), **given}
        if not family.traced and torch.compiler.is_compiling():
            from fusion_attention.torch_ops import trace_constants

            return trace_constants.outside(serve, self, given)
        return serve(self, given)

    return forward


def _reason_against(family: Family, layer: Any, given: dict[str, Any]) -> str:
    """Returns the reason why this library cannot compute a call of `layer` over chosen keys, or ""."""
    if asks_for_weights(layer, given):
        return "output_attentions asks for all weights"
    if layer.training and layer.attention_dropout:
        return "attention_dropout is not computed over chosen keys"
    return family.reason_against(layer, given)


def _matrix(family: Family, layer: Any, given: dict[str, Any]) -> Tensor:
    """Returns the mask of a call as transformers' code of the layer reads it: [B, 1, S, T], bool or float."""
    rows_in, cache, mask = given["hidden_states"], given.get("past_key_values"), given["attention_mask"]
    rows = rows_in.shape[1]
    keys = rows if cache is None else cache.get_mask_sizes(rows, layer.layer_idx)[0]
    ends = {name: given.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    window = layer.sliding_window if family.bias else None
    visible = matrix(mask, rows_in, keys, given.get("position_ids"), window=window, **ends)
    if not family.bias or visible.dtype != torch.bool:
        return visible
    return _added(visible, rows_in.dtype)


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a bool mask as a float mask that is added to scores: 0 for visible keys, else the dtype's minimum."""
    least = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, least)


def asks_for_weights(layer: Any, given: dict[str, Any]) -> bool:
    """True if a call of a layer of a sparse family must return attention weights (output_attentions)."""
    config = getattr(layer, "config", None)
    wanted = given.get("output_attentions") or getattr(config, "output_attentions", False)
    return bool(wanted) and family_of(config) is not None


def weights(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, indices: Tensor | None, **how: Any
) -> tuple[Tensor, Tensor]:
    """Computes a layer's attention by transformers' eager code; returns (out, attention weights [B, N, S, T]). mask:
    [B, 1, S, T], bool or float. indices: chosen keys [B, S, K], or None. how: scaling and dropout."""
    if mask.dtype == torch.bool:
        mask = _added(mask, q.dtype)
    if indices is not None:
        others = torch.ones_like(mask[:, 0], dtype=torch.bool).scatter(-1, indices.long(), False)
        mask = mask.masked_fill(others[:, None], torch.finfo(q.dtype).min)
    code = sys.modules[type(module).__module__]
    result: tuple[Tensor, Tensor] = code.eager_attention_forward(module, q, k, v, mask, **how)
    return result
