"""generate() with PagedCache gives the tokens of transformers' caches, and allocates no more pages than needed."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from support.hf_models import BY_NAME, GROUPED, VOCABULARY, Family, in_float64, model_of
from transformers import DynamicCache, EncoderDecoderCache

from fusion_attention.integrations import transformers as integration
from fusion_attention.integrations.transformers_cache import PagedCache, PagedLayer
from fusion_attention.testing.estimated_rounding_errors import compare_with

DECODERS = "Llama", "Gemma 2", "GPT-OSS", "DeepSeek-V3.2", "T5", "Whisper"  # others: test_transformers.py
# Gemma 3 has layers with and without a window; Mistral has one kind of layer; GPT-OSS also has sinks.
WINDOWED = ["Gemma 3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Mistral", "GPT-OSS"))]
LENGTHS = 13, 6, 9


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    integration.register()


def served(name: str) -> Any:
    """A family's model with this library's attention."""
    model = model_of(name)
    model.set_attn_implementation("fusion_attention")
    return model


def prompts(left_padded: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (len(LENGTHS), max(LENGTHS)))
    if not left_padded:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    mask = (torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(model: Any, batch: dict[str, Tensor], cache: Any = None, **options: Any) -> Any:
    options = {"max_new_tokens": 8, "do_sample": False, "past_key_values": cache} | options
    return model.generate(**batch, return_dict_in_generate=True, **options)


def paged(model: Any, **options: Any) -> PagedCache:
    return PagedCache(model.config, **{"page_size": 4} | options)


@contextlib.contextmanager
def exact(model: Any, family: Family) -> Iterator[Any]:
    """The model in float64 with eager attention, to be called with transformers' caches."""
    twin = copy.deepcopy(model).double()
    twin.set_attn_implementation("eager")
    with in_float64(family):
        yield twin


def near(results: Mapping[str, Tensor], model: Any, family: Family, run: Callable[[Any], Tensor]) -> None:
    """Compare logits with those of run() on the float64 model, which uses transformers' cache."""
    with exact(model, family) as twin:
        compare_with("logits", dict(results), lambda: dict.fromkeys(results, run(twin)))


def paged_layers(cache: PagedCache) -> list[PagedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, PagedLayer)]


@pytest.mark.parametrize("name", DECODERS)
def test_paged_cache_generates_the_same_tokens_as_transformers_cache(name: str) -> None:
    model = served(name)
    if model.config.is_encoder_decoder:
        torch.manual_seed(1)
        whisper = {"input_features": torch.randn(3, 8, 24)}
        batch = whisper if name == "Whisper" else {"input_ids": torch.randint(3, VOCABULARY, (3, 13))}
        cache: Any = EncoderDecoderCache(paged(model), paged(model))
        layers = paged_layers(cache.self_attention_cache)
    else:
        batch, cache = prompts(), paged(model)
        layers = paged_layers(cache)
    want = generated(model, batch).sequences
    assert torch.equal(generated(model, batch, cache).sequences, want)
    assert all(layer.get_seq_length() == cache.get_seq_length() >= 8 for layer in layers)
    assert bool(layers) is (name != "DeepSeek-V3.2")  # whose layers are transformers' own


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", [pytest.param("Llama", marks=pytest.mark.slow), *WINDOWED])
@pytest.mark.parametrize("attention", ["fusion_attention", "sdpa", "eager"])
def test_paged_cache_works_with_sdpa_and_eager_attention(name: str, attention: str) -> None:
    model, batch = served(name), prompts()
    if name == "GPT-OSS" and attention == "sdpa":
        attention = "eager"  # sdpa knows no sinks
    model.set_attn_implementation(attention)
    how = {"output_logits": True, "max_new_tokens": 6}  # enough to free a page before the window
    result, want = (generated(model, batch, cache, **how) for cache in (paged(model), None))
    assert torch.equal(result.sequences, want.sequences)
    logits = {"pages": torch.stack(result.logits), "rows": torch.stack(want.logits)}

    near(logits, model, BY_NAME[name], lambda model: torch.stack(generated(model, batch, **how).logits))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["Llama", *WINDOWED])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prefill_chunk_size": 4},
        {"do_sample": True, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_paged_cache_supports_beams_sampling_and_chunked_prefill(name: str, options: dict[str, Any]) -> None:
    model, result = served(name), []
    batch = prompts("prefill_chunk_size" not in options)
    for cache in (None, paged(model)):
        torch.manual_seed(0)
        result.append(generated(model, batch, cache, **options).sequences)
    assert torch.equal(*result)


@pytest.mark.parametrize("name", ["Llama", *WINDOWED])
@pytest.mark.parametrize("kind", ["prompt_lookup_num_tokens", "assistant_model"])
def test_paged_cache_frees_pages_of_rejected_speculative_tokens(name: str, kind: str) -> None:
    model = served(name)
    helper = copy.deepcopy(model)
    with torch.no_grad():  # an assistant that is wrong now and then
        helper.lm_head.weight += 0.3 * torch.randn_like(helper.lm_head.weight)
    batch = {key: t[:1] for key, t in prompts(left_padded=False).items()}
    batch["input_ids"][0, 7:] = batch["input_ids"][0, :6]
    option = {kind: 3 if kind.startswith("prompt") else helper, "max_new_tokens": 12}
    want = generated(model, batch, max_new_tokens=12).sequences
    cache = paged(model)
    assert torch.equal(generated(model, batch, cache, **option).sequences, want)
    used = [
        layer.pool.pages - layer.pool.free_pages for layer in paged_layers(cache) if layer.pool and not layer.is_sliding
    ]
    assert all(pages == -(-cache.get_seq_length() // 4) for pages in used)


@pytest.mark.parametrize("name", ["Llama", *WINDOWED])
def test_paged_cache_continues_generation_in_a_second_turn(name: str) -> None:
    model, batch = served(name), prompts()
    results = []
    for cache in (DynamicCache(config=model.config), paged(model)):
        first = generated(model, batch, cache).sequences
        ids = torch.cat((first, prompts(left_padded=False)["input_ids"][:, :5]), 1)
        mask = torch.cat((batch["attention_mask"], torch.ones(3, ids.shape[1] - 13, dtype=torch.int64)), 1)
        results.append(generated(model, {"input_ids": ids, "attention_mask": mask}, cache).sequences)
    assert torch.equal(*results)


def test_padding_uses_no_pages_and_sliding_layers_keep_only_the_window() -> None:
    model = served("Gemma 3")
    cache = paged(model)
    generated(model, prompts(), cache)
    for layer in paged_layers(cache):
        assert layer.pool is not None
        lengths = [n + 7 for n in LENGTHS]
        if layer.is_sliding:  # of 5 tokens: four before the next one, and the rest of their page
            assert all(4 <= n <= 7 for n in layer.pool.lengths(layer.sequences))
        else:
            assert layer.pool.lengths(layer.sequences) == lengths
    assert {layer.is_sliding for layer in paged_layers(cache)} == {True, False}


def test_long_prompt_stores_only_the_sliding_window() -> None:
    model = served("Mistral")
    cache = paged(model)
    with torch.no_grad():
        model(torch.randint(3, VOCABULARY, (2, 90)), past_key_values=cache)
    for layer in paged_layers(cache):
        assert layer.pool is not None
        assert layer.pool.lengths() == [4, 4]
        assert layer.pool.pages <= 6
    assert cache.get_seq_length() == 90


def test_beams_share_pages() -> None:
    model = served("Llama")
    cache = paged(model, page_size=2)
    batch = {key: t[:1].repeat(1, 4) for key, t in prompts(left_padded=False).items()}
    generated(model, batch, cache, num_beams=4)
    (pool, *_) = (layer.pool for layer in paged_layers(cache))
    assert pool is not None
    assert pool.pages - pool.free_pages < 2 * (52 + 7) // 2  # of four beams of 59 tokens


def test_int8_and_int4_caches_use_less_memory_with_small_logit_errors() -> None:
    model, batch = served("Llama"), prompts()
    caches = [paged(model, stored=stored) for stored in ("", "int8", "int4")]
    full_precision, *narrow = (
        generated(model, batch, cache, max_new_tokens=2, output_logits=True).logits for cache in caches
    )
    assert caches[0].nbytes > caches[1].nbytes > caches[2].nbytes
    assert all(torch.equal(full_precision[0], logits[0]) for logits in narrow)  # the prompt met its own rows
    fine, coarse = ((logits[1] - full_precision[1]).norm() for logits in narrow)
    assert 0 < 4 * fine < coarse  # a step of int4 is 18 of int8


def test_copied_and_reset_caches_generate_the_expected_tokens() -> None:
    model, batch = served("Gemma 3"), prompts()
    cache = paged(model)
    with torch.no_grad():
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        model(**batch, position_ids=positions, past_key_values=cache)
    ids = torch.cat((batch["input_ids"], torch.full((3, 2), 7)), 1)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 2), value=1)
    longer = {"input_ids": ids, "attention_mask": mask}
    want = generated(model, longer).sequences
    for _ in range(2):
        assert torch.equal(generated(model, longer, copy.deepcopy(cache)).sequences, want)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generated(model, longer, cache).sequences, want)


def test_mask_that_hides_cached_tokens_in_a_later_step_is_applied() -> None:
    model, batch = served("Llama"), prompts(left_padded=False)

    def call(model: Any, cache: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            model(**batch, past_key_values=cache)
            mask = torch.nn.functional.pad(batch["attention_mask"], (0, 1), value=1)
            mask[:, 3:6] = 0
            step = {"input_ids": torch.full((3, 1), 9), "attention_mask": mask}
            first = model(**step, past_key_values=cache).logits
            mask = torch.nn.functional.pad(mask, (0, 2), value=1)
            mask[1, -1] = 0  # a new token that is padding
            step = {"input_ids": torch.full((3, 2), 9), "attention_mask": mask}
            return first, model(**step, past_key_values=cache).logits[:, 0]

    results = call(model, paged(model)), call(model, DynamicCache(config=model.config))
    with exact(model, BY_NAME["Llama"]) as twin:
        compare_with("(pages, rows)", results, lambda: (call(twin, DynamicCache(config=model.config)),) * 2)


@pytest.mark.parametrize("change", ["select", "repeat"])
def test_batch_select_and_batch_repeat_match_dynamic_cache(change: str) -> None:
    model, batch = served("Mistral"), prompts()

    def call(model: Any, cache: Any) -> Tensor:
        with torch.no_grad():
            model(**batch, past_key_values=cache)
            order = torch.tensor([2, 0]) if change == "select" else torch.arange(3).repeat_interleave(2)
            if change == "select":
                cache.batch_select_indices(order)
            else:
                cache.batch_repeat_interleave(2)
            mask = torch.nn.functional.pad(batch["attention_mask"][order], (0, 1), value=1)
            ids = torch.arange(len(order))[:, None] + 5
            logits: Tensor = model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits
            return logits

    results = call(model, paged(model)), call(model, DynamicCache(config=model.config))
    with exact(model, BY_NAME["Mistral"]) as twin:
        compare_with("(pages, rows)", results, lambda: (call(twin, DynamicCache(config=model.config)),) * 2)


def test_paged_cache_refuses_gradients_batch_changes_and_invalid_crops() -> None:
    model, batch = served("Mistral"), prompts(left_padded=False)
    cache = paged(model)
    with pytest.raises(ValueError, match="expected no gradient, got one"):
        model(**batch, past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        model(**batch, past_key_values=cache)
        with pytest.raises(ValueError, match="expected a batch of 3, got 1"):
            model(batch["input_ids"][:1], past_key_values=cache)
    with pytest.raises(ValueError, match="crop: expected 0 or minus the tokens to remove, got 3"):
        cache.crop(3)
    with pytest.raises(RuntimeError, match="the sliding window has freed tokens"):
        cache.crop(-1)
    assert all(layer.pool.lengths() == [4] * 3 for layer in paged_layers(cache) if layer.pool)


def in_parts(model: Any, cache: Any, ids: Tensor, mask: Tensor, first: int) -> Tensor:
    """Logits of the tokens after the first `first` ones, one forward call per token."""
    with torch.no_grad():
        model(ids[:, :first], attention_mask=mask[:, :first], past_key_values=cache)
        parts = [
            model(ids[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=cache).logits
            for n in range(first, ids.shape[1])
        ]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", WINDOWED)
def test_sliding_window_counts_padding_between_turns(name: str) -> None:
    model, ids = served(name), torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 6:9] = 0  # a first turn that ended earlier
    parts_are_near(model, BY_NAME[name], ids, mask, 9)


def parts_are_near(model: Any, family: Family, ids: Tensor, mask: Tensor, first: int) -> None:
    """Compare logits of single tokens, from PagedCache and from DynamicCache, with float64."""
    caches = {"pages": PagedCache(model.config), "rows": DynamicCache()}
    logits = {name: in_parts(model, cache, ids, mask, first) for name, cache in caches.items()}
    near(logits, model, family, lambda model: in_parts(model, DynamicCache(), ids, mask, first))


def test_values_changed_by_the_model_after_caching_are_used() -> None:
    family = Family("DiffLlama", "diffllama.DiffLlamaForCausalLM", "DiffLlamaConfig", GROUPED | {"hidden_size": 64})
    model = family.make()
    model.set_attn_implementation("fusion_attention")
    ids = torch.randint(3, VOCABULARY, (2, 10))
    parts_are_near(model, family, ids, torch.ones_like(ids), 8)


def test_generate_with_paged_cache_runs_under_autocast() -> None:
    model = served("Llama")
    with torch.autocast("cpu", torch.bfloat16):
        out = model.generate(**prompts(), max_new_tokens=2, eos_token_id=None, past_key_values=PagedCache(model.config))
    assert out.shape == (3, 15)
