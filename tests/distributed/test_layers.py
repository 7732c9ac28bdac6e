"""Layers with sequences on several ranks are compared with plain layers: outputs, losses, gradients."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.reference_layers import LATENT, output_and_loss
from support.worlds import Worlds
from torch.nn.functional import pad

from fusion_attention import nn
from fusion_attention.distributed import positions, shard, unshard
from fusion_attention.testing.estimated_rounding_errors import compare_with

DIM, LENGTHS, S = 32, [130, 20], 130
INDEX: dict[str, Any] = {"index_heads": 3, "index_dim": 12, "top_k": 20}
ROPE = 6  # elements that rope turns
DRAWS = 8  # of calls as large as these
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
    """({out, loss, dx}, gradients of parameters) of a layer."""
    x = x.clone().requires_grad_()
    out, loss = layer(x, rope=tuple(t.to(x.dtype) for t in nn.rope_table(at, ROPE)), **how)
    (out * dout).sum().add(3 * loss).backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "loss": loss.detach(), "dx": x.grad}, grads


def inputs(packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x, and the gradient of out."""
    generator = torch.Generator().manual_seed(5)
    shape = (sum(LENGTHS), DIM) if packed else (len(LENGTHS), S, DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def plainly(form: str, stage: str, packed: bool) -> Tensors:
    """Expected results of all ranks, from the plain layer in float64."""
    layer, (x, dout) = layer_of(form, stage).double(), (t.double() for t in inputs(packed))
    leaf = x.clone().requires_grad_()
    rows = leaf.split(LENGTHS) if packed else [row[:n] for row, n in zip(leaf, LENGTHS, strict=True)]
    result = [output_and_loss(layer, of_one, ROPE) for of_one in rows]
    outs = [out for out, _ in result]
    out = torch.cat(outs) if packed else torch.stack([pad(t, (0, 0, 0, S - len(t))) for t in outs])
    loss = torch.stack([loss for _, loss in result]).sum() / sum(LENGTHS)
    ((out * dout).sum() + 3 * loss).backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out, "loss": loss, "dx": leaf.grad, **grads}


def of_ranks(group: Any, form: str, stage: str, packed: bool) -> Tensors:
    """Results of the ranks: unsharded tensors, and gradients summed over ranks."""
    x, dout = inputs(packed)
    lengths: Any = LENGTHS if packed else S
    layer = layer_of(form, stage, group)
    axis = int(not packed)
    local, local_out = (shard(t, group, "zigzag", lengths, axis) for t in (x, dout))
    how = {"lengths": LENGTHS} if packed else {"lengths": LENGTHS, "tokens": S}
    got, grads = results(layer, local, positions(group, "zigzag", lengths), local_out, **how)
    full = {name: unshard(got[name], group, "zigzag", lengths, axis) for name in ("out", "dx")}
    for grad in grads.values():
        dist.all_reduce(grad, group=group)
    return {**full, "loss": got["loss"].detach(), **grads}


def judged(by_rank: list[Tensors], form: str, stage: str, packed: bool) -> None:
    """Assert equal losses on all ranks, and results within float32 rounding of the plain layer."""
    first, *others = by_rank
    for other in others:
        assert torch.equal(other["loss"], first["loss"])
    compare_with(f"{form}, {stage}", first, partial(plainly, form, stage, packed), draws=DRAWS)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("form", "stage", "packed"),
    [
        pytest.param(form, stage, packed, marks=[pytest.mark.slow] * (packed == (form == "grouped")))
        for form in ("grouped", "latent")
        for stage in nn.STAGES
        for packed in (True, False)
    ],
)
def test_layer_gradients_on_two_ranks_match_one_process(worlds: Worlds, form: str, stage: str, packed: bool) -> None:
    judged(worlds.run(2, of_ranks, form, stage, packed), form, stage, packed)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3, 4])
def test_layer_gradients_on_1_3_and_4_ranks_match_one_process(worlds: Worlds, world: int) -> None:
    judged(worlds.run(world, of_ranks, "latent", "sparse", True), "latent", "sparse", True)
