"""Layers whose sequences lie on several ranks beside the same layers of one process: outputs, losses, gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.worlds import Worlds

import fusion_attention as fa
from fusion_attention import nn
from fusion_attention.distributed import positions, shard, unshard
from fusion_attention.testing import beside_plain

DIM, LENGTHS, S = 32, [150, 75], 150
INDEX: dict[str, Any] = {"index_heads": 3, "index_dim": 12, "top_k": 20}
LATENT: dict[str, Any] = {"q_rank": 20, "kv_rank": 16, "nope_dim": 8, "rope_dim": 6, "v_dim": 10}
Tensors = dict[str, torch.Tensor]


def layer_of(form: str, stage: Any, group: Any = None) -> nn.SparseAttention:
    torch.manual_seed(3)
    ranks = {"group": group, "schedule": "zigzag"}
    if form == "latent":
        layer: nn.SparseAttention = nn.SparseLatentAttention(DIM, 4, **LATENT, **INDEX, **ranks)
    else:
        layer = nn.SparseSelfAttention(DIM, 4, kv_heads=2, **INDEX, **ranks)
    nn.set_stage(layer, stage)
    return layer


def results(layer: Any, x: torch.Tensor, at: torch.Tensor, dout: torch.Tensor, **how: Any) -> tuple[Tensors, Tensors]:
    """What a layer returns, and what its backward leaves in x and in the parameters."""
    x = x.clone().requires_grad_()
    out, loss = layer(x, rope=tuple(t.to(x.dtype) for t in nn.rope_table(at, 6)), **how)
    (out * dout).sum().add(3 * loss).backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "loss": loss.detach(), "dx": x.grad}, grads


def of_ranks(group: Any, form: str, stage: str, packed: bool) -> torch.Tensor:
    torch.manual_seed(5)
    shape = (sum(LENGTHS), DIM) if packed else (len(LENGTHS), S, DIM)
    x, dout = torch.randn(shape), torch.randn(shape)
    whole_at = torch.cat([torch.arange(n) for n in LENGTHS]) if packed else torch.arange(S)
    lengths: Any = LENGTHS if packed else S
    one = layer_of(form, stage)
    plain, plain_grads = results(one, x, whole_at, dout, lengths=LENGTHS)
    one.zero_grad()
    with fa.use_backend("golden"):
        golden, golden_grads = results(one.double(), x.double(), whole_at, dout.double(), lengths=LENGTHS)
    layer = copy.deepcopy(layer_of(form, stage, group))
    axis = int(not packed)
    local, local_out = (shard(t, group, "zigzag", lengths, axis) for t in (x, dout))
    how = {"lengths": LENGTHS} if packed else {"lengths": LENGTHS, "tokens": S}
    got, grads = results(layer, local, positions(group, "zigzag", lengths), local_out, **how)
    for name in ("out", "dx"):
        beside_plain(name, unshard(got[name], group, "zigzag", lengths, axis), golden[name], plain[name], S)
    beside_plain("loss", got["loss"], golden["loss"].double(), plain["loss"], S)
    assert grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        dist.all_reduce(grad, group=group)
        beside_plain(name, grad, golden_grads[name], plain_grads[name], S)
    return got["loss"]


@pytest.mark.parametrize(
    ("form", "stage", "packed"),
    [
        pytest.param(form, stage, packed, marks=[pytest.mark.slow] * (packed == (form == "grouped")))
        for form in ("grouped", "latent")
        for stage in nn.STAGES
        for packed in (True, False)
    ],
)
def test_ranks_learn_what_one_process_does(worlds: Worlds, form: str, stage: str, packed: bool) -> None:
    first, second = worlds.run(2, of_ranks, form, stage, packed)
    assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3, 4])
def test_any_number_of_ranks(worlds: Worlds, world: int) -> None:
    worlds.run(world, of_ranks, "latent", "sparse", True)
