"""The judge names mask edges that are wrong inside the tiles that they cross."""

import itertools
import re

import pytest
import torch

from fusion_attention.ir.mask import Band
from fusion_attention.judging.judge import diagnose


def in_tiles(count: int, rows: int, keys: int, edge: str) -> torch.Tensor:
    """A causal mask [count, count] with an edge that is wrong inside the tiles that it crosses."""
    visible = torch.zeros(count, count, dtype=torch.bool)
    for i, j in itertools.product(range(0, count, rows), range(0, count, keys)):
        last_row, last_key = min(i + rows, count) - 1, min(j + keys, count) - 1
        for row, key in itertools.product(range(i, last_row + 1), range(j, last_key + 1)):
            if j <= last_row:
                visible[row, key] = last_key <= i or edge == "not applied" or key <= row + 1
    return visible


EDGES = {"not applied": "edge-tiles-unmasked", "one key behind": "window-off-by-one"}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(16, 16), (64, 32), (32, 64), (128, 64)])
@pytest.mark.parametrize("edge", EDGES)
def test_wrong_mask_edge_inside_tiles_is_diagnosed_with_tile_size(
    edge: str, rows: int, keys: int, gradients: bool
) -> None:
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
