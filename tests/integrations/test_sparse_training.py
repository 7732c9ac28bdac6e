"""transformers models with key selection: patches, errors, fallbacks to transformers' code, indexer losses,
checkpointing, compiled models, memory, float32 and bfloat16."""

import copy
import logging
import math
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
    gradients,
    in_float64,
    layers_of,
    make,
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


class Notes(logging.Handler):
    """Handler that collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def notes() -> Any:
    handler, logger = Notes(), sparse_models._log
    type(logger).warning_once.cache_clear() if hasattr(type(logger).warning_once, "cache_clear") else None
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)


@pytest.mark.parametrize("name", MODELS)
def test_output_attentions_falls_back_to_eager_weights(name: str, notes: list[str]) -> None:
    results = []
    for attention in (OURS, EAGER):
        model = make(name, attention)
        with in_float64(model), torch.no_grad():
            out = model(tokens(3, 24), output_attentions=True, use_cache=False)
        results.append({str(i): weights for i, weights in enumerate(out.attentions)} | {"logits": out.logits})
    agree(*results)
    assert len(notes) == 1
    assert "output_attentions asks for all weights: the layers are computed by transformers' own code" in notes[0]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", MODELS)
def test_four_dimensional_masks_fall_back_to_transformers_code(name: str, kind: str, notes: list[str]) -> None:
    visible = (torch.rand(3, 1, 24, 24, generator=torch.Generator().manual_seed(0)) < 0.7).tril()
    visible |= torch.eye(24, dtype=torch.bool)
    added = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, torch.finfo(torch.float64).min)
    theirs = gradients(make(name, EAGER), calls(attention_mask=added))
    ours = gradients(make(name), calls(attention_mask=visible if kind == "bool" else added))
    agree(ours, theirs)
    assert len(notes) == 1
    assert "four-dimensional" in notes[0]


def test_attention_dropout_falls_back_to_transformers_code(notes: list[str]) -> None:
    model = make("deepseek_v32").train()
    for layer in layers_of(model):
        layer.attention_dropout = 0.5
    gradients(model, calls())
    assert len(notes) == 1
    assert "attention_dropout" in notes[0]
    model.eval()
    gradients(model, calls())
    assert len(notes) == 1


def test_position_ids_with_gaps_fall_back_to_transformers_code(notes: list[str]) -> None:
    """Positions determine the visible compressed keys, so gaps change them."""
    given = {"position_ids": torch.arange(0, 48, 2)[None].expand(3, -1), "attention_mask": FULL.long()}
    agree(gradients(make("deepseek_v4"), calls(**given)), gradients(make("deepseek_v4", EAGER), calls(**given)))
    assert len(notes) == 1
    assert "position_ids" in notes[0]


def test_refuses_packed_sequences_with_a_compressed_key_cache() -> None:
    positions = torch.cat((torch.arange(10), torch.arange(14)))[None]
    with pytest.raises(ValueError, match="packed sequences: expected no cache"):
        make("deepseek_v4").float()(tokens(1, 24), position_ids=positions, use_cache=True)


# ------------------------------------------------------------------------------------------------------ indexer losses


def scores_of(name: str, layer: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(indexer scores, attention weights averaged over heads) of all keys, [B, S, T], from transformers' modules."""
    taken: dict[str, Any] = {}
    code, topk = code_of(name), torch.Tensor.topk
    eager = code.eager_attention_forward

    def scores(t: Tensor, *args: Any, **words: Any) -> Any:
        if t.dim() == 3:
            taken["scores"] = t
        return topk(t, *args, **words)

    def attend(*args: Any, **words: Any) -> Any:
        out, weights = eager(*args, **words)
        taken["weights"] = weights
        return out, weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", scores)
        patch.setattr(code, "eager_attention_forward", attend)
        if name != "deepseek_v4":  # whose indexer computes with gradients
            patch.setattr(
                code.__dict__[type(layer.indexer).__name__], "forward", type(layer.indexer).forward.__wrapped__
            )
        layer(**given)
    weights = taken["weights"].mean(1).detach()
    return taken["scores"], weights[..., weights.shape[-1] - taken["scores"].shape[-1] :]


def divergence(scores: Tensor, p: Tensor) -> tuple[Tensor, float]:
    """(mean over rows of KL(p / sum(p) || softmax(scores)) * sum(p) over keys with p > 0, mean of absolute terms)."""
    visible, mass = p > 0, p.sum(-1, keepdim=True)
    log_y = scores.masked_fill(~visible, -math.inf).log_softmax(-1).masked_fill(~visible, 0)
    log_p = torch.where(visible, p / mass, 1).log()
    rows = p.shape[0] * p.shape[1]
    return (p * (log_p - log_y)).sum() / rows, float((p * (log_p.abs() + log_y.abs())).sum()) / rows


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
@pytest.mark.parametrize("name", STAGED)
def test_indexer_loss_and_gradients_match_kl_divergence(name: str, stage: Any) -> None:
    """KL(p || softmax(I)) is computed from transformers' scores and weights, over all (warmup) or selected keys."""
    top_k = {"index_topk": 64} if stage == "warmup" else {}
    model, theirs = make(name), make(name, EAGER, **top_k)
    number = 1 if name == "deepseek_v4" else 0
    layers = layers_of(model)
    set_stage(model.train(), stage)
    given: dict[str, Any] = {}
    hook = layers_of(theirs)[number].register_forward_pre_hook(
        lambda module, args, words: given.update(words, **dict(zip(["hidden_states"], args, strict=False))),
        with_kwargs=True,
    )
    with in_float64(model), in_float64(theirs):
        theirs(tokens(2, 24), use_cache=False)
        hook.remove()
        given = {n: t.detach() if isinstance(t, Tensor) else t for n, t in given.items()}
        expected_scores, p = scores_of(name, layers_of(theirs)[number], given)
        expected, size = divergence(expected_scores, p)
        expected.backward()
        layer = layers[number]
        mine = given | {"attention_mask": None}
        layer(**mine)
        loss = integration.indexer_loss(layer)
        loss.backward()
    assert loss.dtype == torch.float32
    unit = torch.finfo(torch.float32).eps  # of the loss, and of the probabilities of compressed keys
    assert abs(float(loss) - float(expected)) <= unit * size
    grads = (
        {n: q.grad for n, q in m.named_parameters() if q.grad is not None} for m in (layer, layers_of(theirs)[number])
    )
    ours, others = grads
    assert ours.keys() == {n for n in others if "indexer" in n}
    for parameter, gradient in ours.items():
        error = (gradient - others[parameter]).abs().max()
        assert error <= unit * others[parameter].abs().sum(), parameter


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
