"""Base classes of calls as back ends compute them: with tensors by name, by torch's operators, of gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from fusion_attention.ir.call import Filled, Lowered
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.ops.shared.layouts import covered, row_view

Tensor = torch.Tensor
Results = Mapping[str, Tensor]
Run = Callable[[Lowered], dict[str, Tensor]]  # plans and runs a lowered call, and returns its results by name
Same = TypeVar("Same", bound="TensorCall")
_NONE = np.zeros(0, np.int64)
# The extents of a call without work for a back end.
NO_SEQUENCE = Extents(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)
NO_ATTENTION = Problem(1, 1, 1, 1)


@dataclass(frozen=True, eq=False)
class TensorCall:
    """A call of an operator, as back ends compute it, with its input tensors by parameter name.

    Args:
        extents: lengths of the sequences, and bands (ranges of visible keys of each row).
        layout: axis order of the tensors that have a row per query token.
        tensors: the inputs by name; the first is a tensor, the others may be None.
    """

    extents: Extents
    layout: str
    tensors: Mapping[str, Tensor | None]

    def given(self, name: str) -> Tensor:
        """Returns the input tensor with this name, which must not be None."""
        result = self.tensors[name]
        assert result is not None
        return result

    @property
    def device(self) -> torch.device:
        return self.given(next(iter(self.tensors))).device

    @property
    def inputs(self) -> Mapping[str, Tensor | None]:
        return self.tensors

    def on(self: Same, inputs: Mapping[str, Tensor | None]) -> Same:
        return replace(self, tensors=inputs)

    def complete(self: Same) -> Same:
        return self

    def rows(self, tensor: Tensor, heads: int = 1) -> RowView:
        """Returns a view of a tensor that has a row per query token and head."""
        return row_view(tensor, self.layout, heads, self.extents, "q")

    def covers(self, tensor: Tensor, side: str = "q") -> bool:
        """True if every token of a tensor of query rows (side "q") or of keys ("kv") belongs to a sequence."""
        return covered(tensor, self.layout, self.extents, side)


@dataclass(frozen=True, eq=False)
class TorchCall(TensorCall):
    """A call that torch's operators compute; for back ends it has no sequences, so that no kernel runs.

    Args:
        allocate: allocates the results, by name.
        compute: writes the results; its argument has their memory by name.
        clears: names of the results that are zeroed first, if they are among the results.
    """

    allocate: Callable[[], dict[str, Tensor]]
    compute: Callable[[Results], None]
    problem: Problem = NO_ATTENTION
    op_kind: str = "attention_forward"
    clears: tuple[str, ...] = ()

    def results(self) -> dict[str, Tensor]:
        return self.allocate()

    def fill(self, outputs: Results) -> Filled:
        clears = tuple(outputs[name] for name in self.clears if name in outputs)
        return Filled((), clears=clears, convert=partial(self.compute, outputs))


class OfCall:
    """Base of calls for back ends, such as gradients, with the parameters, lengths and device of another call."""

    def __init__(self, call: Any) -> None:
        self.call, self.problem, self.extents = call, call.problem, call.extents

    @property
    def device(self) -> torch.device:
        result: torch.device = self.call.device
        return result
