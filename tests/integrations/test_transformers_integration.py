"""The transformers integration: registration, custom masks, errors, caches in chunks, and training options."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_attention import BackendError, ContractError, ContractWarning

transformers = pytest.importorskip("transformers")

# ruff: noqa: E402  (both need transformers)
from support.hf_models import BY_NAME, NOT_SERVED, PAGE, SIZES, page_with, table

from fusion_attention.integrations import transformers as integration

NAME = "fusion_attention"


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    integration.register()


def model_with(name: str, implementation: str = NAME) -> Any:
    model = BY_NAME[name].make()
    model.set_attn_implementation(implementation)
    return model


def both(name: str, **given: Any) -> tuple[Tensor, Tensor]:
    """(logits with this library's attention, logits with eager attention)."""
    with torch.no_grad():
        return model_with(name)(**given).logits, model_with(name, "eager")(**given).logits


def near(ours: Tensor, theirs: Tensor) -> bool:
    """True if the largest difference is float32 rounding; test_transformers.py has the exact error bound."""
    return bool((ours - theirs).abs().max() <= 1e-4 * theirs.abs().max())


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------------------- registering


def test_register_twice_leaves_the_interfaces_unchanged() -> None:
    mapping = transformers.AttentionInterface._global_mapping
    before = dict(mapping)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.register()
    assert dict(mapping) == before


def test_register_warns_once_for_an_untested_transformers_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "6.1.0.dev0")
    with pytest.warns(ContractWarning, match=r"transformers 6\.1\.0\.dev0 was not tested .* 5\.\d+ to 5\.\d+ were"):
        integration.register("another name")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.register("another name")  # one warning
    del transformers.AttentionInterface._global_mapping["another name"]
    del transformers.masking_utils.AttentionMaskInterface._global_mapping["another name"]


def test_installed_transformers_release_is_within_the_tested_range() -> None:
    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    first, last = (tuple(map(int, bound.split("."))) for bound in integration.TESTED)
    assert first <= release <= last


def test_docs_page_lists_the_tested_models() -> None:
    message = "run python tests/support/hf_models.py"
    assert PAGE.read_text(encoding="utf-8") == page_with(table()), message


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(("folder", "prefix"), [("bloom", "Bloom"), ("mpt", "Mpt")])
def test_refuses_models_without_attention_interface(folder: str, prefix: str) -> None:
    assert prefix.lower() in {name.lower() for name in NOT_SERVED}
    config = getattr(transformers, f"{prefix}Config")(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    model = getattr(transformers, f"{prefix}ForCausalLM")._from_config(config, attn_implementation=NAME)
    with pytest.raises(ValueError, match=f'{prefix}Config: this model computes .* attn_implementation="eager"'):
        model(tokens(1, 5))
    model.config._attn_implementation = "eager"
    assert model(tokens(1, 5)).logits.isfinite().all()


def test_refuses_float64_meta_device_masks_and_integer_masks() -> None:
    model = model_with("Llama")
    with pytest.raises(BackendError, match="not float64"):
        model.double()(tokens(1, 5))
    model.float()
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool, device="meta")
    with pytest.raises((ContractError, BackendError), match="meta"):
        model(tokens(1, 5), attention_mask=mask)
    with pytest.raises(TypeError, match="attention_mask: expected bool or floating"):
        model(tokens(1, 5), attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.long))


def test_model_on_meta_device_returns_output_shapes() -> None:
    model = model_with("Llama").to("meta")
    assert model(tokens(2, 5).to("meta")).logits.shape == (2, 5, SIZES["vocab_size"])


def test_output_attentions_returns_no_weights() -> None:
    result = model_with("Llama")(tokens(1, 5), output_attentions=True)
    assert all(weights is None for weights in result.attentions or ())


# ------------------------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("kind", ["bool", "float", "heads", "keys"])
def test_custom_four_dimensional_masks_match_eager(kind: str) -> None:
    torch.manual_seed(0)
    visible = torch.rand(2, 1, 9, 9) < 0.6
    visible |= torch.eye(9, dtype=torch.bool)
    if kind == "keys":
        visible = visible[:, :, :1]
    if kind == "heads":
        visible = torch.stack([visible[:, 0], visible[:, 0] | (torch.rand(9, 9) < 0.5)], 1).repeat(1, 2, 1, 1)
    added = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    with torch.no_grad():
        theirs = model_with("Mistral", "eager")(tokens(2, 9), attention_mask=added).logits
        ours = model_with("Mistral")(tokens(2, 9), attention_mask=added if kind == "float" else visible).logits
    assert near(ours, theirs)


def test_fully_masked_row_has_finite_logits_and_gradients() -> None:
    visible = torch.ones(1, 1, 6, 6).tril().bool()
    visible[:, :, 3] = False
    for mask in (visible, torch.zeros(1, 1, 6, 6).masked_fill(~visible, -torch.inf)):
        model = model_with("Llama")
        logits = model(tokens(1, 6), attention_mask=mask).logits
        logits.sum().backward()
        assert logits.isfinite().all()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_fully_padded_sequences_and_padding_gaps_match_eager() -> None:
    ids, padding = tokens(3, 8), torch.ones(3, 8, dtype=torch.long)
    padding[1] = 0
    padding[2, 3] = 0
    for name in ("Llama", "Mistral", "BERT"):
        model = model_with(name)
        ours, theirs = (
            model(ids, attention_mask=padding).logits,
            model_with(name, "eager")(ids, attention_mask=padding).logits,
        )
        assert ours.isfinite().all()
        ours.sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        keep = padding.bool()
        keep[2, 3] = False
        assert near(ours[keep], theirs[keep])


def test_custom_and_or_mask_functions_match_eager() -> None:
    """A visible prefix or a hidden token cannot be expressed by a module's arguments, so the mask is a matrix."""

    def make(model: Any, union: bool, packed: bool) -> Any:
        positions = torch.arange(9)[None] % (4 if packed else 9)
        return transformers.masking_utils.create_causal_mask(
            config=model.config,
            inputs_embeds=torch.zeros(2, 9, 1),
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
            or_mask_function=(lambda b, h, q, k: k < 3) if union else None,
            and_mask_function=None if union else (lambda b, h, q, k: k != 2),
        )

    for union in (True, False):
        for packed in (True, False):
            ours, theirs = model_with("Llama"), model_with("Llama", "eager")
            with torch.no_grad():
                mine = ours(tokens(2, 9), attention_mask=make(ours, union, packed), use_cache=False).logits
                other = theirs(tokens(2, 9), attention_mask=make(theirs, union, packed), use_cache=False).logits
            assert near(mine, other)


def test_bidirectional_sliding_window_becomes_an_explicit_mask_matrix() -> None:
    """The module's window is one key less on each side than this mask, so the mask is returned as a matrix."""
    config = model_with("Mistral").config
    result = transformers.masking_utils.create_bidirectional_sliding_window_mask(config, torch.zeros(1, 9, 1), None)
    apart = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    assert torch.equal(result, (apart <= config.sliding_window)[None, None])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_changes_in_place_is_read_again(mode: Any) -> None:
    model, eager = model_with("Llama"), model_with("Llama", "eager")
    with mode():
        padding = torch.ones(1, 1, 1, 7, dtype=torch.bool)
        for at in (6, 0, 3):
            padding[..., at] = False
            mine = model(tokens(1, 7), attention_mask=padding).logits
            other = eager(tokens(1, 7), attention_mask=torch.zeros(1, 1, 1, 7).masked_fill(~padding, -torch.inf)).logits
            assert near(mine, other)
        inside = torch.ones(1, 7, dtype=torch.long)
        inside[0, 5:] = 0
        assert near(
            model(tokens(1, 7), attention_mask=inside).logits[:, :5],
            eager(tokens(1, 7), attention_mask=inside).logits[:, :5],
        )


# ------------------------------------------------------------------------------------------------- caches, training


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 3", "GPT-OSS"])
def test_chunked_prefill_with_padding_matches_eager(name: str) -> None:
    """Rows of later chunks align with the last keys, with padding on the left, on the right or not at all."""
    ids, padding = tokens(2, 15), torch.ones(2, 15, dtype=torch.long)
    padding[1, :4] = 0
    for mask in (None, padding):
        results = []
        for implementation in (NAME, "eager"):
            model, cache, logits = model_with(name, implementation), None, []
            for start, end in ((0, 6), (6, 11), (11, 12), (12, 15)):
                so_far = None if mask is None else mask[:, :end]
                with torch.no_grad():
                    out = model(ids[:, start:end], attention_mask=so_far, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logits.append(out.logits)
            results.append(torch.cat(logits, 1))
        keep = torch.ones(2, 15, dtype=torch.bool) if mask is None else mask.bool()
        assert near(results[0][keep], results[1][keep])


def test_prompt_with_empty_static_cache_matches_eager() -> None:
    """T5 has masks as matrices, and keys after the prompt are not in the static cache yet."""
    logits = []
    for implementation in (NAME, "eager"):
        result = model_with("T5", implementation).generate(
            tokens(2, 6), decoder_input_ids=tokens(2, 4), max_new_tokens=3, min_new_tokens=3, do_sample=False,
            cache_implementation="static", output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        logits.append(torch.stack(result.logits))
    assert near(*logits)


def test_beam_search_equals_eager_tokens() -> None:
    ids = tokens(2, 7)
    results = [model_with("Llama", name).generate(ids, max_new_tokens=5, num_beams=3) for name in (NAME, "eager")]
    assert torch.equal(*results)


def test_packed_sequences_with_a_new_cache_stay_separate() -> None:
    """With a cache transformers makes no mask of packed sequences; position_ids separate them."""
    ids, positions = tokens(1, 12), torch.cat([torch.arange(5), torch.arange(7)])[None]
    model = model_with("Mistral")
    with torch.no_grad():
        together = model(ids, position_ids=positions, use_cache=True).logits
        apart = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], 1)
    assert near(together, apart)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["positions", "cu_seq_lens"])
def test_compiled_packed_sequences_match_eager(ends: bool) -> None:
    torch._dynamo.reset()
    ids, positions = tokens(1, 12), torch.cat([torch.arange(5), torch.arange(7)])[None]
    kwargs = {"cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32)} if ends else {}
    model, eager = model_with("Mistral"), model_with("Mistral", "eager")
    model.compile(fullgraph=True, backend="aot_eager")
    ours = model(ids, position_ids=positions, use_cache=False, **kwargs).logits
    theirs = eager(ids, position_ids=positions, use_cache=False).logits
    assert near(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert near(mine.grad, other.grad)


def test_training_with_dropout_checkpoints_autocast_is_reproducible() -> None:
    """Training steps on packed sequences reduce the loss, and a second run gives equal losses."""

    def losses() -> list[float]:
        model = model_with("Llama").train()
        model.config.attention_dropout = 0.1
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        batch = collate([{"input_ids": tokens(1, n)[0].tolist()} for n in (5, 9, 3)])
        torch.manual_seed(0)
        results = []
        for _ in range(8):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(float(loss.detach()))
        return results

    first = losses()
    assert first[-1] < 0.8 * first[0]
    assert losses() == first


# ---------------------------------------------------------------------------------------- tensors changed in place


@torch.inference_mode()
def test_cu_seq_lens_changed_in_place_are_read_again_in_inference_mode() -> None:
    model, ids, ends = model_with("Llama"), tokens(1, 12), torch.tensor([0, 5, 12], dtype=torch.int32)
    how: dict[str, Any] = {"use_cache": False, "max_length_q": 12, "max_length_k": 12}
    model(ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **how)
    ends[1] = 8
    again = model(ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **how).logits
    assert torch.equal(again, model(ids, cu_seq_lens_q=ends.clone(), cu_seq_lens_k=ends.clone(), **how).logits)


@pytest.mark.parametrize("positions", [[*range(4), *range(7, 15)], [i // 2 for i in range(12)], [3] * 12])
def test_position_ids_start_a_new_sequence_only_at_0(positions: list[int]) -> None:
    assert near(*both("Llama", input_ids=tokens(1, 12), position_ids=torch.tensor([positions])))


def test_encoder_without_is_causal_attribute_is_not_causal() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.ClapTextModel._from_config(transformers.ClapTextConfig(vocab_size=64, **sizes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
        results = []
        for name in (NAME, "eager"):
            model.set_attn_implementation(name)
            results.append(model(tokens(2, 9) % 64)[0])
    assert near(*results)
