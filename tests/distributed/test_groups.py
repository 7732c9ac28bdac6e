"""groups.py without attention: communication between ranks, and its error texts."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.worlds import Worlds, text_of
from torch.distributed.device_mesh import init_device_mesh

from fusion_attention.distributed.groups import GroupError, group_of

CPU = torch.device("cpu")
WORLDS = (1, 2, 3, 4)


def values(group: Any) -> dict[str, Any]:
    """Results of every communication function, with sizes that differ from rank to rank."""
    ranks = group_of(group)
    call = ranks.call("values", {"schedule": "ring", "length": 7}, CPU)
    mine = torch.arange(ranks.rank * 2.0).reshape(ranks.rank, 2) + 100 * ranks.rank
    gathered = call.all_gather("gathering", mine, list(range(ranks.world)))
    parts = [torch.full((3,), 1.0 / (1 + ranks.rank + r), dtype=torch.bfloat16) for r in range(ranks.world)]
    right, left = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    into = torch.full((2,), -1, dtype=torch.int64)
    if ranks.world > 1:
        call.exchange("passing", [(right, torch.tensor([ranks.rank, 5]))], [(left, into)]).wait()
    summed = call.sum_to_each("summing", [tensor.float() for tensor in parts])
    return {
        "gathered": torch.cat(gathered),
        "into": into,
        "summed": summed,
        "all": call.sum_to_all("summing", torch.tensor([1.0 + ranks.rank])),
        "shape": ranks.shape,
    }


@pytest.mark.parametrize("world", WORLDS)
def test_gather_exchange_and_sums_return_the_sent_values(worlds: Worlds, world: int) -> None:
    for rank, result in enumerate(worlds.run(world, values)):
        wanted = torch.cat([torch.arange(r * 2.0).reshape(r, 2) + 100 * r for r in range(world)])
        assert torch.equal(result["gathered"], wanted)
        assert result["into"].tolist() == ([(rank - 1) % world, 5] if world > 1 else [-1, -1])
        summed = torch.zeros(3)
        for other in range(world):
            summed += torch.full((3,), 1.0 / (1 + rank + other), dtype=torch.bfloat16).float()
        assert torch.equal(result["summed"], summed)
        assert result["all"].item() == world * (world + 1) / 2
        assert result["shape"] == (world,)


def under_other_names(group: Any) -> list[float]:
    """Sums over a group and equal meshes of the same ranks, while one rank is ahead of the others."""
    ranks, result = group_of(group), []
    mesh, again = (init_device_mesh("cpu", (ranks.world,)) for _ in range(2))
    assert mesh == again
    for at, named in enumerate((group, mesh, again, group)):
        time.sleep(0.1 * ranks.rank)
        call = group_of(named).call("named", {"at": at}, CPU)
        result.append(call.sum_to_all("summing", torch.tensor([1.0 + at])).item())
    return result


def test_group_and_meshes_of_the_same_ranks_are_interchangeable(worlds: Worlds) -> None:
    assert worlds.run(4, under_other_names) == [[4.0, 8.0, 12.0, 16.0]] * 4


def of_a_kept_group(group: Any) -> str:
    subgroup = dist.new_group(list(range(dist.get_world_size(group))))
    group_of(subgroup).call("kept", {}, CPU)
    dist.barrier(group)
    dist.destroy_process_group(subgroup)
    return text_of(lambda: group_of(subgroup).call("kept", {}, CPU))


def of_equal_meshes(group: Any) -> list[float]:
    """Sums over equal meshes, because ranks do not delete a mesh at the same time."""
    meshes, result = [], []
    for at in range(3):
        mesh = init_device_mesh("cpu", (2, 2))
        call = group_of(mesh).call("meshes", {"at": at}, CPU)
        result.append(call.sum_to_all("summing", torch.tensor([1.0 + at])).item())
        if dist.get_rank(group) == 1:
            meshes.append(mesh)
    return result


def test_equal_meshes_released_at_different_times_keep_working(worlds: Worlds) -> None:
    assert worlds.run(4, of_equal_meshes) == [[4.0, 8.0, 12.0]] * 4


def different(group: Any) -> str:
    ranks = group_of(group)
    settings = {"schedule": "ring", "length": 7, "dtype": "odd" if ranks.rank == 1 else "even"}
    return text_of(lambda: ranks.call("values", settings, CPU))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_different_settings_all_raise(worlds: Worlds, world: int) -> None:
    for rank, text in enumerate(worlds.run(world, different)):
        assert f"distributed.values: rank {rank} of {world}, schedule ring" in text
        assert "rank 0 calls with dtype=even, rank 1 with dtype=odd" in text


def faulty(group: Any) -> str:
    ranks = group_of(group)
    fault = "q has 3 rows, not 4" if ranks.rank == 1 else ""
    return text_of(lambda: ranks.call("values", {"length": 8}, CPU, fault=fault))


def not_of_it(group: Any) -> str:
    """Error text of ranks 1 and above for a group of rank 0 alone."""
    alone = dist.new_group([0])
    return "expected a group of this process" if dist.get_rank(group) == 0 else text_of(lambda: group_of(alone))


def on_a_gpu(group: Any) -> str:
    return text_of(lambda: group_of(group).call("values", {}, torch.device("cuda")))


def that_lacks(group: Any) -> str:
    """Error text of a back end that cannot send; the first call finds it, whichever data it sends."""
    ranks = group_of(dist.new_group(list(range(group_of(group).world))))

    def refusing(*_: Any) -> list[Any]:
        raise RuntimeError("send is not supported")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(ranks), "post", refusing)
        return text_of(lambda: ranks.call("values", {}, CPU))


def of_another_kind(group: Any) -> str:
    return text_of(lambda: group_of(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world", "call", "wanted"),
    [
        (4, of_a_kept_group, "the process group was destroyed (make a new one)"),
        (3, faulty, "on rank 1 q has 3 rows, not 4"),
        (4, not_of_it, "expected a group of this process"),
        (2, on_a_gpu, "its back end 'gloo' cannot send tensors on cuda"),
        (4, that_lacks, "rank {rank} of 4, trying the group out: send is not supported"),
        (1, of_another_kind, "expected a ProcessGroup, a DeviceMesh or None, got int"),
    ],
)
def test_group_faults_raise_on_every_rank(worlds: Worlds, world: int, call: Callable[[Any], str], wanted: str) -> None:
    for rank, text in enumerate(worlds.run(world, call)):
        assert wanted.format(rank=rank) in text


def test_missing_init_process_group_is_named_in_the_error() -> None:
    with pytest.raises(GroupError, match="init_process_group"):
        group_of(None)


def of_two_calls(group: Any) -> str:
    """Error text if rank 0 repeats the first and rank 1 the second of two earlier calls."""
    ranks = group_of(group)
    for which in (0, 1):
        ranks.call("values", {"which": which}, CPU)
    call = ranks.call("values", {"which": ranks.rank}, CPU)
    return text_of(lambda: call.all_gather("gathering", torch.tensor([1.0 + ranks.rank]), [1, 1]))


def dying(group: Any) -> str:
    ranks = group_of(group)
    call = ranks.call("values", {"length": 9}, CPU)
    call.all_gather("gathering", torch.tensor([1.0]), [1] * ranks.world)
    if ranks.rank == 1:
        os._exit(9)
    begun = time.monotonic()
    text = text_of(lambda: call.all_gather("gathering again", torch.tensor([1.0]), [1] * ranks.world))
    assert time.monotonic() - begun < 10
    return text


@pytest.mark.slow
def test_mismatched_calls_and_rank_death_raise_within_the_timeout() -> None:
    pool = Worlds(3, timeout=4.0)
    try:
        for rank, text in enumerate(pool.run(2, of_two_calls)):
            assert f"rank {rank} of 2, gathering: " in text
        pool.end()
        result = pool.run(3, dying, kill=[1])
        for rank in (0, 2):
            assert f"distributed.values: rank {rank} of 3, gathering again: " in result[rank]
            assert "a rank died" in result[rank]
    finally:
        pool.end()
