"""The protocol of a lowered call (an operator's call in the form that kernels read), for all groups of operators.

A runner (plan.compute, acl/two_phase_call.py) executes a lowered call in five steps:

    call.results()                  allocates the results, unless the caller passes memory
    filled = call.fill(results)     makes views of inputs and results, and allocates scratch; writes nothing
                                    (filled.first: a call that has to run completely before this one;
                                    no two-phase operator has one)
    filled.begin()                  clears elements that belong to no sequence, and reads state saved in another format
    plan.run(*filled.operands)      runs the back end; skipped if there is no sequence
    filled.finish()                 copies results from scratch to the caller's memory

A two-phase call (CANN's C interface: plan, then run) with unchanged memory repeats the last three steps. Derivatives
take the same path: call.gradients() receives `run`, a function that executes the calls which it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import torch

from fusion_attention.ir.problem import Extents
from fusion_attention.memory import empty


class Filled:
    """A call of an operator with its memory; it can run repeatedly while the memory exists.

    Attributes:
        operands: arguments of the kernels.
        buffers: tensors that a run writes; outputs: the destinations of the first buffers, often the same tensors.
        clears: buffers with rows that belong to no sequence.
        first: None, or a call that must run before this one, and the tensors that receive its results by name.
        prepare: None, or a function that writes further buffers before a run, such as saved state in another format.
        convert: None, or a function that computes results from the buffers after a run.
    """

    __slots__ = ("buffers", "clears", "convert", "first", "operands", "outputs", "prepare")

    def __init__(
        self,
        operands: tuple[Any, ...],
        buffers: tuple[torch.Tensor, ...] = (),
        outputs: tuple[torch.Tensor, ...] = (),
        clears: tuple[torch.Tensor, ...] = (),
        first: tuple[Lowered, Mapping[str, torch.Tensor]] | None = None,
        *,
        prepare: Callable[[], None] | None = None,
        convert: Callable[[], object] | None = None,
    ) -> None:
        self.operands, self.buffers, self.outputs, self.clears, self.first = operands, buffers, outputs, clears, first
        self.prepare, self.convert = prepare, convert

    def begin(self) -> None:
        """Prepares memory before the kernels run: clears rows that belong to no sequence, and calls prepare()."""
        for tensor in self.clears:
            tensor.zero_()
        if self.prepare is not None:
            self.prepare()

    def finish(self) -> None:
        """Computes results from the buffers (convert()) after the kernels have run, and copies buffers to outputs."""
        if self.convert is not None:
            self.convert()
        for output, tensor in zip(self.outputs, self.buffers, strict=False):
            if tensor is not output:
                output.copy_(tensor)  # Back ends cannot write this output: its rows are not contiguous.


class Lowered(Protocol):
    """A call of an operator in the form that every back end reads: problem (its parameters), extents (sequence lengths
    and bands of masks), op_kind and device determine kernels and tiles."""

    op_kind: str

    @property
    def problem(self) -> Any:
        """The parameters of the computation: of attention, of an indexer or its loss, or of key pooling."""
        ...

    @property
    def extents(self) -> Extents:
        """Lengths of the sequences, and bands (ranges of visible keys around the diagonal) of their masks."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        ...

    def results(self) -> dict[str, torch.Tensor]:
        """Allocates every result of the call; keys are the names of the operator's outputs."""
        ...

    def fill(self, outputs: Mapping[str, torch.Tensor]) -> Filled:
        """Makes views of the inputs and of `outputs` (result tensors by name, of any strides); writes nothing."""
        ...


class Differentiable(Lowered, Protocol):
    """A call of an operator, in the form that every back end reads, whose results have a derivative."""

    @property
    def inputs(self) -> Mapping[str, torch.Tensor | None]:
        """The input tensors by parameter name; all calls of one operator have the same names."""
        ...

    def on(self, inputs: Mapping[str, torch.Tensor | None]) -> Differentiable:
        """Returns the same call on other input tensors; None in place of every tensor: a call that holds no tensors."""
        ...

    def complete(self) -> Differentiable:
        """Returns the same call, extended to compute all results that its derivative reads."""
        ...

    def gradients(
        self,
        results: Mapping[str, torch.Tensor],
        upstream: Mapping[str, torch.Tensor],
        run: Callable[[Lowered], dict[str, torch.Tensor]],
        wanted: Collection[str] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Computes gradients of the inputs from the results and the gradients of the results (upstream). run: computes
        a call and returns its results by name. wanted: names of inputs whose gradients are needed; None: all."""
        ...


class Further(NamedTuple):
    """The function `make` that computes a call's results, by name, from the tensors that kernels write; it holds no
    reference to a caller's tensor. stats: True if `make` takes all written tensors (output and softmax statistics),
    False if only the first."""

    stats: bool
    make: Callable[..., dict[str, torch.Tensor]]


class Repeatable(Lowered, Protocol):
    """A forward call of an operator whose kernels and memory views serve later runs on other memory.

    Attributes:
        names: names of the results; the caller may not need the last ones.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def repeats(self) -> bool:
        """True if the kernels compute the complete call, without a random draw, clearing of memory or copies."""
        ...

    @property
    def further(self) -> Further | None:
        """The function that converts the tensors that kernels write to results; None if these are the results."""
        ...

    def memory(self) -> dict[str, torch.Tensor]:
        """Allocates the tensors that kernels write; returns them by name."""
        ...

    def operands(self, memory: Mapping[str, torch.Tensor], /) -> Any:
        """Returns the kernels' arguments: views of the input tensors and of `memory`, the tensors from memory()."""
        ...


def buffer(output: torch.Tensor) -> torch.Tensor:
    """Returns the output itself if its last axis is contiguous, else uninitialized memory of its shape for a kernel."""
    if output.stride(-1) == 1 or output.shape[-1] <= 1:
        return output
    return empty(output, output.shape)


def tensors_in(operands: Any) -> Iterator[torch.Tensor]:
    """Yields all tensors in a kernel's arguments (tensors, tuples and dataclasses), including those inside views."""
    if isinstance(operands, torch.Tensor):
        yield operands
    elif isinstance(operands, tuple):
        for value in operands:
            yield from tensors_in(value)
    elif is_dataclass(operands):
        for field in fields(operands):
            yield from tensors_in(getattr(operands, field.name))
