"""The traffic model of docs/distributed.md counts the bytes that the schedules send."""

from typing import Any

import pytest
import torch
from support.worlds import Worlds

import fusion_attention as fa
from benchmarks.scale import H100, Step, cost

TOKENS, HEADS, KV_HEADS, DIM = 2048, 8, 4, 32


def sent(group: Any, schedule: str) -> int:
    """Bytes that this rank sends in a step, without the messages that compare calls."""
    from fusion_attention.distributed import groups

    groups.group_of(group).call("a first call tries the group out", {}, torch.device("cpu"))
    counted, post = 0, groups.Group.post

    def counting(self: Any, sends: Any, receives: Any, tag: int) -> Any:
        nonlocal counted
        counted += sum(tensor.numel() * tensor.element_size() for _, tensor in sends)
        return post(self, sends, receives, tag)

    groups.Group.post = counting  # type: ignore[method-assign]
    try:
        full = [torch.randn(1, TOKENS, heads, DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
        q, k, v, up = (fa.distributed.shard(t, group, schedule, TOKENS) for t in full)
        given = [t.requires_grad_() for t in (q, k, v)]
        out = fa.distributed.attention(
            *given, group=group, schedule=schedule, tokens=TOKENS, band=fa.Band.causal(), seed=1
        )
        out.backward(up)
    finally:
        groups.Group.post = post  # type: ignore[method-assign]
    return counted


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("schedule", ["allgather", "zigzag", "ulysses"])
def test_cost_model_equals_the_bytes_sent_by_each_schedule(worlds: Worlds, schedule: str, world: int) -> None:
    model = cost(Step(TOKENS, HEADS, KV_HEADS, DIM), H100, world, schedule)
    assert model is not None
    assert worlds.run(world, sent, schedule) == [model.sent] * world
