"""transformers models give the results and gradients of eager attention on this library.

The reference is eager attention in float64, with its expected rounding errors.
"""

import copy
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from support.hf_models import BY_NAME, COLUMNS, FAMILIES, VOCABULARY, Family, in_float64, model_of
from transformers import EncoderDecoderCache

from fusion_attention.integrations import sparse_latent
from fusion_attention.integrations import transformers as integration
from fusion_attention.integrations.transformers_cache import PagedCache
from fusion_attention.testing import check, estimated_rounding_errors

LENGTHS = 13, 6, 9
NEW = 5
# Compiling takes seconds, so `make test` compiles one decoder and one encoder.
RARE, COMPILED = ("torch.compile", "left-padded", "bfloat16", "static cache"), ("Llama", "BERT")


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    integration.register()


Batch = dict[str, Any]
Batches = list[tuple[Batch, Tensor]]  # calls of the model, and which of its rows count


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape)


def batches(family: Family, column: str) -> tuple[Batches, Batches]:
    """(batches for this library, batches for the reference); the reference computes packed sequences one by one."""
    torch.manual_seed(1)
    longest = max(LENGTHS)
    padding = torch.arange(longest)[None] < torch.tensor(LENGTHS)[:, None]
    if column == "left-padded":
        padding = padding.flip(1)
    ids = tokens(*padding.shape)
    full = torch.ones_like(padding)
    folder = family.model.split(".")[0]
    if column == "packed":
        rows = [ids[i : i + 1, :n] for i, n in enumerate(LENGTHS)]
        apart = [
            ({"input_ids": row, "position_ids": torch.arange(row.shape[1])[None]}, full[:1, : row.shape[1]])
            for row in rows
        ]
        together = {
            "input_ids": torch.cat(rows, 1),
            "position_ids": torch.cat([b["position_ids"] for b, _ in apart], 1),
        }
        if "generate" not in family.columns:  # models without causal masks take positions for what they are
            ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
            together |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        else:
            together["use_cache"] = False
        return [(together, torch.ones(1, sum(LENGTHS), dtype=torch.bool))], apart
    keep = padding if "padded" in column or column in ("bfloat16", "torch.compile") else full
    mask = {} if column == "plain" else {"attention_mask": keep.long()}
    images = {"pixel_values": torch.randn(3, 3, 16, 16)}
    if folder == "vit":
        batch, keep = images, torch.ones(3, 1, dtype=torch.bool)
    elif folder == "clip":
        ids[torch.arange(len(LENGTHS)), padding.sum(1) - 1] = 1  # the end of a text, which stands for it
        batch, keep = {"input_ids": ids} | images | mask, torch.ones(1, 3, dtype=torch.bool)
    elif folder == "whisper":
        batch = {"input_features": torch.randn(3, 8, 24), "decoder_input_ids": ids}
        batch |= {f"decoder_{name}": value for name, value in mask.items()}
    elif folder == "t5":
        batch, keep = {"input_ids": ids, "decoder_input_ids": tokens(3, 7)} | mask, torch.ones(3, 7, dtype=torch.bool)
    else:
        batch = {"input_ids": ids} | mask
    return [(batch, keep)], [(batch, keep)]


def rounded(calls: Batches, dtype: torch.dtype) -> Batches:
    """Batches with floating-point tensors converted to dtype."""
    return [
        ({n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in batch.items()}, keep)
        for batch, keep in calls
    ]


def output_of(result: Any) -> Tensor:
    return result.logits_per_text[None] if "logits_per_text" in result else result.logits


def trained(model: Any, calls: Batches, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs of tokens without padding, and gradients of all parameters; the output gradient is rounded to dtype."""
    model.zero_grad()
    outputs = []
    for batch, keep in calls:
        out = output_of(model(**batch))
        outputs.append(out[keep] if out.dim() == 3 else out)
    out = torch.cat(outputs)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view_as(out).to(dtype).to(out.dtype))
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach()} | grads


GENERATED = {"generate": {}, "static cache": {"cache_implementation": "static"}, "paged cache": {}}


def generated(model: Any, calls: Batches, column: str) -> dict[str, Tensor]:
    """Logits of greedily generated tokens."""
    ((batch, _),) = calls
    options: dict[str, Any] = GENERATED[column]
    if column == "paged cache" and model.config._attn_implementation == "fusion_attention":
        pages = [PagedCache(model.config) for _ in range(1 + model.config.is_encoder_decoder)]
        options = {"past_key_values": EncoderDecoderCache(*pages) if len(pages) > 1 else pages[0]}
    batch = {n: t for n, t in batch.items() if "decoder" not in n}
    result = model.generate(
        **batch, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return {"logits": torch.stack(result.logits)}


def dtype_of(column: str) -> torch.dtype:
    return torch.bfloat16 if column == "bfloat16" else torch.float32


@cache
def expected(name: str, column: str) -> Mapping[str, Any]:
    """Results of eager attention in float64, with the expected rounding errors; shared by columns with equal batches.

    column: form of a batch, or "generate".
    """
    family, dtype = BY_NAME[name], dtype_of(column)
    exact = copy.deepcopy(model_of(name)).to(dtype).double()
    exact.set_attn_implementation("eager")
    _, calls = batches(family, "left-padded" if column == "generate" else column)
    calls = rounded(rounded(calls, dtype), torch.float64)
    run = partial(generated, column=column) if column == "generate" else partial(trained, dtype=dtype)
    with in_float64(family):
        stored = {name: t.to(dtype) for name, t in run(exact, calls).items()}
        result: Mapping[str, Any] = estimated_rounding_errors.expected_of(lambda: run(exact, calls), stored)
        return result


LAYER_NORM = torch.nn.functional.layer_norm


def layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """torch's layer_norm would add bfloat16 gradients of weight and bias row by row; here the sums are float32."""
    result = LAYER_NORM(x, shape, None, None, eps)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def cases() -> list[Any]:
    results = []
    for family in FAMILIES:
        for column in family.columns:
            slow = column in RARE and family.name not in COMPILED
            marks = [pytest.mark.slow] if slow else []
            results.append(pytest.param(family.name, column, marks=marks, id=f"{family.name}-{column}"))
    return results


@pytest.mark.sampled(30)
@pytest.mark.parametrize(("name", "column"), cases())
def test_outputs_and_gradients_match_eager_attention(monkeypatch: pytest.MonkeyPatch, name: str, column: str) -> None:
    assert column in COLUMNS
    family, dtype = BY_NAME[name], dtype_of(column)
    batch = "left-padded" if column in GENERATED else column
    # Packed sequences of a decoder have the same results as padded ones.
    decoder = "generate" in family.columns
    like = "padded" if column == "torch.compile" or (decoder and column == "packed") else column
    want = expected(name, "generate" if column in GENERATED else like)
    model, mine = copy.deepcopy(model_of(name)).to(dtype), rounded(batches(family, batch)[0], dtype)
    model.set_attn_implementation("fusion_attention")
    calls = []
    for module, called in (
        (integration, "attention"),
        (sparse_latent, "attention"),
        (sparse_latent, "sparse_attention"),
    ):
        function = getattr(module, called)
        monkeypatch.setattr(module, called, lambda *a, f=function, **k: calls.append(f) or f(*a, **k))
    if column == "bfloat16":
        monkeypatch.setattr(torch.nn.functional, "layer_norm", layer_norm)
    if column == "torch.compile":
        monkeypatch.undo()
        torch._dynamo.reset()
        if family.has_experts:
            model.set_experts_implementation("batched_mm")  # eager's loop over experts is no graph
        model.compile(fullgraph=True, backend="aot_eager")
    ours = generated(model, mine, column) if column in GENERATED else trained(model, mine, dtype)
    check(name, ours, want)
    assert column == "torch.compile" or len(calls) >= 2  # one per layer
