"""A tiny DeepSeek-V3.2 of transformers with random weights: our modules load its weights and compute the same."""

import copy
from typing import Any

import pytest
import torch
from support.hf_models import Float64Torch
from support.sparse_models import code_of
from torch import Tensor, nn

from fusion_attention.nn import SparseLatentAttention
from fusion_attention.testing.estimated_rounding_errors import compare_with

pytest.importorskip("transformers")
TOP_K = 6
SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "index_n_heads": 5,
    "index_head_dim": 16,
    "index_topk": TOP_K,
}


@pytest.fixture
def model() -> Any:
    """Returns a model of two layers, one of them with experts, in float32 with eager attention."""
    deepseek = code_of("deepseek_v32")
    config = deepseek.DeepseekV32Config(
        **SIZES,
        vocab_size=50,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        max_position_embeddings=64,
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # which float64 goes through too
    torch.manual_seed(0)
    result = deepseek.DeepseekV32Model(config).eval()
    for name, parameter in result.named_parameters():
        if "self_attn" in name and parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)  # scores that differ, sharp attention
    return result


def ours_of(theirs: Any) -> SparseLatentAttention:
    """Returns our layer with the weights of a layer's self_attn."""
    s = SIZES
    result = SparseLatentAttention(
        s["hidden_size"],
        s["num_attention_heads"],
        q_rank=s["q_lora_rank"],
        kv_rank=s["kv_lora_rank"],
        nope_dim=s["qk_nope_head_dim"],
        rope_dim=s["qk_rope_head_dim"],
        v_dim=s["v_head_dim"],
        index_heads=s["index_n_heads"],
        index_dim=s["index_head_dim"],
        top_k=s["index_topk"],
    )
    result.load_state_dict(theirs.state_dict(), strict=True)
    return result


def halves(position_embeddings: Any) -> tuple[Tensor, Tensor]:
    """Returns half of transformers' cos and sin tables, which hold every angle twice."""
    cos, sin = (t[..., : t.shape[-1] // 2] for t in position_embeddings)
    return cos, sin


def doubled(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def chosen_by(attention: Any, inputs: dict[str, Any]) -> Tensor:
    """Returns the keys that the indexer of transformers selects."""
    hidden, where, mask = (inputs[name] for name in ("hidden_states", "position_embeddings", "attention_mask"))
    latent = attention.q_a_layernorm(attention.q_a_proj(hidden))
    result: Tensor = attention.indexer(hidden, latent, where, mask[:, 0], None)
    return result


def test_layer_matches_keys_and_output_of_transformers_deepseek_v3_2(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer runs on the inputs that it gets in the model."""
    calls: list[dict[str, Any]] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, args, given, out: calls.append(given), with_kwargs=True)
        for layer in model.layers
    ]
    with torch.no_grad():
        model(torch.randint(50, (2, 31)))
    for hook in hooks:
        hook.remove()
    for layer, given in zip(model.layers, calls, strict=True):
        ours = ours_of(layer.self_attn)
        hidden, rope = given["hidden_states"], halves(given["position_embeddings"])
        latent = ours.q_a_layernorm(ours.q_a_proj(hidden))
        indices = ours.indexer(hidden, latent, rope=rope).indices[:, :, 0]
        theirs = chosen_by(layer.self_attn, given)
        for row in range(hidden.shape[1]):
            visible = min(row + 1, TOP_K)  # behind these their list names keys that their mask removes
            for mine, other in zip(indices[:, row], theirs[:, row], strict=True):
                assert mine[:visible].tolist() == other[:visible].tolist()
                assert (mine[visible:] == -1).all()
        float64_layer = copy.deepcopy(layer.self_attn).double()
        float64_inputs = torch.utils._pytree.tree_map(doubled, given | {"past_key_values": None})

        def program(layer: Any = float64_layer, given: dict[str, Any] = float64_inputs) -> Tensor:
            with monkeypatch.context() as patched:
                patched.setattr(code_of("deepseek_v32"), "torch", Float64Torch())
                out: Tensor = layer(**given)[0]
            return out

        with torch.no_grad():
            compare_with("attention", ours(hidden, rope=rope)[0], program)
