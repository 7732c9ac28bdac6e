"""Communication between the ranks of one call: order, tags and error messages.

All data is sent point to point, as bytes, with a tag of the call, so that a call never receives another call's data.
This module computes sums over ranks, in the order of ranks.
"""

from __future__ import annotations

import copy
import itertools
import json
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store, default_pg_timeout

from fusion_attention.memory import empty

Tensor = torch.Tensor
AnyGroup = dist.ProcessGroup | DeviceMesh | None
# Number of compared signatures that a group caches.
_AGREED = 256
# Devices that a back end of torch.distributed supports; others may support any.
_SENDS = {"gloo": ("cpu",), "nccl": ("cuda",), "mpi": ("cpu",)}
_NOT_ALL = "a rank died, raised another error (see its output), made another call, or is later than the group's timeout"
_COMPARING = "comparing the call with the other ranks'"
_FAILURES = (RuntimeError, ValueError, OSError)  # exceptions of torch.distributed


class GroupError(RuntimeError):
    """A call of several ranks failed; the message has function, rank, schedule, step, cause and advice.

    If only some ranks raise it (one died, or was late), the ranks' numbers of calls differ, so make a new group.
    """


class Pending:
    """Sends and receives in progress, with references to their memory until they are complete.

    Leaving a `with` block waits for all data, also after an error, because an unfinished operation would break the
    connection for later calls.
    """

    def __init__(self, call: Call, step: str, works: list[Any], buffers: list[Tensor]) -> None:
        self._call, self._step, self._works, self._buffers = call, step, works, buffers

    def wait(self) -> None:
        """Waits until all data has been sent and received."""
        with self._call.reporting(self._step):
            for work in self._works:
                work.wait()
        self._works, self._buffers = [], []

    def __enter__(self) -> Pending:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):
            with suppress(GroupError):
                self.wait()


class Group:
    """The ranks of a process group, or of a mesh of one or two dimensions.

    Attributes:
        rank, world: the rank of this process and the number of ranks.
        axes: the groups along each dimension of a mesh of two dimensions; else empty.
    """

    def __init__(self, data: dist.ProcessGroup, ranks: Sequence[int], axes: tuple[Group, ...] = ()) -> None:
        self.axes, self.ranks = axes, tuple(ranks)
        self._weak = weakref.ref(data)  # weak: _GROUPS maps `data` to this object
        self._meshes: dict[tuple[Group, tuple[int, ...]], Group] = {}  # (group of the other axis, all ranks) -> mesh
        self.rank, self.world = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.calls = itertools.count()
        self._agreed: OrderedDict[tuple[tuple[str, str], ...], dict[str, Any]] = OrderedDict()
        self._compared = itertools.count()
        self._tried: set[str] = set()  # device types for which try_out() has run

    @property
    def _data(self) -> dist.ProcessGroup:
        result = self._weak()
        if result is None:
            raise _destroyed()
        return result

    def crossed(self, other: Group, ranks: tuple[int, ...]) -> Group:
        """Returns a group of ranks in a two-dimensional mesh, this group along its first dimension, `other` along its
        second; ranks: global numbers of all ranks, row by row."""
        if (other, ranks) not in self._meshes:
            self._meshes[other, ranks] = Group(self._data, ranks, (self, other))
        return self._meshes[other, ranks]

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each dimension of the group, one or two."""
        return tuple(axis.world for axis in self.axes) or (self.world,)

    def call(
        self,
        function: str,
        settings: Mapping[str, Any],
        device: torch.device,
        fault: str = "",
        varies: object = None,
        advice: str = "",
    ) -> Call:
        """Starts a joint call of all ranks and returns it; every rank must start it, with the same settings.

        Args:
            function: the name of the public function.
            settings: lengths, dtypes and options that must be equal on all ranks; ranks compare them at the first call.
            device: the device of the tensors.
            fault: an error of this rank's shard, or ""; at the first call with these settings every rank raises it.
            varies: a value that must be equal and changes from call to call; it is in the message tags, not compared.
            advice: advice for settings that differ.

        Raises:
            GroupError: on every rank, if settings differ or a rank has a fault.
        """
        words = tuple((name, str(value)) for name, value in settings.items())
        call_cache = self._agreed.get(words)
        call = Call(self, function, str(settings.get("schedule", "")), device, call_cache or {})
        call.begin(repr((words, varies, next(self.calls))))
        if self.world > 1:
            call.sends(device)
        if call_cache is None:
            call.agree(words, fault, advice)
            if device.type not in self._tried:
                call.try_out()
                self._tried.add(device.type)
            self._agreed[words] = call.call_cache
            if len(self._agreed) > _AGREED:
                self._agreed.popitem(last=False)
        elif fault:
            raise call.error("before the first step", fault, "the other ranks wait for this one")
        return call

    def compare(self, text: str) -> list[str]:
        """Exchanges a text with all ranks; returns all texts in the order of ranks. The group's store transports them,
        because it can report which ranks did not send one."""
        if self.axes:
            rows, columns = self.axes
            return [text for line in rows.compare("\n".join(columns.compare(text))) for text in line.split("\n")]
        store, number = _get_process_group_store(self._data), next(self._compared)
        keys = [f"fusion_attention/{number}/{rank}" for rank in range(self.world)]
        store.set(keys[self.rank], text)
        try:
            store.wait(keys, _timeout(self._data))
        except _FAILURES as error:
            silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(f"nothing came from rank {', '.join(silent)}") from error
        # All ranks have written this message, so all have read the message before the previous one.
        store.delete_key(f"fusion_attention/{number - 2}/{self.rank}")
        return [store.get(key).decode() for key in keys]

    def backend(self, device: torch.device) -> str:
        """Returns the name of torch.distributed's back end ("gloo", "nccl") for a device; "" if there is none."""
        try:
            config = dist.get_backend_config(self._data)
        except (*_FAILURES, TypeError) as error:  # the caller destroyed the group
            raise _destroyed() from error
        served = dict(entry.split(":") for entry in config.split(",") if ":" in entry)
        return served.get(device.type, "" if served else config)

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int) -> list[Any]:
        """Starts sends and receives, each a list of (rank in this group, byte tensor), all with one tag; returns
        torch's work objects."""
        operations = [
            dist.P2POp(what, tensor, self.ranks[rank], self._data, tag)
            for what, pairs in ((dist.irecv, receives), (dist.isend, sends))
            for rank, tensor in pairs
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []


class Call:
    """One function call that all ranks of a group make together; every communication has a name, for error messages.

    Attributes:
        call_cache: a dictionary that all calls with the same settings share.
    """

    def __init__(
        self, group: Group, function: str, schedule: str, device: torch.device, call_cache: dict[str, Any]
    ) -> None:
        self.group, self.rank, self.world = group, group.rank, group.world
        self.function, self.schedule, self.device, self.call_cache = function, schedule, device, call_cache
        self._key, self._steps, self._derivatives = 0, itertools.count(), itertools.count()

    def begin(self, text: str, key: int = 0) -> None:
        """Derives this call's key of message tags from `text` and `key`; calls with others never receive its data."""
        self._key = zlib.crc32(f"{self.function} {text}".encode(), key)

    def along(self, axis: int) -> Call:
        """Returns a Call with only the ranks along dimension `axis` of the group's mesh."""
        call = copy.copy(self)
        call.group = self.group.axes[axis]
        call.rank, call.world = call.group.rank, call.group.world
        return call

    def error(self, step: str, what: str, advice: str) -> GroupError:
        """Returns a GroupError whose message has function, rank, schedule, the failed step, the error and advice."""
        schedule = f", schedule {self.schedule}" if self.schedule else ""
        return GroupError(
            f"fusion_attention: distributed.{self.function}: rank {self.rank} of {self.world}{schedule}, {step}: "
            f"{what} ({advice})"
        )

    def alone(self) -> Call:
        """Returns a Call with this rank only, which then communicates with no other."""
        call = copy.copy(self)
        call.rank, call.world = 0, 1
        return call

    @contextmanager
    def reporting(self, step: str) -> Iterator[None]:
        """Returns a context that converts errors of torch.distributed to GroupErrors; step: the failed action."""
        try:
            yield
        except GroupError:
            raise
        except _FAILURES as error:
            raise self.error(step, str(error).split("\n", 1)[0], _NOT_ALL) from error

    def sends(self, device: torch.device) -> None:
        """Raises GroupError if the group cannot send tensors on a device."""
        for group in self.group.axes or (self.group,):
            backend = group.backend(device)
            if not backend or device.type not in _SENDS.get(backend, (device.type,)):
                what = f"its back end {backend or dist.get_backend(group._data)!r} cannot send tensors on {device.type}"
                advice = 'init_process_group("cpu:gloo,cuda:nccl"), or move the tensors'
                raise self.error("before the first step", what, advice)

    def agree(self, words: tuple[tuple[str, str], ...], fault: str, advice: str = "") -> None:
        """Compares function and settings among all ranks; raises GroupError on every rank if they differ, or if a rank
        reports a fault; words: (name, value) of each setting; fault: this rank's error, or ""."""
        message = json.dumps((self.function, words, fault))
        with self.reporting(_COMPARING):
            texts = self.group.compare(message) if self.world > 1 else [message]
        heard = [json.loads(text) for text in texts]
        for rank, (function, message, _) in enumerate(heard):
            if [function, message] != heard[0][:2]:
                calls = [{"function": one, **dict(settings)} for one, settings, _ in (heard[0], heard[rank])]
                names = [name for name in calls[0] | calls[1] if calls[0].get(name) != calls[1].get(name)]
                first, other = (", ".join(f"{name}={each.get(name)}" for name in names) for each in calls)
                raise self.error(
                    _COMPARING,
                    f"rank 0 calls with {first}, rank {rank} with {other}",
                    advice or "every rank must make the same calls, in the same order",
                )
        for rank, (_, _, result) in enumerate(heard):
            if result:
                raise self.error(_COMPARING, f"on rank {rank} {result}", "all ranks stop")

    def try_out(self) -> None:
        """Sends a number from every rank to every other one, so that an unsupported back end fails before training;
        some back ends also need all ranks in their first exchange."""
        lines = [self.along(axis) for axis in range(len(self.group.axes))] or [self]
        for line in lines:
            local = torch.tensor([line.rank], device=self.device)
            heard = torch.cat(line.all_gather("trying the group out", local, [1] * line.world)).tolist()
            if heard != list(range(line.world)):
                raise self.error("trying the group out", f"ranks {heard} answered", "make a new group")

    # ---------------------------------------------------------------------------------------------------- what passes

    def exchange(
        self, step: str, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Pending:
        """Starts sends and receives, lists of (rank, contiguous tensor), and returns them as a Pending. Empty tensors
        are not sent. Every rank must make the same number of exchanges, also without data. step: a description of the
        exchange, for error messages, as in all methods of this class."""
        tag = zlib.crc32(b"%d" % next(self._steps), self._key) & 0x7FFFFFFF
        out = [(rank, _bytes(t.detach().contiguous())) for rank, t in sends if t.numel()]
        into = [(rank, _bytes(t)) for rank, t in receives if t.numel()]
        with self.reporting(step):
            works = self.group.post(out, into, tag)
        return Pending(self, step, works, [t for _, t in (*out, *into)])

    def derivative(self) -> Call:
        """Returns a Call for a backward of this one, with message tags of its own, as there may be several."""
        call = Call(self.group, f"{self.function}, backward", self.schedule, self.device, self.call_cache)
        call.begin(str(next(self._derivatives)), self._key)
        return call

    def to_each(self, step: str, sends: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Sends sends[r] to each rank r; returns the list of tensors that the ranks r sent to this one, of shapes
        shapes[r]. The tensor for this rank itself is returned without a copy. step: names the exchange in errors."""
        return self.all_to_each(step, [(sends, shapes)])[0]

    def all_to_each(
        self, step: str, passing: Sequence[tuple[Sequence[Tensor], Sequence[Sequence[int]]]]
    ) -> list[list[Tensor]]:
        """Makes several exchanges at once, each of (sends, shapes): sends[r] goes to rank r, which sends a tensor of
        shape shapes[r]; returns, for each exchange, the list of received tensors. step: their name in errors."""
        this_rank, others = self.rank, [rank for rank in range(self.world) if rank != self.rank]
        results = [
            [
                sends[this_rank] if rank == this_rank else empty(sends[this_rank], tuple(shape))
                for rank, shape in enumerate(shapes)
            ]
            for sends, shapes in passing
        ]
        out = [(rank, sends[rank]) for sends, _ in passing for rank in others]
        self.exchange(step, out, [(rank, parts[rank]) for parts in results for rank in others]).wait()
        return results

    def all_gather(self, step: str, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Returns the tensors of all ranks, in order; sizes: of first axes, which may differ. step: for errors."""
        return self.to_each(step, [tensor] * self.world, [(size, *tensor.shape[1:]) for size in sizes])

    def of_first(self, step: str, value: int) -> int:
        """Returns rank 0's `value` on every rank; step: names the exchange in errors."""
        if self.group.axes:
            return self.along(1).of_first(step, self.along(0).of_first(step, value))
        return int(self.all_gather(step, torch.tensor([value], device=self.device), [1] * self.world)[0])

    def sum_to_each(self, step: str, parts: Sequence[Tensor]) -> Tensor:
        """Sends parts[r] to each rank r; returns the sum of the tensors received, in rank order. step: for errors."""
        return _summed(self.to_each(step, parts, [parts[self.rank].shape] * self.world))

    def sum_to_all(self, step: str, tensor: Tensor) -> Tensor:
        """Returns the sum of `tensor` over ranks, in their order: the same bits on each. step: its name in errors."""
        if self.group.axes and self.world > 1:
            row = self.along(1).sum_to_all(step, tensor)
            return self.along(0).sum_to_all(step, row)
        return _summed(self.to_each(step, [tensor] * self.world, [tensor.shape] * self.world))


def group_of(group: AnyGroup) -> Group:
    """Returns the Group of ranks of a process group or mesh, cached after the first call; None: all ranks.

    Raises:
        GroupError: torch.distributed is not initialised, this process is not a member, or `group` is not a group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise GroupError(
            "fusion_attention: distributed: expected a process group, got none: torch.distributed is not initialised "
            '(call torch.distributed.init_process_group("gloo"), under torchrun)'
        )
    if isinstance(group, DeviceMesh):
        return _of_mesh(group)
    named: Any = dist.group.WORLD if group is None else group
    result = _GROUPS.get(named) if isinstance(named, dist.ProcessGroup) else None
    if result is not None:
        return result
    if named == dist.GroupMember.NON_GROUP_MEMBER or (
        isinstance(named, dist.ProcessGroup) and dist.get_rank(named) < 0
    ):
        raise _not_a_member()
    if not isinstance(named, dist.ProcessGroup):
        raise GroupError(
            f"fusion_attention: distributed: expected a ProcessGroup, a DeviceMesh or None, got {type(named).__name__} "
            "(make one with torch.distributed.new_group() or init_device_mesh())"
        )
    new_group = _GROUPS[named] = Group(named, dist.get_process_group_ranks(named))
    return new_group


# A Group exists as long as torch's object. A mesh is identified by its groups, because equal meshes may have different
# groups, and ranks delete a mesh at different times. The table by the mesh's id avoids asking torch for the groups,
# which takes longer than a small call.
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()
_MESHES: dict[int, tuple[weakref.ref[DeviceMesh], Group]] = {}


def _of_mesh(mesh: DeviceMesh) -> Group:
    place = id(mesh)
    entry = _MESHES.get(place)
    if entry is None or entry[0]() is not mesh:
        if mesh.ndim > 2:
            raise GroupError(
                f"fusion_attention: distributed: expected a mesh of one or two dimensions, got {mesh.ndim} "
                '(select one or two: mesh["name"])'
            )
        ranks = tuple(mesh.mesh.flatten().tolist())
        if dist.get_rank() not in ranks:
            raise _not_a_member()
        first, *others = (group_of(mesh.get_group(axis)) for axis in range(mesh.ndim))
        group = first.crossed(others[0], ranks) if others else first
        entry = _MESHES[place] = weakref.ref(mesh, lambda _: _MESHES.pop(place, None)), group
    return entry[1]


def _destroyed() -> GroupError:
    return GroupError("fusion_attention: distributed: the process group was destroyed (make a new one)")


def _not_a_member() -> GroupError:
    return GroupError(
        f"fusion_attention: distributed: expected a group of this process, got one without rank {dist.get_rank()} "
        "(only members may call)"
    )


def _timeout(group: dist.ProcessGroup) -> timedelta:
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if (result := getattr(options, "_timeout", None)) is not None:
            return timedelta(seconds=result.total_seconds())
    return default_pg_timeout


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _summed(parts: Sequence[Tensor]) -> Tensor:
    """Returns the elementwise sum of tensors, computed in float32 or wider and rounded once to their dtype."""
    first = parts[0]
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for shard in parts[1:]:
        total += shard
    return total.to(first.dtype)
