"""Layers that decode with a cache: the outputs of whole sequences, and calls that are refused."""

import copy
import re
from typing import Any

import pytest
import torch
from support.reference_layers import HEADS, LATENT, plain
from torch import Tensor

from fusion_attention import nn as dsa
from fusion_attention.contract import ContractError
from fusion_attention.testing.drawn import compare_with

DIM, DRAWS = 32, 16
STEPS = (7, 1, 4, 1, 1)


def make(form: str, stage: str) -> dsa.SparseAttention:
    torch.manual_seed(0)
    index: dict[str, Any] = {"index_heads": 3, "index_dim": 12, "top_k": 5}
    if form == "latent":
        layer: dsa.SparseAttention = dsa.SparseLatentAttention(DIM, HEADS, **LATENT, **index)
    else:
        layer = dsa.SparseSelfAttention(DIM, HEADS, kv_heads=2, **index)
    dsa.set_stage(layer, stage)  # type: ignore[arg-type]
    return layer.eval()


def step(layer: Any, x: Tensor, cache: dsa.Cache, **given: Any) -> Tensor:
    width = LATENT["rope_dim"] if isinstance(layer, dsa.SparseLatentAttention) else 8
    out: Tensor = layer(x, rope=dsa.rope_table(cache.positions(x), width), cache=cache, **given)[0]
    return out


@pytest.mark.parametrize("stage", dsa.STAGES)
@pytest.mark.parametrize("form", ["grouped", "latent"])
@torch.no_grad()
def test_steps_give_the_outputs_of_whole_sequences(form: str, stage: str) -> None:
    layer, x = make(form, stage), torch.randn(2, sum(STEPS), DIM)
    cache, exact = dsa.Cache(sum(STEPS)), copy.deepcopy(layer).double()
    out = torch.cat([step(layer, part, cache) for part in x.split(STEPS, 1)], 1)
    assert cache.lengths == [sum(STEPS)] * 2
    compare_with("out", out, lambda: torch.stack([plain(exact, one.double())[0] for one in x]), draws=DRAWS)


@torch.no_grad()
def test_sequences_of_their_own_lengths() -> None:
    layer, x, token = make("grouped", "sparse"), torch.randn(2, 9, DIM), torch.randn(2, 1, DIM)
    cache, exact, lengths = dsa.Cache(10), copy.deepcopy(layer).double(), (9, 4)
    x[1, 4:] = torch.nan  # padding
    step(layer, x, cache, lengths=torch.tensor(lengths))
    out = step(layer, token, cache)
    assert cache.lengths == [10, 5]
    whole = [torch.cat([x[b, :n], token[b]]).double() for b, n in enumerate(lengths)]
    compare_with("out", out[:, 0], lambda: torch.stack([plain(exact, one)[0][-1] for one in whole]), draws=DRAWS)


@torch.no_grad()
def test_a_call_that_fails_stores_nothing() -> None:
    layer, x = make("grouped", "sparse"), torch.randn(2, 3, DIM)
    cache, exact = dsa.Cache(4), copy.deepcopy(layer).double()
    with torch.inference_mode():
        step(layer, x[:, :2], cache)
    layer.indexer.top_k = 0
    with pytest.raises(ContractError):
        step(layer, x[:, 2:] + 1, cache)
    assert cache.lengths == [2, 2]
    layer.indexer.top_k = 5
    out = step(layer, x[:, 2:], cache)
    compare_with("out", out, lambda: torch.stack([plain(exact, one.double())[0][2:] for one in x]), draws=DRAWS)


def test_calls_that_are_refused() -> None:
    layer, x = make("grouped", "sparse"), torch.randn(2, 3, DIM)

    def refused(text: str, x: Tensor, cache: dsa.Cache, **given: Any) -> None:
        before = list(cache.lengths)
        with pytest.raises(ValueError, match=re.escape(text)):
            layer(x, cache=cache, **given)
        assert cache.lengths == before

    refused("SparseSelfAttention: cache: expected layer.eval() and torch.no_grad()", x, dsa.Cache(4))
    with torch.no_grad():
        refused("x: expected [B, S, dim] beside a cache, got [6, 32]", x.flatten(0, 1), dsa.Cache(4), lengths=[3, 3])
        refused("lengths: expected 2 numbers from 0 to 3, got [4, 1]", x, dsa.Cache(4), lengths=[4, 1])
        refused("capacity: expected at least 5 tokens for sequence 0, got 4", torch.randn(2, 5, DIM), dsa.Cache(4))
        full, token = dsa.Cache(4), x[:, :1]
        layer(x, cache=full)
        refused("nn.Cache: expected a batch of 2 sequences, got 1", token[:1], full)
        dsa.set_stage(layer, "dense")
        refused("nn.Cache: expected rows k, v, index, got k, v (a cache serves one layer in one stage)", token, full)
        dsa.set_stage(layer, "sparse")
        layer.double()
        with pytest.raises(ValueError, match=r"nn.Cache: capacity: expected at least 1 token, got 0"):
            dsa.Cache(0)
        refused("nn.Cache: k: expected rows [2, 8] float32 on cpu, got [2, 8] float64 on cpu", token.double(), full)
        layer.float().train()
        refused("expected layer.eval()", x, dsa.Cache(4))
