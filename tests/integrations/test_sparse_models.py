"""transformers models with key selection give the same results on this library as with transformers' code."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from support.sparse_models import EAGER, MODELS, OURS, Batch, agree, gradients, in_float64, make, tokens
from transformers import DynamicCache, StaticCache

from fusion_attention.integrations import transformers as integration
from fusion_attention.integrations.transformers_cache import PagedCache

LENGTHS = 13, 24, 19
Calls = list[tuple[Batch, Tensor]]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    integration.register()


def mask_of(kind: str) -> Tensor:
    """attention_mask of a padded batch, bool [3, 24]."""
    longest = max(LENGTHS)
    mask = torch.arange(longest)[None] < torch.tensor(LENGTHS)[:, None]
    if kind == "left-padded":
        return mask.flip(1)
    if kind == "holes":
        mask[0, 4:6] = False
        mask[2, 0] = False
    return mask


def calls_of(kind: str) -> tuple[Calls, Calls]:
    """(calls on this library, reference calls); the reference computes packed sequences one by one."""
    ids = tokens(3, max(LENGTHS))
    full = torch.ones(ids.shape, dtype=torch.bool)
    if kind == "short":  # every row sees at most as many keys as it may choose
        ids, full = ids[:, :4], full[:, :4]
    if kind == "masked":  # no row reads a list of latents (DeepSeek-V3.2, GLM-5)
        ids, full = ids[:, :9], full[:, :9]
    if kind in ("packed", "ends"):
        rows = [ids[i : i + 1, :n] for i, n in enumerate(LENGTHS)]
        together: Batch = {"input_ids": torch.cat(rows, 1), "use_cache": False}
        together["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        if kind == "ends":
            ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
            together |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        apart = [({"input_ids": row}, full[:1, : row.shape[1]]) for row in rows]
        return [(together, torch.ones(1, sum(LENGTHS), dtype=torch.bool))], apart
    keep = mask_of(kind) if "padded" in kind or kind == "holes" else full
    batch: Batch = {"input_ids": ids} | ({} if keep is full else {"attention_mask": keep.long()})
    return [(batch, keep)], [(batch, keep)]


KINDS = ("long", "short", "masked", "padded", "left-padded", "holes", "packed", "ends")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_match_eager_attention(name: str, kind: str) -> None:
    mine, theirs = calls_of(kind)
    # transformers' linear attention mixes packed sequences on a CPU.
    packed = name == "qwen4_exp" and len(theirs) > 1
    changed = {"layer_types": ["indexed_attention"] * 2} if packed else {}
    agree(gradients(make(name, **changed), mine), gradients(make(name, EAGER, **changed), theirs))


# ------------------------------------------------------------------------------------------------------------- caches


def cache_of(kind: str, model: Any) -> Any:
    if kind == "static":
        return StaticCache(model.config, max_cache_len=40)
    return PagedCache(model.config) if kind == "paged" else DynamicCache(config=model.config)


@torch.no_grad()
def steps(model: Any, cache: Any, mask: Tensor | None) -> Tensor:
    """Logits of a prompt in chunks and of single tokens, which end at every remainder of a block."""
    ids, logits = tokens(3, 24), []
    with in_float64(model):
        for first, end in ((0, 9), (9, 10), (10, 11), (11, 12), (12, 13), (13, 17), (17, 24)):
            given = {} if mask is None else {"attention_mask": mask[:, :end].long()}
            logits.append(model(ids[:, first:end], past_key_values=cache, use_cache=True, **given).logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("padding", ["none", "left-padded"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "paged"])
@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decode_with_caches_match_eager_attention(name: str, kind: str, padding: str) -> None:
    if kind == "static" and name == "deepseek_v4":
        kind = "dynamic"  # transformers has no static cache of its layers
    ours, theirs = make(name), make(name, EAGER)
    mask = None if padding == "none" else mask_of(padding)
    result = steps(ours, cache_of(kind, ours), mask), steps(theirs, DynamicCache(config=theirs.config), mask)
    keep = torch.ones(3, 24, dtype=torch.bool) if mask is None else mask
    agree(*({"logits": logits[keep]} for logits in result))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [{"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_equal_eager_attention(name: str, options: dict[str, Any]) -> None:
    if name == "deepseek_v4":
        options = {"num_beams": 2}
    prompt = {"input_ids": tokens(3, 24), "attention_mask": mask_of("left-padded").long()}
    results = []
    for attention in (OURS, EAGER):
        model = make(name, attention)
        with in_float64(model):
            results.append(model.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, **options))
    assert torch.equal(*results)
