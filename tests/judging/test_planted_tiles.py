"""Faults of tiled kernels are named; right kernels with other orders of tiles are not accused."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from support.planted_tiles import FAULTS, drawn, reordered

from fusion_attention.ir.mask import Band
from fusion_attention.judging.judge import diagnose

SEEDS = 6


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, seed: int) -> None:
    x = drawn(1000 * seed + [*FAULTS].index(fault))
    program, names = FAULTS[fault]
    result = diagnose("attention", x.inputs, {"out": program(x)})
    assert result.verdict == "wrong"
    assert {m.name for m in result.mistakes if m.confirmed} & {*names}, result


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(40))
def test_a_right_kernel_is_not_accused(seed: int) -> None:
    x = drawn(seed)
    result = diagnose("attention", x.inputs, {"out": reordered(x)})
    assert result.verdict == "right", result


def in_tiles(count: int, rows: int, keys: int, edge: str) -> torch.Tensor:
    """A causal mask [count, count] whose edge is wrong inside the tiles that it crosses."""
    visible = torch.zeros(count, count, dtype=torch.bool)
    for i, j in itertools.product(range(0, count, rows), range(0, count, keys)):
        last_row, last_key = min(i + rows, count) - 1, min(j + keys, count) - 1
        for row, key in itertools.product(range(i, last_row + 1), range(j, last_key + 1)):
            if j <= last_row:
                visible[row, key] = last_key <= i or edge == "not applied" or key <= row + 1
    return visible


EDGES = {"not applied": "edge-tiles-unmasked", "one key behind": "window-off-by-one"}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(16, 16), (64, 32), (32, 64), (128, 64)])
@pytest.mark.parametrize("edge", EDGES)
def test_an_edge_in_tiles_is_named(edge: str, rows: int, keys: int, gradients: bool) -> None:
    leaves = [torch.randn(1, 200, 2, 16, dtype=torch.float64) for _ in range(4)]
    q, k, v, dout = (t.float().double().transpose(1, 2) for t in leaves)
    visible, causal = in_tiles(200, rows, keys, edge), torch.ones(200, 200, dtype=torch.bool).tril()
    scores = q @ k.mT * 0.25
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    inputs = {name: t.float() for name, t in zip(("q", "k", "v", "dout"), leaves, strict=True)} | {
        "band": Band.causal()
    }
    if gradients:  # probabilities of other keys, with the right statistics
        right = scores.masked_fill(~causal, -torch.inf)
        weights = (scores - right.logsumexp(-1, keepdim=True)).exp() * visible
        results = {"dv": (weights.mT @ dout).transpose(1, 2).float()}
    else:
        results = {"out": (weights @ v).transpose(1, 2).float()}
        del inputs["dout"]
    result = diagnose("attention", inputs, results)
    first = result.mistakes[0]
    assert first.confirmed
    assert first.name == EDGES[edge], result
    sizes = (int(n) for n in re.findall(r"\d+", first.detail))  # other tiles may hide the same keys
    assert torch.equal(in_tiles(200, *sizes, edge), visible), result
