"""shard(), unshard() and positions(): conversion between complete sequences and the shard of a rank."""

from collections.abc import Sequence
from typing import Any

import torch

from fusion_attention.distributed.groups import AnyGroup, Call, Group, GroupError, group_of
from fusion_attention.distributed.layout import SCHEDULES, Layout, layout_of
from fusion_attention.memory import empty

Tensor = torch.Tensor
Lengths = int | Sequence[int] | Tensor


def shard(x: Tensor, group: AnyGroup, schedule: str, lengths: Lengths, dim: int = 1) -> Tensor:
    """Returns this rank's shard of complete sequences.

    Every rank must have the complete tensor; there is no communication. The gradient of x is the shard's at its
    positions and zero elsewhere: sum it over ranks, like gradients of weights.

    Args:
        x: complete sequences along `dim`.
        group: the ranks; None: all.
        schedule: the schedule of attention(), which determines the distribution of tokens.
        lengths: the length S of padded sequences, or the lengths of packed ones.
        dim: the axis of tokens.

    Returns:
        A copy of the shard, in the order that attention() expects.

    Raises:
        GroupError: no group, or one that does not fit the schedule.
        ValueError: an unknown schedule, or lengths that do not add up to the axis.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or torchrun's
        >>> shard(torch.zeros(2, 300, 8), None, "zigzag", 300).shape
        torch.Size([2, 300, 8])
        >>> dist.destroy_process_group()
    """
    ranks, placement = group_and_placement("shard", group, schedule, lengths)
    _fits("shard", x, dim, sum(placement.lengths), "the lengths add up to")
    return _Shard.apply(x, placement, ranks.rank, dim % x.dim())


def unshard(x: Tensor, group: AnyGroup, schedule: str, lengths: Lengths, dim: int = 1) -> Tensor:
    """Returns complete sequences on every rank, from the shards of all ranks; the inverse of shard().

    Args, Raises: as in shard(): ranks, schedule (distribution of tokens), lengths, token axis; x is this rank's shard.

    Returns:
        All tokens along `dim`, in the order of their sequences. The gradient of a shard is the sum over ranks.
    """
    ranks, placement = group_and_placement("unshard", group, schedule, lengths)
    _fits("unshard", x, dim, placement.sizes[ranks.rank], f"rank {ranks.rank} has")
    return _Unshard.apply(x, ranks, schedule, placement, dim % x.dim())


def positions(group: AnyGroup, schedule: str, lengths: Lengths) -> Tensor:
    """Returns the positions of this rank's tokens within their sequences: int64, in local order; for rope.

    Args, Raises: as in shard(): the ranks, the schedule (distribution of tokens) and the sequence lengths.
    """
    ranks, placement = group_and_placement("positions", group, schedule, lengths)
    return torch.from_numpy(placement.positions(ranks.rank))


def group_and_placement(function: str, group: AnyGroup, schedule: str, lengths: Lengths) -> tuple[Group, Layout]:
    """Returns (the ranks of `group`, the distribution of tokens over them); lengths: tokens of each packed sequence, or
    the one length of padded sequences; function: the caller's name, for errors."""
    ranks = group_of(group)
    given = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    result = (given,) if isinstance(given, int) else given
    try:
        full = tuple(int(n) for n in result)
        valid = all(n >= 0 and n == m for n, m in zip(full, result, strict=True))
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(
            f"fusion_attention: distributed.{function}: lengths: expected tokens of each sequence, or one number, got "
            f"{lengths!r} (lengths, not cumulative ends)"
        )
    return ranks, layout_of(schedule, full, shape_of(function, ranks, schedule))


def shape_of(function: str, ranks: Group, schedule: str) -> tuple[int, ...]:
    """Returns the shape of the process group `ranks`: (ranks,), or that of a mesh; raises if the schedule needs another
    number of dimensions. function: the caller's name, for errors."""
    if schedule not in SCHEDULES:
        raise ValueError(
            f"fusion_attention: distributed.{function}: schedule: expected one of {', '.join(SCHEDULES)}, "
            f"got {schedule!r}"
        )
    shape = ranks.shape
    if (len(shape) == 2) != (schedule == "ulysses+ring"):
        wanted, advice = 1, 'mesh["name"] is one dimension of it'
        if len(shape) == 1:
            wanted, advice = 2, 'init_device_mesh("cpu", (ring, ulysses))'
        raise GroupError(
            f"fusion_attention: distributed.{function}: group: expected {wanted} dimension(s) for schedule "
            f"{schedule!r}, got {len(shape)} ({advice})"
        )
    return shape


def _fits(function: str, x: Tensor, dim: int, tokens: int, why: str) -> None:
    if not isinstance(x, Tensor) or not isinstance(dim, int):
        raise TypeError(
            f"fusion_attention: distributed.{function}: expected a tensor x and a number dim, got {type(x).__name__} "
            f"and {dim!r} (shard(x, group, schedule, lengths, dim=1))"
        )
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != tokens:
        raise ValueError(
            f"fusion_attention: distributed.{function}: x: expected {why} {tokens} tokens along dim {dim}, got shape "
            f"{list(x.shape)} (every rank must pass the lengths of the complete sequences)"
        )


def shard_of(x: Tensor, placement: Layout, rank: int, dim: int) -> Tensor:
    """Returns the tokens of rank `rank` from x, which has the tokens of all ranks along axis `dim`."""
    return x.index_select(dim, torch.from_numpy(placement.token_indices(rank)).to(x.device))


def _call(function: str, x: Tensor, ranks: Group, schedule: str, placement: Layout, dim: int) -> Call:
    rest = [*x.shape[:dim], *x.shape[dim + 1 :]]
    settings = {"schedule": schedule, "lengths": placement.lengths, "dim": dim, "rest": rest, "dtype": x.dtype}
    return ranks.call(function, settings, x.device)


def gathered(x: Tensor, call: Call, placement: Layout, dim: int) -> Tensor:
    """Returns the tokens of all ranks along `dim`, in the order of sequences, from each rank's shard x; a mesh gathers
    along its second dimension first."""
    rows = x.movedim(dim, 0).contiguous()
    if call.world == 1:
        parts = [rows]
    elif call.group.axes:
        columns = call.group.shape[1]
        row = call.rank // columns * columns
        parts = call.along(1).all_gather("gathering tokens", rows, placement.sizes[row : row + columns])
        sizes = [sum(placement.sizes[at : at + columns]) for at in range(0, call.world, columns)]
        parts = call.along(0).all_gather("gathering tokens", torch.cat(parts), sizes)
    else:
        parts = call.all_gather("gathering tokens", rows, placement.sizes)
    full = empty(x, (sum(placement.sizes), *rows.shape[1:]))
    indices = torch.cat([torch.from_numpy(placement.token_indices(rank)) for rank in range(len(placement.ranks))]).to(
        x.device
    )
    full[indices] = torch.cat(parts)
    return full.movedim(0, dim).contiguous()


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Layout, rank: int, dim: int) -> Tensor:
        ctx.settings = placement, rank, dim
        return shard_of(x, placement, rank, dim)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        placement, rank, dim = ctx.settings
        full = upstream.new_zeros([*upstream.shape[:dim], sum(placement.lengths), *upstream.shape[dim + 1 :]])
        indices = torch.from_numpy(placement.token_indices(rank)).to(upstream.device)
        return full.index_copy_(dim, indices, upstream), None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Group, schedule: str, placement: Layout, dim: int) -> Tensor:
        ctx.settings = ranks, schedule, placement, dim
        return gathered(x, _call("unshard", x, ranks, schedule, placement, dim), placement, dim)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        ranks, schedule, placement, dim = ctx.settings
        call = _call("unshard, backward", upstream, ranks, schedule, placement, dim)
        parts = [shard_of(upstream, placement, rank, dim).contiguous() for rank in range(ranks.world)]
        return summed_shards(call, parts), None, None, None, None


def summed_shards(call: Call, parts: list[Tensor]) -> Tensor:
    """Sends parts[r] to each rank r, and returns the sum of the tensors received; on a mesh of two dimensions, sums
    along the second one, then along the first."""
    if call.world == 1:
        return parts[0]
    if not call.group.axes:
        return _sum_to_each(call, parts)
    columns = call.group.shape[1]
    across = [
        torch.cat([parts[row * columns + column].flatten() for row in range(len(parts) // columns)])
        for column in range(columns)
    ]
    summed = _sum_to_each(call.along(1), across)
    mine = [parts[row * columns + call.rank % columns] for row in range(len(parts) // columns)]
    split = summed.split([chunk.numel() for chunk in mine])
    return _sum_to_each(call.along(0), [s.view(chunk.shape) for s, chunk in zip(split, mine, strict=True)])


def _sum_to_each(call: Call, parts: list[Tensor]) -> Tensor:
    return call.sum_to_each("summing gradients of tokens", parts)
