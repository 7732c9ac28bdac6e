"""transformers models with key selection: patches, errors, fallbacks to transformers' code, indexer losses,
checkpointing, autocast."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

# ruff: noqa: E402  (both need transformers)
from support.sparse_models import (
    CSA,
    EAGER,
    MODELS,
    OURS,
    agree,
    code_of,
    divergence,
    gradients,
    in_float64,
    indexed_layer,
    inputs_of,
    layers_of,
    make,
    same_losses,
    scores_of,
    tokens,
)

import fusion_attention as fa
from fusion_attention.integrations import sparse_models
from fusion_attention.integrations import transformers as integration
from fusion_attention.nn import set_stage

STAGED = [name for name in MODELS if name != "qwen4_exp"]
FULL = torch.ones(3, 24, dtype=torch.bool)


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


def calls(**given: Any) -> Any:
    return [({"input_ids": tokens(3, 24), "use_cache": False, **given}, FULL)]


# ------------------------------------------------------------------------------------------------------------ patches


@pytest.mark.parametrize("name", MODELS)
def test_register_patches_loaded_models_and_unregister_removes_patches(name: str) -> None:
    family = sparse_models.FAMILIES[name]
    integration.unregister()
    owner = getattr(code_of(name), family.layer)
    before = dict(vars(owner))
    model = make(name, EAGER)
    integration.register()
    assert owner.forward is not before["forward"]
    assert owner.forward.__wrapped__ is before["forward"]
    eager = gradients(model, calls())
    model.set_attn_implementation(OURS)
    agree(gradients(model, calls()), eager)
    integration.register("another_name")
    integration.unregister()
    assert owner.forward is not before["forward"]
    integration.unregister("another_name")
    assert dict(vars(owner)) == before


@pytest.mark.parametrize("name", MODELS)
def test_refuses_untested_transformers_release(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name)
    monkeypatch.setattr(transformers, "__version__", "5.29.1")
    with pytest.raises(ValueError, match=r"serves .* in transformers 5\.\d.*, got 5\.29\.1: use attn_implementation"):
        model(tokens(1, 9))
    integration.unregister()
    with pytest.warns(fa.ContractWarning, match="was not tested"):
        integration.register()
    assert not hasattr(getattr(code_of(name), sparse_models.FAMILIES[name].layer).forward, "__wrapped__")
    integration.unregister()


@pytest.mark.parametrize(
    ("name", "attribute", "value", "text"),
    [
        ("deepseek_v32", "index_topk", 0, "index_topk: expected at least 1, got 0"),
        ("deepseek_v32", "index_head_dim", 4, r"index_head_dim: expected at least qk_rope_head_dim \(8\), got 4"),
        ("deepseek_v32", "num_key_value_heads", 2, r"num_key_value_heads: expected num_attention_heads \(4\), got 2"),
        ("deepseek_v32", "layer_types", ["full_attention"] * 2, "layer_types: expected indexed_attention in 2 layers"),
        ("glm_moe_dsa", "indexer_types", ["shared", "full"], "indexer_types: expected 'full' or 'shared'"),
        ("glm_moe_dsa", "indexer_types", ["full"], "indexer_types: expected 'full' or 'shared' for 2 layers"),
        ("deepseek_v4", "index_topk", 0, "index_topk: expected at least 1, got 0"),
        ("deepseek_v4", "sliding_window", 0, "sliding_window: expected at least 1, got 0"),
        ("deepseek_v4", "num_key_value_heads", 2, "num_key_value_heads: expected 1, got 2"),
        ("deepseek_v4", "compress_rates", {CSA: 2}, "compress_rates: expected at least 1 for every kind of layer"),
        ("deepseek_v4", "index_head_dim", 4, "index_head_dim: expected at least the 8 elements that rotate, got 4"),
        ("qwen4_exp", "indexer_budget", None, "indexer_budget: expected a number for layers of indexed_attention"),
    ],
)
def test_refuses_inconsistent_model_configurations(name: str, attribute: str, value: Any, text: str) -> None:
    model = make(name)
    setattr(model.config, attribute, value)
    with pytest.raises(ValueError, match=f"Config: {text}.*correct the configuration"):
        model(tokens(1, 9), use_cache=False)


# -------------------------------------------------------------------------------------- fallbacks to transformers' code


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that the integration logs, one per layer and call."""
    texts: list[str] = []
    monkeypatch.setattr(sparse_models._log, "warning_once", texts.append)
    return texts


@pytest.mark.parametrize("name", MODELS)
def test_output_attentions_falls_back_to_eager_weights(name: str, notes: list[str]) -> None:
    results = []
    for attention in (OURS, EAGER):
        model = make(name, attention)
        with in_float64(model), torch.no_grad():
            out = model(tokens(3, 24), output_attentions=True, use_cache=False)
        results.append({str(i): weights for i, weights in enumerate(out.attentions)} | {"logits": out.logits})
    agree(*results)
    (note,) = set(notes)
    assert "output_attentions asks for all weights: the layers are computed by transformers' own code" in note


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", MODELS)
def test_four_dimensional_masks_fall_back_to_transformers_code(name: str, kind: str, notes: list[str]) -> None:
    visible = (torch.rand(3, 1, 24, 24, generator=torch.Generator().manual_seed(0)) < 0.7).tril()
    visible |= torch.eye(24, dtype=torch.bool)
    added = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, torch.finfo(torch.float64).min)
    theirs = gradients(make(name, EAGER), calls(attention_mask=added))
    ours = gradients(make(name), calls(attention_mask=visible if kind == "bool" else added))
    agree(ours, theirs)
    (note,) = set(notes)
    assert "four-dimensional" in note


def test_attention_dropout_falls_back_to_transformers_code(notes: list[str]) -> None:
    model = make("deepseek_v32").train()
    for layer in layers_of(model):
        layer.attention_dropout = 0.5
    gradients(model, calls())
    (note,) = set(notes)
    assert "attention_dropout" in note
    notes.clear()
    model.eval()
    gradients(model, calls())
    assert not notes


def test_position_ids_with_gaps_fall_back_to_transformers_code(notes: list[str]) -> None:
    """Positions determine the visible compressed keys, so gaps change them."""
    given = {"position_ids": torch.arange(0, 48, 2)[None].expand(3, -1), "attention_mask": FULL.long()}
    agree(gradients(make("deepseek_v4"), calls(**given)), gradients(make("deepseek_v4", EAGER), calls(**given)))
    (note,) = set(notes)
    assert "position_ids" in note


def test_refuses_packed_sequences_with_a_compressed_key_cache() -> None:
    positions = torch.cat((torch.arange(10), torch.arange(14)))[None]
    with pytest.raises(ValueError, match="packed sequences: expected no cache"):
        make("deepseek_v4").float()(tokens(1, 24), position_ids=positions, use_cache=True)


# ------------------------------------------------------------------------------------------------------ indexer losses


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
@pytest.mark.parametrize("name", STAGED)
def test_indexer_loss_and_gradients_match_kl_divergence(name: str, stage: Any) -> None:
    """KL(p || softmax(I)) is computed from transformers' scores and weights, over all (warmup) or selected keys."""
    top_k = {"index_topk": 64} if stage == "warmup" else {}
    model, theirs = make(name), make(name, EAGER, **top_k)
    layer, other = indexed_layer(name, model), indexed_layer(name, theirs)
    set_stage(model.train(), stage)
    given = inputs_of(name, theirs, tokens(2, 24))
    with in_float64(model):
        expected, size = divergence(*scores_of(name, other, given))
        expected.backward()
        layer(**given | {"attention_mask": None})
        loss = integration.indexer_loss(layer)
        loss.backward()
    assert loss.dtype == torch.float32
    same_losses((layer, loss), (other, expected), size)


@pytest.mark.parametrize("name", STAGED)
def test_set_stage_controls_indexer_loss_and_trained_parameters(name: str) -> None:
    model = make(name)
    before = gradients(model, calls())
    with pytest.raises(ValueError, match=r"indexer_loss: model: expected layers with a loss, got none \(call"):
        integration.indexer_loss(model)
    set_stage(model.train(), "sparse")
    agree(gradients(model, calls()), before)  # the loss changes nothing until it is asked for
    copy.deepcopy(model)  # a stored loss has a graph, which cannot be copied
    assert integration.indexer_loss(model) > 0
    set_stage(model, "warmup")
    model.float()(tokens(3, 24), use_cache=False)
    integration.indexer_loss(model).backward()
    trained = {n for n, p in model.named_parameters() if p.grad is not None and p.requires_grad}
    assert trained == {n for n, p in model.named_parameters() if "indexer" in n}
    set_stage(model.double(), "dense")
    everything = gradients(make(name, index_topk=64), calls())["logits"]
    agree({"logits": gradients(model, calls())["logits"]}, {"logits": everything})


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("stage", ["warmup", "sparse"])
@pytest.mark.parametrize("name", STAGED)
def test_batch_indexer_loss_is_token_mean_of_single_sequence_losses(name: str, stage: Any, kind: str) -> None:
    """One sequence is too short for a compressed key."""
    model, lengths, ids = make(name).train(), (1, 24, 13), tokens(3, 24)
    set_stage(model, stage)
    apart = []
    with in_float64(model):
        for row, length in zip(ids, lengths, strict=True):
            model(row[None, :length], use_cache=False)
            apart.append(integration.indexer_loss(model) * length)
        if kind == "packed":
            joined = torch.cat([row[:n] for row, n in zip(ids, lengths, strict=True)])[None]
            model(joined, position_ids=torch.cat([torch.arange(n) for n in lengths])[None], use_cache=False)
        else:
            mask = torch.arange(24) < torch.tensor(lengths)[:, None]
            model(ids, attention_mask=mask.long(), use_cache=False)
        together = integration.indexer_loss(model)
    unit = torch.finfo(torch.float32).eps  # the losses are stored in float32
    expected = torch.stack(apart).sum() / sum(lengths)
    assert abs(float(together) - float(expected)) <= 8 * unit * abs(float(expected))


def test_set_stage_refuses_models_with_block_indexers() -> None:
    with pytest.raises(ValueError, match="set_stage: model: expected a SparseAttention"):
        set_stage(make("qwen4_exp"), "sparse")


# ----------------------------------------------------------------------------------------------------- training options


@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_keeps_gradients_bitwise_equal(name: str) -> None:
    model = make(name).train()
    if name in STAGED:
        set_stage(model, "sparse")
    results = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        with in_float64(model):
            out = model(tokens(2, 24), use_cache=False).logits
            loss = out.square().mean()
            (loss + integration.indexer_loss(model) if name in STAGED else loss).backward()
        results.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


class Adapted(torch.nn.Linear):
    """Linear layer with an additional term, as an adapter adds."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.25 * x[..., :1]


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("how", ["class", "hook"])
def test_kv_projection_with_adapter_or_hook_is_applied(name: str, how: str) -> None:
    results = []
    for attention in (OURS, EAGER):
        model = make(name, attention)
        for layer in layers_of(model):
            if how == "class":
                layer.kv_b_proj.__class__ = Adapted
            else:
                layer.kv_b_proj.register_forward_hook(lambda module, args, out: out + 0.25 * args[0][..., :1])
        results.append(gradients(model, calls()))
    agree(*results)


def test_autocast_bfloat16_gradients_are_finite() -> None:
    model = make("deepseek_v32").float()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens(3, 24), use_cache=False).logits
    logits.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
