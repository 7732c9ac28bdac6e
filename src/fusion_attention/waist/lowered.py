"""A lowered call of any family: what to plan, and how its results come to lie in given memory.

Faces run every operator through this alone; a family brings its own Lowered. Refuses to know any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch

from fusion_attention.memory import empty
from fusion_attention.waist.problem import Extents


class Filled:
    """A call laid on memory: runs again and again as long as the memory is there.

    Attributes:
        operands: what the planned verb takes.
        rooms: memory that a run writes; outputs: where the first of them belong, often the same tensors.
        clears: the rooms with rows of no sequence.
    """

    __slots__ = ("clears", "operands", "outputs", "rooms")

    def __init__(
        self,
        operands: tuple[Any, ...],
        rooms: tuple[torch.Tensor, ...] = (),
        outputs: tuple[torch.Tensor, ...] = (),
        clears: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self.operands, self.rooms, self.outputs, self.clears = operands, rooms, outputs, clears

    def begin(self) -> None:
        """What comes before the plan runs: clears what no sequence covers, reads what is saved in another form."""
        for tensor in self.clears:
            tensor.zero_()

    def finish(self) -> None:
        """What comes after: results that lie in rooms go where they belong."""
        for output, tensor in zip(self.outputs, self.rooms, strict=False):
            if tensor is not output:
                output.copy_(tensor)  # This output's rows are not of neighbouring elements.


class Lowered(Protocol):
    """A call below its interface's words: what is planned is its problem, its extents, its verb and its device."""

    verb: str

    @property
    def problem(self) -> Any:
        """What is computed."""
        ...

    @property
    def extents(self) -> Extents:
        """On which lengths."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        ...

    def results(self) -> dict[str, torch.Tensor]:
        """Fresh memory for every result that the call has, by the names of its record's outputs."""
        ...

    def fill(self, outputs: Mapping[str, torch.Tensor]) -> Filled:
        """The call laid on its inputs and these outputs, with any strides; writes nothing yet."""
        ...


class Differentiable(Lowered, Protocol):
    """A lowered call whose results have a derivative."""

    @property
    def inputs(self) -> Mapping[str, torch.Tensor | None]:
        """Its tensors by canonical name, always the same names."""
        ...

    def on(self, inputs: Mapping[str, torch.Tensor | None]) -> Differentiable:
        """The same call on other tensors; None for all of them: without any."""
        ...

    def whole(self) -> Differentiable:
        """The same call with every result that its derivative reads."""
        ...

    def gradients(
        self,
        results: Mapping[str, torch.Tensor],
        upstream: Mapping[str, torch.Tensor],
        run: Callable[[Lowered], dict[str, torch.Tensor]],
    ) -> dict[str, torch.Tensor]:
        """The gradients of its inputs, from its results and their gradients; `run` computes further calls."""
        ...


class Staged:
    """A lowered call that reads the results of another, which runs before it."""

    def first(self) -> Lowered:
        """The call to run before."""
        raise NotImplementedError

    def after(self, results: Mapping[str, torch.Tensor]) -> Lowered:
        """This call, with the results of the first."""
        raise NotImplementedError


def room(output: torch.Tensor) -> torch.Tensor:
    """The output itself where back ends can write it (rows of neighbouring elements), else memory of its shape."""
    if output.stride(-1) == 1 or output.shape[-1] <= 1:
        return output
    return empty(output, output.shape)


def tensors_in(operands: Any) -> Iterator[torch.Tensor]:
    """Every tensor that operands hold, in views too."""
    if isinstance(operands, torch.Tensor):
        yield operands
    elif isinstance(operands, tuple):
        for value in operands:
            yield from tensors_in(value)
    elif is_dataclass(operands):
        for field in fields(operands):
            yield from tensors_in(getattr(operands, field.name))
