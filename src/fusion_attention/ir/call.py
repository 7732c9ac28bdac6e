"""A lowered call of any family: what to plan, and how its results come to lie in given memory.

Interfaces run every operator through this alone; a family brings its own Lowered. The runner calls back into
its family four times, in this order (plan.compute, acl/jobs.py):

    call.results()                  memory for what is returned, unless the caller has some
    filled = call.fill(results)     views of inputs and results, and scratch; nothing is written yet
                                    (filled.first: another call then runs from its own fill() to its finish();
                                    no two-phase operator has one)
    filled.begin()                  what lies in no sequence is cleared, what is saved in another form is read
    plan.run(*filled.operands)      the back end; not where there is no sequence
    filled.finish()                 results that lie in scratch go where they belong

A two-phase call whose memory stays where it is runs the last three again and again. A derivative goes the same way:
call.gradients() gets a `run` for the further calls that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import torch

from fusion_attention.ir.problem import Extents
from fusion_attention.memory import empty


class Filled:
    """A call laid on memory: runs again and again as long as the memory is there.

    Attributes:
        operands: what the planned operation kind takes.
        buffers: memory that a run writes; outputs: where the first of them belong, often the same tensors.
        clears: the buffers with rows of no sequence.
        first: a call that must run before, and where its results belong: some of the operands. None: there is none.
    """

    __slots__ = ("buffers", "clears", "first", "operands", "outputs")

    def __init__(
        self,
        operands: tuple[Any, ...],
        buffers: tuple[torch.Tensor, ...] = (),
        outputs: tuple[torch.Tensor, ...] = (),
        clears: tuple[torch.Tensor, ...] = (),
        first: tuple[Lowered, Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        self.operands, self.buffers, self.outputs, self.clears, self.first = operands, buffers, outputs, clears, first

    def begin(self) -> None:
        """What comes before the plan runs: clears what no sequence covers, reads what is saved in another form."""
        for tensor in self.clears:
            tensor.zero_()

    def finish(self) -> None:
        """What comes after: results that lie in buffers go where they belong."""
        for output, tensor in zip(self.outputs, self.buffers, strict=False):
            if tensor is not output:
                output.copy_(tensor)  # This output's rows are not of neighbouring elements.


class Lowered(Protocol):
    """A call below its interface's words: what is planned is its problem, its extents, its operation kind and its
    device."""

    op_kind: str

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

    def complete(self) -> Differentiable:
        """The same call with every result that its derivative reads."""
        ...

    def gradients(
        self,
        results: Mapping[str, torch.Tensor],
        upstream: Mapping[str, torch.Tensor],
        run: Callable[[Lowered], dict[str, torch.Tensor]],
        wanted: Collection[str] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The gradients of its inputs, from its results and their gradients; `run` computes further calls. Gradients
        of inputs that are not wanted may be left out; None: all are."""
        ...


class Further(NamedTuple):
    """What makes results, by name, of what a run writes; holds no tensor of a caller. stats: it reads all of that, not
    the first alone."""

    stats: bool
    make: Callable[..., dict[str, torch.Tensor]]


class Repeatable(Lowered, Protocol):
    """A lowered forward that may be prepared for other memory.

    Attributes:
        names: of its results, the last ones of which the caller may not want.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def repeats(self) -> bool:
        """Whether one run over its views is all of it: nothing is drawn, cleared or copied beside it."""
        ...

    @property
    def further(self) -> Further | None:
        """What makes the call's results; None where they are what a run writes, as it is."""
        ...

    def memory(self) -> dict[str, torch.Tensor]:
        """Fresh memory for what a run writes, by the names of operands."""
        ...

    def operands(self, memory: Mapping[str, torch.Tensor], /) -> Any:
        """The views of its tensors and of such memory."""
        ...


def buffer(output: torch.Tensor) -> torch.Tensor:
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
