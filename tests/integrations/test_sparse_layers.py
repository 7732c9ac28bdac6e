"""transformers layers with key selection run on this library: float32 and bfloat16, memory, compiled models."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from support.sparse_models import EAGER, MODELS, in_float64, indexed_layer, inputs_of, make, tokens

from fusion_attention.integrations import transformers as integration
from fusion_attention.testing import check, estimated_rounding_errors

# transformers' linear attention allocates more than linearly, and its gradient cannot be traced.
INDEXED = {"qwen4_exp": {"layer_types": ["indexed_attention"] * 2}}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    integration.register()


def converted(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Arguments with floating-point tensors converted to dtype."""

    def of(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    result: dict[str, Any] = torch.utils._pytree.tree_map(of, given)
    return result


def trained(layer: Any, given: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Output of a layer, and gradients of its input and parameters."""
    layer.zero_grad()
    hidden = given["hidden_states"].detach().requires_grad_()
    out = layer(**given | {"hidden_states": hidden})[0]
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view_as(out).to(dtype).to(out.dtype))
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "hidden": hidden.grad} | grads


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_sparse_layer_output_and_gradients_are_within_error_bound(name: str, dtype: torch.dtype) -> None:
    model = make(name)
    given = converted(inputs_of(name, model, tokens(2, 20)), dtype)
    layer = copy.deepcopy(indexed_layer(name, model)).to(dtype)
    if name in ("deepseek_v32", "glm_moe_dsa"):
        layer.indexer.weights_proj.float()  # as transformers loads it
    ours = trained(layer, given, dtype)
    theirs = copy.deepcopy(layer).double()
    theirs.config = copy.copy(theirs.config)
    theirs.config._attn_implementation = EAGER
    visible = torch.ones(20, 20, dtype=torch.bool).tril()
    if name == "deepseek_v4":
        visible = visible.triu(1 - theirs.sliding_window)
    mask = torch.zeros(2, 1, 20, 20, dtype=torch.float64).masked_fill(~visible, torch.finfo(torch.float64).min)
    exact = converted(given, torch.float64) | {"attention_mask": mask}
    with in_float64(model):
        check(name, ours, estimated_rounding_errors.expected_of(lambda: trained(theirs, exact, dtype), ours))


# --------------------------------------------------------------------------------------------------------------- memory


def largest(model: Any, rows: int) -> tuple[int, int]:
    """(maximum, sum) of the bytes that operations of a forward and backward pass allocate."""
    ids = tokens(1, rows)
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        model(ids, use_cache=False).logits[:, -1].sum().backward()
    sizes = [event.self_cpu_memory_usage for event in profile.function_events]
    return max(sizes), sum(size for size in sizes if size > 0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_memory_is_linear_in_the_number_of_tokens(name: str) -> None:
    """4 times as many rows may need 4 times the memory; a tensor [S, S] would need 16 times as much."""
    model = make(name, **INDEXED.get(name, {})).float()
    largest(model, 64)
    few, many = largest(model, 128), largest(model, 512)
    assert few[0] > 0
    assert many[0] <= 4 * few[0] + 2**16
    assert many[1] <= 4 * few[1] + 2**20


# ------------------------------------------------------------------------------------------------------ compiled models


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled_model_matches_eager_logits_and_gradients(name: str) -> None:
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        model = make(name, **INDEXED.get(name, {})).float()
        if compiles:
            model.compile(backend="aot_eager")
        logits = model(tokens(2, 20), use_cache=False).logits
        logits.square().mean().backward()
        results.append(
            {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        )
    assert results[0].keys() == results[1].keys()
    for result, expected in results[0].items():
        error = (results[1][result] - expected).abs().max()
        assert error <= 2**10 * torch.finfo(torch.float32).eps * expected.abs().max(), result
