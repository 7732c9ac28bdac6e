"""Makes tiny models of transformers whose layers select keys, with random weights, and their original results."""

import contextlib
import importlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.hf_models import EXPERTS, LATENT, SIZES, Float64Torch
from torch import Tensor

import fusion_attention as fa

Batch = dict[str, Any]
OURS, EAGER = "fusion_attention", "eager"
VOCABULARY = SIZES["vocab_size"]
# With few heads, an indexer gives some keys the score 0, so that they tie.
INDEX = {"index_n_heads": 32, "index_head_dim": 16}
SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_DENSE = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
# fmt: off
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", SIZES | LATENT | INDEX | {"index_topk": 6}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig",
                    SIZES | LATENT | INDEX | {"index_topk": 6, "indexer_types": ["full", "shared"]}),
    "deepseek_v4": ("DeepseekV4ForCausalLM", "DeepseekV4Config",
                    _DENSE | EXPERTS | INDEX
                    | {"num_hidden_layers": 3, "head_dim": 16, "q_lora_rank": 24, "n_routed_experts": 4,
                       "sliding_window": 5, "layer_types": [SLIDING, CSA, HCA], "compress_rates": {CSA: 2, HCA: 4},
                       "mlp_layer_types": ["moe"] * 3, "o_groups": 2, "o_lora_rank": 8,
                       "partial_rotary_factor": 0.5, "index_topk": 3}),
    "qwen4_exp": ("Qwen4ExpForCausalLM", "Qwen4ExpTextConfig",
                  _DENSE | EXPERTS
                  | {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
                     "shared_expert_intermediate_size": 24, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                     "linear_num_key_heads": 2, "linear_num_value_heads": 4, "hc_count": 2, "hc_lowrank": 8,
                     "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 32,
                     "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4,
                     "indexer_compress_ratio": 2, "rope_parameters": _ROPE}),
}
# fmt: on


def code_of(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def config_of(name: str, **changed: Any) -> Any:
    configuration = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    return getattr(configuration, MODELS[name][1])(**MODELS[name][2] | changed)


def make(name: str, attention: str = OURS, **changed: Any) -> Any:
    """Makes a model in float64 and evaluation mode; its scores differ enough to detect a wrong selection."""
    torch.manual_seed(0)
    model = getattr(code_of(name), MODELS[name][0])(config_of(name, **changed)).eval()
    for text, parameter in model.named_parameters():
        if parameter.dim() == 2 and not any(word in text for word in ("embed", "router", "_hc", "hyper")):
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        if text.endswith(("sinks", "position_bias")):
            torch.nn.init.normal_(parameter)
    model.set_experts_implementation("eager")  # supports float64
    model.set_attn_implementation(attention)
    return model.double()


def layers_of(model: Any) -> list[Any]:
    """Returns the attention layers of a model that are patched."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith(("V32Attention", "DsaAttention", "V4Attention", "ExpTextAttention"))
    ]


def indexed_layer(name: str, model: Any) -> Any:
    """Returns the first attention layer that chooses keys."""
    return layers_of(model)[1 if name == "deepseek_v4" else 0]


def inputs_of(name: str, model: Any, ids: Tensor) -> dict[str, Any]:
    """Returns the arguments that the model passes to its first layer that chooses keys."""
    given: dict[str, Any] = {}

    def note(module: Any, args: Any, words: Any) -> None:
        given.update(words, **dict(zip(("hidden_states", "position_embeddings"), args, strict=False)))

    hook = indexed_layer(name, model).register_forward_pre_hook(note, with_kwargs=True)
    with in_float64(model), torch.no_grad():
        model(ids, use_cache=False)
    hook.remove()
    return given


@contextlib.contextmanager
def in_float64(model: Any) -> Iterator[None]:
    """Makes the modules of transformers and of this package compute everything in float64."""
    with pytest.MonkeyPatch.context() as patch, fa.use_backend("golden"):
        patch.setattr(sys.modules[type(model).__module__], "torch", Float64Torch())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def gradients(model: Any, calls: list[tuple[Batch, Tensor]]) -> dict[str, Tensor]:
    """Returns the logits of tokens that are not padding, and all gradients of parameters."""
    model.zero_grad()
    with in_float64(model):
        out = torch.cat([model(**batch).logits[keep] for batch, keep in calls])
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).sin().view_as(out)).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.detach()} | grads


def agree(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Compares results in float64, except for rounding."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        error = (ours[name] - expected).abs().max()
        assert error <= 1e-11 * expected.abs().max(), f"{name}: {float(error)} of {float(expected.abs().max())}"


def scores_of(name: str, layer: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns (indexer scores, attention weights averaged over heads) [B, S, T] of a layer of transformers."""
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
    """Returns the mean over rows of KL(p / sum(p) || softmax(scores)) * sum(p), over keys with p > 0, and its size."""
    visible, mass = p > 0, p.sum(-1, keepdim=True)
    log_y = scores.masked_fill(~visible, -math.inf).log_softmax(-1).masked_fill(~visible, 0)
    log_p = torch.where(visible, p / mass, 1).log()
    rows = p.shape[0] * p.shape[1]
    return (p * (log_p - log_y)).sum() / rows, float((p * (log_p.abs() + log_y.abs())).sum().detach()) / rows


def same_losses(ours: tuple[Any, Tensor], theirs: tuple[Any, Tensor], size: float) -> None:
    """Asserts that two (layer, loss) agree in loss and gradients, except for roundings to float32; only the indexer's
    parameters of the first layer have gradients. size: of the terms of the loss."""
    unit = torch.finfo(torch.float32).eps  # of the loss, and of the probabilities of compressed keys
    assert abs(float(ours[1].detach()) - float(theirs[1].detach())) <= unit * size
    grads, others = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m, _ in (ours, theirs))
    assert grads.keys() == {n for n in others if "indexer" in n}
    for name, gradient in grads.items():
        assert (gradient - others[name]).abs().max() <= unit * others[name].abs().sum(), name
