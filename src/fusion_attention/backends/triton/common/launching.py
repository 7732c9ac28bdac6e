"""Launches: a kernel with what stays from run to run and what each run gives, and what an operation kind keeps of its
lengths.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import triton

from fusion_attention.backends.triton.common import layout_table, shapes
from fusion_attention.ir.problem import Extents
from fusion_attention.memory import empty

T = TypeVar("T")
Constants = dict[str, Any]
LAYOUTS = 32  # of memory, of which a schedule knows what to launch: a captured graph meets the same again


@dataclass(eq=False)
class Launch:
    """A kernel, and what stays as it is from run to run."""

    kernel: Any
    grid: tuple[int, ...]
    constexprs: Constants
    arguments: list[Any]  # in the kernel's order: Triton takes them quicker than by name
    given: list[tuple[int, str]]  # places of those that each run gives
    options: dict[str, int]  # Triton's
    scratch: bool  # Triton asks for memory of descriptors

    def argument(self, name: str) -> Any:
        """One that stays."""
        return self.arguments[self.kernel.arg_names.index(name)]

    def start(self, given: dict[str, Any]) -> None:
        """Launches the kernel."""
        arguments = self.arguments.copy()
        for at, name in self.given:
            arguments[at] = given[name]
        launch(self.kernel, self.grid, arguments, self.options)


def launch(kernel: Any, grid: tuple[int, ...], arguments: list[Any], options: dict[str, int]) -> None:
    """Launches a kernel."""
    kernel[grid](*arguments, **options)


def launch_named(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], constexprs: Constants, tile: shapes.Tile
) -> None:
    """Launches a kernel without descriptors once, its arguments by their names."""
    values = arguments | constexprs
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    launch(kernel, grid, [values[name] for name in kernel.arg_names], options)


def launch_some(
    kernel: Any, grid: tuple[int, ...], given: dict[str, Any], constexprs: Constants, tile: shapes.Tile
) -> None:
    """launch_named() with those of the arguments that the kernel names."""
    arguments = {name: given[name] for name in kernel.arg_names if name not in constexprs}
    launch_named(kernel, grid, arguments, constexprs, tile)


class Family:
    """Kernels whose arguments have the same names."""

    def __init__(self, *kernels: Any) -> None:
        self._taken = frozenset(name for kernel in kernels for name in kernel.arg_names)

    def launch(
        self, kernel: Any, grid: tuple[int, ...], fixed: dict[str, Any], given: Iterable[str], constexprs: Constants,
        tile: shapes.Tile, **options: int,
    ) -> Launch:  # fmt: skip
        """With the arguments that the kernel names; some kernel of the family must name each."""
        names = set(given)
        if strangers := {*fixed, *names} - self._taken:
            raise TypeError(f"fusion_attention: triton: no kernel takes {', '.join(sorted(strangers))}")
        values, strides = fixed | dict.fromkeys(names) | constexprs, enumerate(kernel.arg_names)
        arguments = [values[name] for name in kernel.arg_names]
        places_given = [(at, name) for at, name in strides if name in names and name not in constexprs]
        options |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return Launch(kernel, grid, constexprs, arguments, places_given, options, bool(tile.TMA))


@dataclass(eq=False)
class Ready:
    """What an operation kind does on one layout of memory: its launches in their order, the tables that they read, and
    the float32 scratch that each run takes, by the names of arguments."""

    launches: list[Launch]
    tables: tuple[layout_table.Copied, ...]
    scratch: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def run(self, given: dict[str, Any]) -> None:
        """Launches; given: the arguments that are a run's own, to which the scratch comes."""
        for table in self.tables:
            table.read()
        for name, shape in self.scratch.items():
            given[name] = empty(given["q"], shape, torch.float32)
        if any(each.scratch for each in self.launches):
            # Descriptors lie in memory that Triton asks of an allocator, a context variable: no thread has what another
            # one set, and the caller's own has to stay. So such launches have a context of their own.
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
    """What an operation kind needs on given lengths: its tiles, and what it has on devices."""

    op_kind: str
    device_tables: layout_table.DeviceTables
    rows: int  # of all sequences
    decodes: bool = False  # the decode kernels compute it
    by_layout: OrderedDict[Any, Any] = field(default_factory=OrderedDict)  # by layout of memory: what once() made

    def once(self, layout: Any, make: Callable[[], T]) -> T:
        """make()'s result, made the first time on a layout of memory (layout_table.layout); the last LAYOUTS stay."""
        result = self.by_layout.get(layout)
        if result is None:
            result = self.by_layout[layout] = make()
            while len(self.by_layout) > LAYOUTS:
                self.by_layout.popitem(last=False)
        else:
            with contextlib.suppress(KeyError):  # another thread's run pushed it out
                self.by_layout.move_to_end(layout)
        return result

    def update(self, extents: Extents) -> None:
        """Other key lengths of the same rows."""
        if extents.part is not self.device_tables.extents.part:  # drawn() counts from there, in the tables of places
            self.by_layout.clear()
        self.device_tables.update(extents)


def plan(extents: Extents, op_kind: str, decodes: bool = False) -> Schedule:
    """The schedule of an operation kind; tiles are planned when a device is known."""
    return Schedule(op_kind, layout_table.DeviceTables(extents), int(extents.q_len.sum()), decodes)
