"""distributed.attention() on one to four ranks has the bits of one process, or is within the error bound."""

import inspect
import weakref
from typing import Any

import pytest
import torch
from support.bits import same
from support.sharded_calls import CASES, all_of, judge, named, one
from support.worlds import Worlds

import fusion_attention as fa
from fusion_attention.distributed import attention, schedules, shard

EVERY = list(CASES)
SOME = ["bf16", "packed_cross", "sink_packed", "dropout", "bias", "short"]


def is_summed(name: str | int, what: str) -> bool:
    """True if each rank has a summand of a gradient: of a sink, or of a bias that all rows share."""
    return what == "dsink" or (name, what) == ("bias_keys", "dbias")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("world", "names"), [(1, SOME[:2]), slow(2, SOME), (3, SOME), slow(3, EVERY), slow(4, SOME)])
def test_allgather_results_equal_one_process_bitwise(worlds: Worlds, world: int, names: list[str]) -> None:
    for name, result in worlds.run(world, all_of, "allgather", names, {"deterministic": True})[0].items():
        for what, ours in result.items():
            assert ours.dtype == one(name)[what].dtype
            assert (world > 1 and is_summed(name, what)) or same(ours, one(name)[what]), f"{name}: {what}"
        judge(name, result)


def test_allgather_with_summed_gradients_keeps_out_lse_and_dq_bitwise(worlds: Worlds) -> None:
    for name, result in worlds.run(3, all_of, "allgather", EVERY, {})[0].items():
        judge(name, result)
        assert all(same(result[what], one(name)[what]) for what in ("out", "lse", "dq")), name


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("schedule", "world", "names"),
    [
        ("ring", 3, SOME),
        slow("zigzag", 2, SOME),
        ("zigzag", 3, EVERY),
        slow("zigzag", 4, SOME),
        ("ulysses", 2, EVERY),
        ("ulysses", 4, ["bf16"]),  # two ranks share a key head
        slow("ulysses", 4, SOME),
        ("ulysses+ring", 4, EVERY),
        ("ulysses+ring", 2, ["rope", "short"]),
    ],
)
def test_every_schedule_matches_float64_reference_within_error_bound(
    worlds: Worlds, schedule: str, world: int, names: list[str]
) -> None:
    for name, result in worlds.run(world, all_of, schedule, names, {})[0].items():
        judge(name, result)
        if schedule == "ulysses" and not named(name)["sizes"].get("sink"):
            assert all(same(result[what], one(name)[what]) for what in ("out", "lse", "dq")), name


SEEDS = list(range(5))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(list(range(100, 160)), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize(
    ("schedule", "world"), [("allgather", 3), ("zigzag", 4), ("ring", 2), ("ulysses", 2), ("ulysses+ring", 4)]
)
def test_random_calls_match_float64_reference_on_every_schedule(
    worlds: Worlds, schedule: str, world: int, seeds: list[int]
) -> None:
    options = {"deterministic": True} if schedule == "allgather" else {}
    for seed, result in worlds.run(world, all_of, schedule, seeds, options)[0].items():
        judge(seed, result)
        if schedule == "allgather":
            assert all(is_summed(seed, what) or same(ours, one(seed)[what]) for what, ours in result.items()), seed


def blocks(group: Any, tokens: int) -> tuple[int, int]:
    """(forward, backward): the largest number of received tensors, keys or gradients, that a rank holds at once."""
    fresh, live, most = schedules.empty, 0, [0, 0]

    def gone() -> None:
        nonlocal live
        live -= 1

    def counted(*words: Any) -> torch.Tensor:
        nonlocal live
        tensor = fresh(*words)
        live += 1
        most[backward] = max(most[backward], live)
        weakref.finalize(tensor, gone)
        return tensor

    schedules.empty = counted
    try:
        q, k, v = (shard(torch.randn(1, tokens, 2, 8), group, "zigzag", tokens).requires_grad_() for _ in range(3))
        backward = 0
        out = attention(q, k, v, group=group, tokens=tokens)
        backward = 1
        out.sum().backward()
    finally:
        schedules.empty = fresh
    return most[0], most[1]


def test_ring_holds_at_most_two_key_blocks_for_any_world_size(worlds: Worlds) -> None:
    """A block is k and v; the backward pass also holds gradients that it receives and sends."""
    for world in (2, 3, 4):
        for forward, backward in worlds.run(world, blocks, 8 * 64 * world):
            assert forward <= 2 * 2
            assert backward <= 2 * 4


def test_distributed_attention_has_the_parameters_of_attention() -> None:
    """Exceptions are parameters that are not split among ranks."""
    ours, theirs = (dict(inspect.signature(f).parameters) for f in (attention, fa.attention))
    for name in ("drop_bits", "blocked_tiles", "blocked_bits"):
        del theirs[name]
    for name in ("group", "schedule", "tokens", "deterministic"):
        del ours[name]
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
