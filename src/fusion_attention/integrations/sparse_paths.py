"""Describes how this library computes each layer of a transformers model, from the model's configuration alone."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import transformers

from fusion_attention.integrations import sparse_models
from fusion_attention.integrations import transformers as integration
from fusion_attention.integrations.sparse_latent import dense_positions

__all__ = ["Paths", "configuration", "paths"]

LINEAR = "transformers' own code: linear attention"
WEIGHTS = "output_attentions, masks of four dimensions and attention_dropout in training: transformers' own code"
COMPRESSED = "padding on the left, padding beside a cache, and positions with gaps: transformers' own code"


class Paths(NamedTuple):
    """A description of how this library computes a model's layers."""

    model: str  # name of the configuration's class
    layers: list[str]  # a description of each layer's computation, in order
    notes: list[str]  # descriptions of calls that are computed otherwise
    problems: list[str]  # the reasons why this library does not compute the model


def configuration(source: str) -> Any:
    """Returns the configuration of a model.

    Args:
        source: a directory with config.json, the path of such a file, a model type ("deepseek_v32"), or a name for
            AutoConfig.from_pretrained().

    Raises:
        ValueError, OSError: transformers cannot read it.
    """
    path = Path(source)
    if path.is_file():
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or "model_type" not in values:
            raise ValueError(f"{source}: expected a configuration with a model_type")
        return transformers.AutoConfig.for_model(**values)
    if not path.exists() and source in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(source)
    return transformers.AutoConfig.from_pretrained(source)


def paths(config: Any) -> Paths:
    """Returns a description of how attn_implementation="fusion_attention" computes every layer of a model; config: the
    model's configuration.

    Example:
        >>> paths(configuration("deepseek_v32")).layers[0].partition("; ")[0]
        'keys of an indexer: 2048 of T latents a row'
    """
    config = config.get_text_config(decoder=True)
    name = type(config).__name__
    family = sparse_models.family_of(config)
    if family is None:
        return _of_others(config, name)
    try:
        sparse_models.check(config)
    except ValueError as error:
        return Paths(name, [], [], [str(error)])
    describe: dict[str, Callable[[Any], list[str]]] = {
        "DeepSeek-V3.2": _latent, "GLM-5": _latent, "DeepSeek-V4": _compressed, "Qwen4": _blocks
    }  # fmt: skip
    notes = [WEIGHTS] + [COMPRESSED] * (family.name == "DeepSeek-V4")
    return Paths(name, describe[family.name](config), notes, [])


def _latent(config: Any) -> list[str]:
    """Returns a text for each layer of a configuration of DeepSeek-V3.2 or GLM-5: the keys that its queries read."""
    top_k = config.index_topk
    chosen = f"{top_k} of T latents a row; rows before position {top_k} read all keys, dense"
    if (end := dense_positions(config)) > top_k:
        chosen += f"; rows before position {end} read {top_k} keys, dense with a mask"
    kinds = getattr(config, "indexer_types", ["full"] * config.num_hidden_layers)
    layers, last = [], 0
    for i, kind in enumerate(kinds):
        last = i if kind == "full" else last
        layers.append(
            f"keys of an indexer: {chosen}" if kind == "full" else f"keys of layer {last}'s indexer: {chosen}"
        )
    return layers


def _compressed(config: Any) -> list[str]:
    """Returns a text for each layer of a configuration of DeepSeek-V4: the keys that its queries read."""
    window = f"a window of {config.sliding_window} keys"
    layers = []
    for kind in config.layer_types:
        if kind == "sliding_attention":
            layers.append(window)
            continue
        ratio = config.compress_rates[kind]
        chosen = f"{config.index_topk} of" if kind == "compressed_sparse_attention" else "all"
        layers.append(f"{window} beside {chosen} T / {ratio} compressed keys")
    return layers


def _blocks(config: Any) -> list[str]:
    """Returns a text for each layer of a configuration of Qwen4: the blocks of keys that its queries read."""
    if "indexed_attention" not in config.layer_types:
        return [LINEAR] * len(config.layer_types)
    ratio = config.indexer_compress_ratio
    chosen = f"blocks of an indexer: {config.indexer_budget // ratio} of T / {ratio}, of {ratio} keys each"
    return [LINEAR if kind == "linear_attention" else chosen for kind in config.layer_types]


def _of_others(config: Any, name: str) -> Paths:
    """Returns a description of each layer's attention, for a model without an indexer, read from its modeling code."""
    place = type(config).__module__
    try:
        importlib.import_module(place.replace("configuration_", "modeling_"))
    except ImportError as error:
        return Paths(name, [], [], [f"{name}: the code of the model cannot be loaded ({error})"])
    code = integration._code_of(place)
    if not code.uses_interface:
        return Paths(name, [], [], [f'{name}: attention in code of its own: attn_implementation="eager" computes it'])
    count = getattr(config, "num_hidden_layers", 1)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "layer_types", None) is None and getattr(config, "use_sliding_window", True):
        kinds = ["sliding_attention"] * count
    words = {
        "full_attention": "all keys: attention()",
        "sliding_attention": f"a window of {window} keys: attention()",
        "linear_attention": LINEAR,
    }
    layers = [words.get(kind, f"{kind}: attention() with a mask of S x T") for kind in kinds]
    if not code.describes:
        layers = [layer + " with a mask of S x T" if layer.endswith("attention()") else layer for layer in layers]
    return Paths(name, layers, ["output_attentions returns None; masks of four dimensions are read as they are"], [])
