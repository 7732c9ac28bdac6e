"""Prepared launches of Triton kernels, with fixed arguments and arguments of each run, cached by memory layout."""

import contextlib
import contextvars
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import triton

from fusion_attention.backends.triton.common import layout_table, shapes
from fusion_attention.ir.problem import Extents
from fusion_attention.memory import empty

T = TypeVar("T")
Constants = dict[str, Any]
LAYOUTS = 32  # number of memory layouts for which a schedule caches launches


@dataclass(eq=False)
class Launch:
    """A Triton kernel with its grid and the arguments that are equal in all runs; start() adds those of one run and
    launches it."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: list[Any]  # in the kernel's order, which Triton processes faster than keywords
    given: list[tuple[int, str]]  # positions and names of the arguments of each run
    options: dict[str, int]  # Triton's launch options
    scratch: bool  # the kernel has tensor descriptors, for which Triton allocates memory

    def start(self, given: dict[str, Any]) -> None:
        """Launches the kernel; given: the arguments of this run, tensors and numbers by kernel argument name."""
        arguments = self.arguments.copy()
        for at, name in self.given:
            arguments[at] = given[name]
        launch(self.kernel, self.grid, arguments, self.options)


def launch(kernel: Any, grid: tuple[int, ...], arguments: list[Any], options: dict[str, int]) -> None:
    """Launches a kernel; arguments: in the kernel's order; options: Triton's, such as num_warps."""
    kernel[grid](*arguments, **options)


def launch_some(
    kernel: Any, grid: tuple[int, ...], given: dict[str, Any], constexprs: Constants, tile: shapes.Tile
) -> None:
    """Launches a kernel with those of the arguments `given` and compile-time `constexprs` (by name) that its signature
    has. tile: numbers of warps and stages. The kernel must not use tensor descriptors."""
    values = given | constexprs
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    launch(kernel, grid, [values[name] for name in kernel.arg_names], options)


class Family:
    """A group of kernels in which an argument name has one meaning, so that one dictionary of arguments serves all;
    sources: further argument names, which launch() passes to kernels under other names."""

    def __init__(self, *kernels: Any, sources: Iterable[str] = ()) -> None:
        self._taken = frozenset((*sources, *(name for kernel in kernels for name in kernel.arg_names)))

    def launch(
        self, kernel: Any, grid: tuple[int, ...], fixed: dict[str, Any], given: Iterable[str], constexprs: Constants,
        tile: Any, renamed: dict[str, str] | None = None, **options: int,
    ) -> Launch:  # fmt: skip
        """Returns a prepared launch of `kernel` with the arguments that it takes; some kernel must take each of them.

        fixed: run-time arguments that are equal in all runs, by name; given: names of those that each run passes;
        constexprs: compile-time arguments; tile: warps, stages and use of tensor descriptors; renamed: the kernel's
        name of an argument -> its name in `fixed` or `given`; options: further launch options of Triton.
        """
        names = set(given)
        if strangers := {*fixed, *names} - self._taken:
            raise TypeError(f"fusion_attention: triton: no kernel takes {', '.join(sorted(strangers))}")
        sources = [(renamed or {}).get(name, name) for name in kernel.arg_names]
        values, named = fixed | dict.fromkeys(names), list(enumerate(zip(kernel.arg_names, sources, strict=True)))
        arguments = [constexprs[name] if name in constexprs else values[source] for _, (name, source) in named]
        places_given = [(at, source) for at, (name, source) in named if source in names and name not in constexprs]
        options |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return Launch(kernel, grid, arguments, places_given, options, bool(tile.TMA))


class Scratch(NamedTuple):
    """Shape and dtype of a temporary tensor that a run allocates; cleared: True if it must initially be zero."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    cleared: bool = False


def bytes_of(scratch: dict[str, Scratch]) -> int:
    """Returns the total bytes of temporary tensors; scratch: their shapes and dtypes by name."""
    return sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in scratch.values())


@dataclass(eq=False)
class Ready:
    """The kernel launches of an operation, prepared for one memory layout (strides, lengths, devices); run() starts
    them on tensors at any addresses."""

    launches: list[Launch]
    tables: tuple[layout_table.Copied, ...]  # of strides, lengths, tiles, on the device, which the kernels read
    scratch: dict[str, Scratch] = field(default_factory=dict)  # the temporary tensors, by kernel argument

    def run(self, given: dict[str, Any]) -> None:
        """Allocates temporary tensors and launches all kernels in order; given: this run's tensors and numbers by
        kernel argument name, to which the temporary tensors are added."""
        for table in self.tables:
            table.read()
        for name, (shape, dtype, cleared) in self.scratch.items():
            given[name] = empty(given["q"], shape, dtype)
            if cleared:
                given[name].zero_()
        if any(each.scratch for each in self.launches):
            # Triton's allocator of memory for descriptors is a context variable. Setting it in a copy of the context
            # leaves the caller's allocator unchanged, and works in every thread.
            contextvars.copy_context().run(self._start_with_scratch, given)
        else:
            self._start(given)

    def _start(self, given: dict[str, Any]) -> None:
        for each in self.launches:
            each.start(given)

    def _start_with_scratch(self, given: dict[str, Any]) -> None:
        like = given["q"]
        triton.set_allocator(lambda size, alignment, stream: empty(like, (size,), torch.uint8))
        self._start(given)


@dataclass(eq=False)
class Schedule:
    """An operation on sequences of given lengths: tables of lengths and tiles on devices, cached kernel launches."""

    op_kind: str
    device_tables: layout_table.DeviceTables
    rows: int  # query rows of all sequences
    decodes: bool = False  # the decode kernels compute it
    by_layout: OrderedDict[Any, Any] = field(default_factory=OrderedDict)  # results of once() by memory layout

    def once(self, layout: Any, make: Callable[[], T]) -> T:
        """Returns make(), cached by the key `layout` of a memory layout (strides, alignments, devices); the keys used
        last stay cached."""
        result = self.by_layout.get(layout)
        if result is None:
            result = self.by_layout[layout] = make()
            while len(self.by_layout) > LAYOUTS:
                self.by_layout.popitem(last=False)
        else:
            with contextlib.suppress(KeyError):  # another thread may have evicted it
                self.by_layout.move_to_end(layout)
        return result

    def update(self, extents: Extents) -> None:
        """Sets other key lengths of the same query rows, `extents`, and rewrites the tables on devices."""
        # Positions of drawn dropout are in the layout tables.
        if extents.chunk_origin is not self.device_tables.extents.chunk_origin:
            self.by_layout.clear()
        self.device_tables.update(extents)


def plan(extents: Extents, op_kind: str, decodes: bool = False) -> Schedule:
    """Returns the Schedule (kernel launches, tables of lengths and tiles) of an operation for given lengths; the first
    run on a device makes the tables. decodes: True if the decode kernels compute the operation."""
    return Schedule(op_kind, layout_table.DeviceTables(extents), int(extents.q_len.sum()), decodes)
