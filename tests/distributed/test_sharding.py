"""Placement of sequences on ranks (a pure function), and shard(), unshard(), positions() on one to four ranks."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.worlds import Worlds, text_of

from fusion_attention.distributed import GroupError, positions, shard, unshard
from fusion_attention.distributed.groups import group_of
from fusion_attention.distributed.layout import SCHEDULES, layout_of
from fusion_attention.ir.problem import CHUNK_UNIT

ONE = SCHEDULES[:4]  # on one dimension
LENGTHS = st.lists(st.integers(0, 20 * CHUNK_UNIT), min_size=0, max_size=6)


def pairs(placement: Any) -> list[int]:
    """Number of causal (row, key) pairs on each rank."""
    return [sum((p.end * (p.end + 1) - p.first * (p.first + 1)) // 2 for p in chunks) for chunks in placement.ranks]


@given(LENGTHS, st.sampled_from(ONE), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_each_token_is_on_one_rank_and_chunks_start_at_tiles(lengths: list[int], schedule: str, world: int) -> None:
    placement = layout_of(schedule, tuple(lengths), (world,))
    check(placement, lengths, world)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_ulysses_ring_mesh_divides_the_zigzag_shards(lengths: list[int], ring: int, columns: int) -> None:
    placement = layout_of("ulysses+ring", tuple(lengths), (ring, columns))
    check(placement, lengths, ring * columns)
    line = layout_of("zigzag", tuple(lengths), (ring,))
    for row in range(ring):
        tokens = [token for at in range(columns) for token in placement.token_indices(row * columns + at).tolist()]
        assert tokens == line.token_indices(row).tolist()


def check(placement: Any, lengths: list[int], world: int) -> None:
    assert len(placement.ranks) == world
    tokens = sorted(token for rank in range(world) for token in placement.token_indices(rank).tolist())
    assert tokens == list(range(sum(lengths)))
    for rank, chunks in enumerate(placement.ranks):
        assert list(chunks) == sorted(chunks)
        assert placement.sizes[rank] == sum(end - first for _, first, end in chunks)
        for b, first, end in chunks:
            assert first < end
            assert first % CHUNK_UNIT == 0
            assert end % CHUNK_UNIT == 0 or end == lengths[b]


@pytest.mark.parametrize("world", [2, 4, 8, 16])
@pytest.mark.parametrize("schedule", ["zigzag", "allgather"])
def test_zigzag_and_allgather_balance_causal_work(schedule: str, world: int) -> None:
    placement = layout_of(schedule, (256 * CHUNK_UNIT,), (world,))
    counted = pairs(placement)
    assert max(counted) * world <= 1.05 * sum(counted)
    assert max(placement.sizes) == min(placement.sizes)


def test_packed_sequences_stay_balanced() -> None:
    """Tokens and pairs are balanced within 5 %, with short and long sequences of odd lengths."""
    lengths = (*(37 + 91 * (at * at % 23) for at in range(60)), 5000, 9000, 77)
    placement = layout_of("zigzag", lengths, (4,))
    assert max(placement.sizes) * 4 <= 1.05 * sum(placement.sizes)
    assert max(pairs(placement)) * 4 <= 1.05 * sum(pairs(placement))


def test_a_sequence_shorter_than_the_world_leaves_ranks_without_rows() -> None:
    placement = layout_of("zigzag", (3,), (4,))
    assert sorted(placement.sizes) == [0, 0, 0, 3]


@pytest.mark.parametrize("schedule", ONE)
def test_layout_of_a_huge_length_is_computed_without_memory(schedule: str) -> None:
    placement = layout_of(schedule, (10**12,), (4,))
    assert max(placement.sizes) - min(placement.sizes) <= 2 * CHUNK_UNIT


def test_short_sequence_is_spread_over_all_ranks() -> None:
    placement = layout_of("zigzag", (5 * CHUNK_UNIT,), (4,))
    assert sorted(placement.sizes) == [*[CHUNK_UNIT] * 3, 2 * CHUNK_UNIT]


# ---------------------------------------------------------------------------------------------------------- on ranks


def there_and_back(group: Any, schedule: str, lengths: Any, dim: int) -> dict[str, Any]:
    tokens = lengths if isinstance(lengths, int) else sum(lengths)
    x = torch.arange(3.0 * tokens).reshape(3, tokens).movedim(1, dim).requires_grad_()
    local = shard(x, group, schedule, lengths, dim)
    back = unshard(local, group, schedule, lengths, dim)
    rank = group_of(group).rank
    (back * (rank + 1.0)).sum().backward()
    assert x.grad is not None
    return {
        "same": torch.equal(back, x),
        "tokens": local.shape[dim],
        # The loss of each rank covers all tokens; a rank receives the gradient of its shard only.
        "grad": torch.equal(x.grad, torch.isin(x, local) * float(sum(range(1, group_of(group).world + 1)))),
        "positions": positions(group, schedule, lengths),
        "values": local.detach().movedim(dim, 1)[0] % tokens if tokens else local.detach().flatten(),
    }


def mesh_of(group: Any, ring: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (ring, group_of(group).world // ring))


def on_a_mesh(group: Any, lengths: Any, ring: int) -> dict[str, Any]:
    return there_and_back(mesh_of(group, ring), "ulysses+ring", lengths, 1)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "lengths", "dim"),
    [
        ("zigzag", 9 * CHUNK_UNIT + 5, 1),
        ("ring", [5, 0, 4 * CHUNK_UNIT + 1, 70], 0),
        ("allgather", [17 * CHUNK_UNIT], -1),
        ("ulysses", 0, 1),
    ],
)
def test_unshard_restores_sharded_tensors_and_gradients(
    worlds: Worlds, world: int, schedule: str, lengths: Any, dim: int
) -> None:
    judge(worlds.run(world, there_and_back, schedule, lengths, dim), lengths)


@pytest.mark.parametrize("ring", [1, 2, 4])
def test_unshard_on_a_mesh_restores_tensors_and_gradients(worlds: Worlds, ring: int) -> None:
    lengths = [6 * CHUNK_UNIT + 1, 17, 70 * CHUNK_UNIT]
    judge(worlds.run(4, on_a_mesh, lengths, ring), lengths)


def judge(results: list[dict[str, Any]], lengths: Any) -> None:
    each = [lengths] if isinstance(lengths, int) else lengths
    within = torch.cat([torch.arange(n) for n in each])
    for result in results:
        assert result["same"]
        assert result["grad"]
        assert result["positions"].tolist() == within[result["values"].long()].tolist()
    assert sum(result["tokens"] for result in results) == sum(each)


def hostile(group: Any) -> list[str]:
    """Error texts of wrong calls."""
    x = torch.zeros(2, 8)
    calls = (
        lambda: shard(x, group, "zagzig", 8),
        lambda: shard(x, group, "zigzag", 9),
        lambda: shard(x, group, "zigzag", 8, 2),
        lambda: shard(x, group, "zigzag", [4, -4, 8]),
        lambda: shard(x, group, "zigzag", 8.5),  # type: ignore[arg-type]
        lambda: unshard(x, group, "zigzag", 9),
        lambda: shard(x, group, "ulysses+ring", 8),
        lambda: shard(x, mesh_of(group, 2), "zigzag", 8),
    )
    return [text_of(call, ValueError, GroupError) for call in calls]


def test_shard_and_unshard_raise_specific_errors(worlds: Worlds) -> None:
    wanted = (
        "shard: schedule: expected one of allgather, ring",
        "shard: x: expected the lengths add up to 9 tokens along dim 1, got shape [2, 8]",
        "along dim 2, got shape [2, 8]",
        "lengths: expected tokens of each sequence, or one number, got [4, -4, 8]",
        "got 8.5",
        "unshard: x: expected rank ",
        "group: expected 2 dimension(s) for schedule 'ulysses+ring', got 1",
        "group: expected 1 dimension(s) for schedule 'zigzag', got 2",
    )
    for messages in worlds.run(4, hostile):
        for text, expected_text in zip(messages, wanted, strict=True):
            assert expected_text in text
