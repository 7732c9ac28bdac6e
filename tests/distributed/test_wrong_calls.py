"""Calls that are wrong on one rank or on all raise a clear error on every rank."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.worlds import Worlds, text_of

import fusion_attention as fa
from fusion_attention import Band, ContractError
from fusion_attention.distributed import GroupError, attention, shard
from fusion_attention.distributed.groups import group_of

S = 300
ERRORS = (GroupError, ContractError, ValueError, TypeError, NotImplementedError)


def shares(group: Any, schedule: str = "zigzag", **more: Any) -> tuple[torch.Tensor, ...]:
    """q, k and v of this rank."""
    torch.manual_seed(1)
    return tuple(shard(torch.randn(1, S, 4, 8, **more), group, schedule, S) for _ in range(3))


def sound(group: Any, rank: int, **words: Any) -> Any:
    return attention(*shares(group), **{"group": group, "tokens": S, **words})


def short(group: Any, rank: int, name: str) -> Any:
    """Attention with a missing token in q, k or v of rank 1."""
    given = dict(zip("qkv", shares(group), strict=True))
    if rank == 1:
        given[name] = given[name][:, 1:]
    if name == "k":
        given["v"] = given["v"][:, : given["k"].shape[1]]
    return attention(**given, group=group, tokens=S)


def differentiated(group: Any, rank: int) -> Any:
    q, k, v = shares(group)
    return attention(q.requires_grad_(rank == 0), k, v, group=group, tokens=S)


def packed(group: Any, rank: int, **words: Any) -> Any:
    q, k, v = (t[0] for t in shares(group))
    return attention(q, k, v, **{"group": group, "layout": "TND", **words})


def through_lse(group: Any, rank: int) -> Any:
    q, k, v = (t.requires_grad_() for t in shares(group))
    _, lse = attention(q, k, v, group=group, tokens=S, return_lse=True)
    lse.nan_to_num(neginf=0.0).sum().backward()


def twice(group: Any, rank: int) -> Any:
    q, k, v = (t.requires_grad_() for t in shares(group))
    (dq,) = torch.autograd.grad(attention(q, k, v, group=group, tokens=S).square().sum(), q, create_graph=True)
    dq.sum().backward()


def transformed(group: Any, rank: int) -> Any:
    q, k, v = shares(group)
    return torch.func.grad(lambda q: attention(q, k, v, group=group, tokens=S).sum())(q)


def of_one_row(group: Any, rank: int, schedule: str, **words: Any) -> Any:
    """Attention in which a rank's part of the mask has one row, like a mask row for all queries."""
    q, blocked = torch.zeros(1, 65, 2, 8), torch.zeros(65, 65, dtype=torch.bool)
    rows_of_rank, mine = shard(q, group, schedule, 65), shard(blocked, group, schedule, 65, dim=0)
    return attention(
        rows_of_rank, rows_of_rank, rows_of_rank, group=group, schedule=schedule, tokens=65, blocked=mine, **words
    )


CALLS: list[tuple[Callable[[Any, int], Any], str]] = [
    (lambda g, r: sound(g, r, scale=0.1 * (r + 1)),
     ("GroupError: fusion_attention: distributed.attention: rank {rank} of 2, schedule zigzag, "
      "comparing the call with the other ranks': rank 0 calls with scale=0.1, rank 1 with scale=0.2")),
    (lambda g, r: sound(g, r, band=Band.causal() if r else None),
     "rank 0 calls with band=None, rank 1 with band=Band.causal()"),
    (lambda g, r: attention(*shares(g, dtype=(torch.float16, torch.bfloat16)[r]), group=g, tokens=S),
     "rank 1 with q=[1, 300, 4, 8] torch.bfloat16"),
    (lambda g, r: sound(g, r, schedule=("ring", "zigzag")[r]),
     "rank 0 calls with schedule=ring, rank 1 with schedule=zigzag"),
    (lambda g, r: sound(g, r, tokens=None), "shards of different sizes need tokens="),
    (lambda g, r: sound(g, r, tokens=S + r), "rank 0 calls with q=[1, 300, 4, 8] torch.float32, k=[1, 300, 4, 8]"),
    (differentiated, "rank 0 calls with q=[1, 300, 4, 8] torch.float32 with a gradient, rank 1 with"),
    (lambda g, r: packed(g, r, q_len=[[100, 200], [200, 100]][r]),
     "rank 0 calls with q_len=[100, 200], kv_len=[100, 200], rank 1 with q_len=[200, 100]"),
    (lambda g, r: short(g, r, "q"), "on rank 1 q has "),
    (lambda g, r: short(g, r, "k"), "on rank 1 k has "),
    (lambda g, r: packed(g, r, q_len=[100, 100]), "q has 1"),
    (lambda g, r: sound(g, r, blocked=torch.zeros(S, S, dtype=torch.bool)), "blocked has 300 rows, and this rank has "),
    (lambda g, r: packed(g, r, q_len=[100, 200], bias=torch.zeros(1, 200)), "bias: needs padded sequences"),
    (lambda g, r: of_one_row(g, r, "allgather", deterministic=True),
     "blocked: needs ranks with more than one row: one row could be this rank's, or one for all rows"),
    (lambda g, r: of_one_row(g, r, "ulysses"), "blocked: needs ranks with more than one row"),
    (packed, "ContractError: attention: q_len"),
    (lambda g, r: packed(g, r, q_len=[S], tokens=S), "tokens: expected None with packed sequences, got 300"),
    (lambda g, r: sound(g, r, tokens=-1), "tokens: expected S or (S1, S2), got -1"),
    (lambda g, r: sound(g, r, tokens=2**63), "tokens: expected S or (S1, S2), got 9223372036854775808"),
    (lambda g, r: shard(None, g, "zigzag", S),  # type: ignore[arg-type]
     "TypeError: fusion_attention: distributed.shard: expected a tensor x and a number dim, got NoneType"),
    (lambda g, r: attention(shares(g)[0][:, :, :3], *shares(g)[1:], group=g, tokens=S, schedule="ulysses"),
     "ContractError: attention: k"),
    (lambda g, r: sound(g, r, deterministic=True), "deterministic: needs schedule=\"allgather\", got 'zigzag'"),
    (lambda g, r: sound(g, r, schedule="spiral"),
     "schedule: expected one of allgather, ring, zigzag, ulysses, ulysses+ring, got 'spiral'"),
    (lambda g, r: sound(g, r, drop_bits=torch.zeros(8, dtype=torch.uint8)),
     "TypeError: fusion_attention: distributed.attention: drop_bits: cannot be sharded"),
    (lambda g, r: sound(g, r, blocked_tiles=torch.zeros(1, 1, 3, 3, dtype=torch.int32)),
     "TypeError: fusion_attention: distributed.attention: blocked_tiles: cannot be sharded"),
    (lambda g, r: sound(g, r, is_causal=True), "band=Band.causal("),
    (lambda g, r: attention(3, 4, 5, group=g), "ContractError: attention: q"),  # type: ignore[arg-type]
    (lambda g, r: sound(g, r, layout="bsnd"), "ContractError: attention: layout"),
    (through_lse, "NotImplementedError: fusion_attention: the loss goes through the lse"),
    (twice, "NotImplementedError: fusion_attention: cannot differentiate twice"),
    (transformed, "a trace cannot contain communication between ranks"),
]  # fmt: skip


def every_text(group: Any) -> list[str]:
    """The text of every wrong call's error on this rank."""
    rank = group_of(group).rank
    return [text_of(lambda call=call: call(group, rank), *ERRORS) for call, _ in CALLS]


def test_invalid_call_raises_on_every_rank_with_the_cause(worlds: Worlds) -> None:
    for rank, texts in enumerate(worlds.run(2, every_text)):
        for text, (_, wanted) in zip(texts, CALLS, strict=True):
            assert wanted.format(rank=rank) in text, (wanted, text)


def uncomputed(group: Any) -> bool:
    """True if a call is right after calls that no back end computes, which fail while keys are being sent."""
    want = fa.attention(*(torch.ones(1, S, 4, 8) for _ in range(3)))
    for _ in range(3):
        with pytest.raises(fa.BackendError, match="not float64"):
            attention(*shares(group, dtype=torch.float64), group=group, tokens=S)
    q, k, v = (torch.ones_like(t) for t in shares(group))
    return torch.equal(attention(q, k, v, group=group, tokens=S), shard(want, group, "zigzag", S))


def test_group_works_after_a_back_end_error(worlds: Worlds) -> None:
    assert worlds.run(3, uncomputed) == [True] * 3


def of_many_backwards(group: Any) -> bool:
    """True if a retained graph gives equal gradients twice."""
    q, k, v = (t.requires_grad_() for t in shares(group))
    out = attention(q, k, v, group=group, tokens=S, band=Band.causal())
    first, second = (torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True) for _ in range(2))
    return all(map(torch.equal, first, second))


def test_retained_graph_returns_the_same_gradients_twice(worlds: Worlds) -> None:
    assert worlds.run(3, of_many_backwards) == [True] * 3


def drawing(group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results with dropout without a given seed; ranks with different generators must draw the same bits."""
    torch.manual_seed(group_of(group).rank)
    ones = torch.ones(1, S, 1, 4)
    keys = torch.eye(S)[None, :, None]
    q, k, v = (shard(t, group, "allgather", S) for t in (ones, ones, keys))
    mine, other = (attention(q, k, v, group=group, schedule="allgather", tokens=S, keep_prob=0.5) for _ in range(2))
    return mine, other


def test_ranks_with_different_generators_share_the_dropout_seed(worlds: Worlds) -> None:
    result = worlds.run(2, drawing)
    for mine, other in result:
        assert 0.4 < (mine > 0).float().mean() < 0.6
        assert not torch.equal(mine, other)


def of_other_seeds(group: Any) -> str:
    """Error text if ranks pass different seeds to a call that was checked before."""
    sound(group, 0, keep_prob=0.5, seed=1)
    return text_of(lambda: sound(group, 0, keep_prob=0.5, seed=group_of(group).rank))


def dying(group: Any, schedule: str) -> str:
    ranks = group_of(group)
    q, k, v = (t.requires_grad_() for t in shares(group, schedule))
    out = attention(q, k, v, group=group, schedule=schedule, tokens=S)
    if ranks.rank == 1:
        os._exit(9)
    begun = time.monotonic()
    text = text_of(lambda: out.sum().backward())
    assert time.monotonic() - begun < 15
    return text


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zigzag", "allgather", "ulysses"])
def test_rank_death_raises_on_the_other_ranks(schedule: str) -> None:
    world = 2 if schedule == "ulysses" else 3
    pool = Worlds(world, timeout=4.0)
    try:
        for rank, text in enumerate(pool.run(world, dying, schedule, kill=[1])):
            if rank != 1:
                assert f"distributed.attention, backward: rank {rank} of {world}, schedule {schedule}, " in text
                assert "a rank died" in text
    finally:
        pool.end()


@pytest.mark.slow
def test_ranks_with_different_dropout_seeds_raise() -> None:
    pool = Worlds(2, timeout=4.0)
    try:
        for text in pool.run(2, of_other_seeds):
            assert "step 1: keys of rank" in text
    finally:
        pool.end()
