"""Models of transformers compute with our attention what they compute with their own, and so do their gradients.

The truth is eager attention in float64, the measure eager attention in the dtype tested.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_attention.testing import beside_plain

pytest.importorskip("transformers")

from support.hf_models import COLUMNS, FAMILIES, VOCABULARY, Family
from transformers import EncoderDecoderCache

from fusion_attention.integrations import transformers as door
from fusion_attention.integrations.transformers_cache import PagedCache

LENGTHS = 13, 6, 9
NEW = 5
BY_NAME = {family.name: family for family in FAMILIES}
# Compiling takes seconds: every day a decoder and an encoder.
RARE, COMPILED = ("torch.compile", "left-padded", "bfloat16", "static cache"), ("Llama", "BERT")


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    door.register()


class Wide:
    """torch, in which what is called float32 is float64: their modules go through float32 in any dtype."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def wide(family: Family) -> Iterator[None]:
    module = family.module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", Wide())
        yield


Batch = dict[str, Any]
Batches = list[tuple[Batch, Tensor]]  # calls of the model, and which of its rows count


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape)


def batches(family: Family, column: str) -> tuple[Batches, Batches]:
    """What is run with our attention, and what to compare it with: packed, every sequence by itself."""
    torch.manual_seed(1)
    longest = max(LENGTHS)
    padding = torch.arange(longest)[None] < torch.tensor(LENGTHS)[:, None]
    if column == "left-padded":
        padding = padding.flip(1)
    ids = tokens(*padding.shape)
    whole = torch.ones_like(padding)
    folder = family.model.split(".")[0]
    if column == "packed":
        rows = [ids[i : i + 1, :n] for i, n in enumerate(LENGTHS)]
        apart = [
            ({"input_ids": row, "position_ids": torch.arange(row.shape[1])[None]}, whole[:1, : row.shape[1]])
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
    keep = padding if "padded" in column or column in ("bfloat16", "torch.compile") else whole
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


def trained(model: Any, calls: Batches) -> dict[str, Tensor]:
    """Outputs where they count, and the gradients of all parameters."""
    model.zero_grad()
    outputs = []
    for batch, keep in calls:
        dtype = next(model.parameters()).dtype
        batch = {n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in batch.items()}
        found = model(**batch)
        out = found.logits_per_text[None] if "logits_per_text" in found else found.logits
        outputs.append(out[keep] if out.dim() == 3 else out)
    out = torch.cat(outputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view_as(out)
    (out * weights.to(out.dtype)).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach()} | grads


GENERATED = {"generate": {}, "static cache": {"cache_implementation": "static"}, "paged cache": {}}


def generated(model: Any, calls: Batches, column: str) -> dict[str, Tensor]:
    """The logits of new tokens, chosen greedily."""
    ((batch, _),) = calls
    options: dict[str, Any] = GENERATED[column]
    if column == "paged cache" and model.config._attn_implementation == "fusion_attention":
        pages = [PagedCache(model.config) for _ in range(1 + model.config.is_encoder_decoder)]
        options = {"past_key_values": EncoderDecoderCache(*pages) if len(pages) > 1 else pages[0]}
    dtype = next(model.parameters()).dtype
    batch = {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items() if "decoder" not in n}
    found = model.generate(
        **batch, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return {"logits": torch.stack(found.logits)}


def judge(ours: dict[str, Tensor], golden: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == golden.keys() == plain.keys()
    for name, exact in golden.items():
        # A bias of keys moves all scores of a row alike: what its gradient sums cancels.
        keys = name.removesuffix("bias") + "weight"
        terms = float(golden[keys].abs().max()) if keys in golden and name.endswith("bias") else 0.0
        if exact.abs().max() < 1e-12 and ours[name].dtype == torch.bfloat16:
            # It cancels to nothing, of terms that bfloat16 rounds.
            assert ours[name].abs().max() <= terms * torch.finfo(torch.bfloat16).eps
            continue
        beside_plain(name, ours[name], exact.double(), plain[name], sum(LENGTHS), terms)


@pytest.fixture(scope="module")
def models() -> Callable[[Family], Any]:
    """Made once per family."""
    made: dict[str, Any] = {}

    def model_of(family: Family) -> Any:
        if family.name not in made:
            made.clear()
            made[family.name] = family.make()
        return made[family.name]

    return model_of


def cases() -> list[Any]:
    found = []
    for family in FAMILIES:
        for column in family.columns:
            slow = column in RARE and family.name not in COMPILED
            marks = [pytest.mark.slow] if slow else []
            found.append(pytest.param(family.name, column, marks=marks, id=f"{family.name}-{column}"))
    return found


@pytest.mark.parametrize(("name", "column"), cases())
def test_as_eager(models: Callable[[Family], Any], monkeypatch: pytest.MonkeyPatch, name: str, column: str) -> None:
    assert column in COLUMNS
    family = BY_NAME[name]
    model = copy.deepcopy(models(family))
    if column == "bfloat16":
        model = model.bfloat16()
    mine, theirs = batches(family, "left-padded" if column in GENERATED else column)

    def run(model: Any, calls: Batches) -> dict[str, Tensor]:
        if column in GENERATED:
            return generated(model, calls, column)
        return trained(model, calls)

    model.set_attn_implementation("eager")
    plain = run(model, theirs)
    with wide(family):
        golden = run(copy.deepcopy(model).double(), theirs)
    model.set_attn_implementation("fusion_attention")
    calls = []
    for function in (door.attention, door.sparse_attention):
        monkeypatch.setattr(door, function.__name__, lambda *a, f=function, **k: calls.append(f) or f(*a, **k))
    if column == "torch.compile":
        monkeypatch.undo()
        torch._dynamo.reset()
        if family.has_experts:
            model.set_experts_implementation("batched_mm")  # eager's loop over experts is no graph
        model.compile(fullgraph=True, backend="aot_eager")
        judge(run(model, mine), golden, plain)
    else:
        judge(run(model, mine), golden, plain)
        assert len(calls) >= 2  # one per layer
