"""Times our functions through the APIs of transformers, flash-attn and FlexAttention.

A model's peer is the same model with the same weights on torch's SDPA. "attention" rows repeat a layer's call of its
the tensors, the mask and the words that the layer hands over.
"""

import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fusion_attention as fa
from benchmarks.backward_only import gradient
from benchmarks.dense import DTYPES, PEAKS, arithmetic, compiled_flex, rows, triangle
from fusion_attention.bench.pair import Pair

Tensor = torch.Tensor
OURS = "fusion_attention"
BF16 = torch.bfloat16
STEPS = dict(lr=1e-5, fused=True)


def transformers() -> Any:
    """Registers our attention function with transformers and returns the module."""
    import transformers as module

    from fusion_attention.integrations.transformers import register

    register()
    return module


def models(kind: str, config: Any, dtype: torch.dtype) -> list[Any]:
    """Returns one model twice with the same weights: with our attention and with SDPA."""
    results = []
    for attention in (OURS, "sdpa"):
        torch.manual_seed(0)
        copied_config = copy.deepcopy(config)  # a model writes the name of its attention to its configuration
        model = getattr(transformers(), kind)._from_config(copied_config, attn_implementation=attention, dtype=dtype)
        results.append(model.eval())
    assert [model.config._attn_implementation for model in results] == [OURS, "sdpa"]
    return results


def linear(model: Any, tokens: int) -> int:
    """Returns the floating-point operations of a model's linear layers for `tokens` tokens."""
    return sum(2 * tokens * m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def encoders(quick: bool) -> Iterator[Pair]:
    """Times BERT on texts of mixed lengths: one packed row for us; padded to the longest with a mask for SDPA."""
    small = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512) if quick else {}
    config = transformers().BertConfig(**small)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(12, 257, (8 if quick else 32,), generator=generator).tolist()
    texts = [torch.randint(1000, config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    collate = transformers().DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    packed = collate([{"input_ids": text} for text in texts])
    del packed["labels"]
    real, longest = sum(lengths), max(lengths)
    padded = {
        "input_ids": torch.tensor([text + [0] * (longest - len(text)) for text in texts]),
        "attention_mask": (torch.arange(longest) < torch.tensor(lengths)[:, None]).long(),
    }
    padding_ratio = len(texts) * longest / real
    for label in ("bf16", "fp32"):
        ours, theirs = models("BertModel", config, DTYPES[label])
        calls = [torch.no_grad()(functools.partial(m, **given)) for m, given in ((ours, packed), (theirs, padded))]
        name = f"BERT {label}, {len(texts)} texts, {real} of {len(texts) * longest} tokens"
        flops = linear(ours, real) + sum(4 * n * n * config.hidden_size for n in lengths) * config.num_hidden_layers
        goal = max(1.5, 0.95 * padding_ratio)
        yield Pair("integrations", name, "padded, sdpa", *calls, flops, PEAKS[label], goal=goal)


def training(quick: bool) -> Iterator[Pair]:
    """Times a training step of a small Llama, and its attention alone."""
    size, width = (256, 256) if quick else (2048, 1024)
    config = transformers().LlamaConfig(
        hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=4, num_attention_heads=width // 64,
        num_key_value_heads=width // 256, max_position_embeddings=size,
    )  # fmt: skip
    pair = models("LlamaForCausalLM", config, BF16)
    ids = torch.randint(config.vocab_size, (1, size), generator=torch.Generator().manual_seed(0))
    calls = [a_layers_call(model.eval(), ids) for model in pair]
    flops = 7 * 2 * width * triangle(size)  # two products forward, five backward
    name = f"Llama bf16 S{size}, attention fwd + bwd"
    yield Pair("integrations", name, "sdpa", *(c.forward_backward for c in calls), flops, "bfloat16", goal=1.7)
    steps = [functools.partial(step, m.train(), torch.optim.AdamW(m.parameters(), **STEPS), ids) for m in pair]
    flops = 3 * linear(pair[0], size) + config.num_hidden_layers * flops
    yield Pair("integrations", f"Llama bf16 S{size}, training step", "sdpa", *steps, flops, "bfloat16", goal=1.0)


def step(model: Any, optimizer: Any, ids: Tensor) -> None:
    """Runs forward, backward and the optimizer."""
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def windows(quick: bool) -> Iterator[Pair]:
    """Times a layer with a sliding window of Gemma 3 1B, for which SDPA needs a mask."""
    size, window = (512, 128) if quick else (8192, 512)
    config = transformers().Gemma3TextConfig(
        vocab_size=256, hidden_size=1152, intermediate_size=1152, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=window, layer_types=["sliding_attention"],
    )  # fmt: skip
    ids = torch.randint(256, (1, size), generator=torch.Generator().manual_seed(0))
    calls = [a_layers_call(model, ids) for model in models("Gemma3ForCausalLM", config, BF16)]
    flops = arithmetic(calls[0].q, window * size - triangle(window - 1), 2)
    name = f"Gemma 3 bf16 S{size}, attention, window {window}"
    yield Pair("integrations", name, "sdpa + mask", *(c.forward for c in calls), flops, "bfloat16", goal=5.0)


@dataclass(frozen=True)
class LayerCall:
    """The arguments that the first layer of a model passes to its attention function."""

    function: Callable[..., tuple[Tensor, Any]]
    module: Any
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    words: dict[str, Any]

    def run(self) -> Tensor:
        """Repeats the layer's call."""
        return self.function(self.module, self.q, self.k, self.v, self.mask, **self.words)[0]

    def forward(self) -> Tensor:
        """Repeats the layer's call without gradients."""
        with torch.no_grad():
            return self.run()

    def forward_backward(self) -> tuple[Tensor, ...]:
        """Repeats the layer's call and computes the gradients of q, k and v."""
        out = self.run()
        return torch.autograd.grad(out, (self.q, self.k, self.v), torch.ones_like(out))


def a_layers_call(model: Any, ids: Tensor) -> LayerCall:
    """Runs a model and returns the attention call of its first layer; q, k and v get the same memory layout."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config._attn_implementation
    function, result = ALL_ATTENTION_FUNCTIONS[name], []

    def record(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **words: Any) -> tuple[Tensor, Any]:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        result.append(LayerCall(function, module, q, k, v, mask, words))
        return function(module, q, k, v, mask, **words)

    with torch.no_grad(), mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, {name: record}):
        model(input_ids=ids, use_cache=False)
    return result[0]


def flash(quick: bool) -> Iterator[Pair]:
    """Times the backward of flash_attn_varlen_func beside that of fa.attention: the same computation."""
    from fusion_attention.integrations.flash_attn import flash_attn_varlen_func

    lengths = documents(1024 if quick else 8192)
    q, k, v = (torch.randn(sum(lengths), 8, 128, dtype=BF16, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    ways = (
        functools.partial(flash_attn_varlen_func, q, k, v, ends, ends, longest, longest, causal=True),
        functools.partial(fa.attention, q, k, v, layout="TND", q_len=lengths, band=fa.Band.causal()),
    )
    calls = [gradient(way, (q, k, v)) for way in ways]
    flops, name = 8 * 128 * 10 * sum(map(triangle, lengths)), f"flash varlen backward, {sum(lengths)} tokens"
    yield Pair("integrations", name, "fa.attention", *calls, flops, "bfloat16", goal=1.0)


def documents(tokens: int) -> list[int]:
    """Returns random lengths of documents that fill a row."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.exp(torch.randn(tokens, generator=generator) + 5).int() + 8).tolist()
    count = next(i for i in range(tokens) if sum(lengths[: i + 1]) >= tokens)
    return [*lengths[:count], tokens - sum(lengths[:count])]


def flex(quick: bool) -> Iterator[Pair]:
    """Times causal documents in one row beside compiled FlexAttention with a block mask, which has no CPU backward."""
    from torch.nn.attention.flex_attention import create_block_mask

    from fusion_attention.integrations.flex_attention import flex_attention

    size = 1024 if quick else 8192
    lengths = documents(size)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j)

    mask = create_block_mask(is_visible, None, None, size, size, device="cpu")
    q, k, v = rows(BF16, (8, 8), size, 128)
    ours = torch.no_grad()(functools.partial(flex_attention, q, k, v, block_mask=mask))
    theirs = torch.no_grad()(functools.partial(compiled_flex(), q, k, v, block_mask=mask))
    pairs, name = sum(map(triangle, lengths)), f"flex S{size}, {len(lengths)} documents"
    flops = arithmetic(q, pairs, 2)
    yield Pair("integrations", name, "FlexAttention", ours, theirs, flops, "bfloat16", goal=3.0)
    q, k, v = rows(BF16, (8, 8), size, 128, grad=True)
    full = is_visible(torch.tensor(0), torch.tensor(0), torch.arange(size)[:, None], torch.arange(size))
    ways = functools.partial(flex_attention, q, k, v, block_mask=mask), functools.partial(sdpa, q, k, v, full)
    calls = [gradient(way, (q, k, v)) for way in ways]
    yield Pair("integrations", f"{name}, backward", "SDPA + mask", *calls, arithmetic(q, pairs, 5), "bfloat16")


def registered_us() -> float:
    """Returns the microseconds that the registered function adds to fa.attention."""
    config = transformers().LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8
    )
    (model, _) = models("LlamaForCausalLM", config, torch.float32)
    call = a_layers_call(model, torch.arange(16)[None])
    words: dict[str, Any] = dict(layout="BNSD", scale=call.words["scaling"], band=fa.Band.causal())
    direct = torch.no_grad()(functools.partial(fa.attention, call.q, call.k, call.v, **words))
    differences = []
    for _ in range(400):
        taken = []
        for function in (call.forward, lambda: direct().transpose(1, 2)):
            start = time.perf_counter()
            for _ in range(5):
                function()
            taken.append((time.perf_counter() - start) / 5)
        differences.append(taken[0] - taken[1])
    return statistics.median(differences) * 1e6
