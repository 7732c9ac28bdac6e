"""Base classes of lowered calls: tensors by canonical name, and calls derived from another call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fusion_attention.ir.call import Lowered
from fusion_attention.ir.kv import RowView
from fusion_attention.ir.problem import Extents
from fusion_attention.ops.shared.layouts import covered, row_view

Tensor = torch.Tensor
Results = Mapping[str, Tensor]
Run = Callable[[Lowered], dict[str, Tensor]]  # plans and runs a lowered call, and returns its results by name
Same = TypeVar("Same", bound="TensorCall")


@dataclass(frozen=True, eq=False)
class TensorCall:
    """A lowered call whose input tensors have canonical names.

    Args:
        extents: lengths and bands of the sequences.
        layout: axis order of the tensors that have a row per query token.
        tensors: the inputs by name; the first is a tensor, the others may be None.
    """

    extents: Extents
    layout: str
    tensors: Mapping[str, Tensor | None]

    def given(self, name: str) -> Tensor:
        """The input tensor with this name, which must not be None."""
        result = self.tensors[name]
        assert result is not None
        return result

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.given(next(iter(self.tensors))).device

    @property
    def inputs(self) -> Mapping[str, Tensor | None]:
        """The tensors of the call by canonical name."""
        return self.tensors

    def on(self: Same, inputs: Mapping[str, Tensor | None]) -> Same:
        """A copy of this call with other input tensors of the same names."""
        return replace(self, tensors=inputs)

    def complete(self: Same) -> Same:
        """Returns this call, whose results are all that its derivative reads."""
        return self

    def rows(self, tensor: Tensor, heads: int = 1) -> RowView:
        """View of a tensor that has a row per query token and head."""
        return row_view(tensor, self.layout, heads, self.extents, "q")

    def covers(self, tensor: Tensor, side: str = "q") -> bool:
        """True if every token of a tensor on the query ("q") or key ("kv") side belongs to a sequence."""
        return covered(tensor, self.layout, self.extents, side)


class OfCall:
    """Base of lowered calls that take problem, extents and device from the call on which they depend."""

    def __init__(self, call: Any) -> None:
        self.call, self.problem, self.extents = call, call.problem, call.extents

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        result: torch.device = self.call.device
        return result
