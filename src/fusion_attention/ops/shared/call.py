"""What lowered calls of several families share: tensors by canonical name, and what a gradient has of its forward."""

from __future__ import annotations

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
Run = Callable[[Lowered], dict[str, Tensor]]  # plans and runs a further call
Same = TypeVar("Same", bound="TensorCall")


@dataclass(frozen=True, eq=False)
class TensorCall:
    """How the tensors of a call lie, and the tensors by canonical name; the first of them is always there.

    Args:
        layout: of query rows.
    """

    extents: Extents
    layout: str
    tensors: Mapping[str, Tensor | None]

    def given(self, name: str) -> Tensor:
        """A tensor that the call has."""
        result = self.tensors[name]
        assert result is not None
        return result

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.given(next(iter(self.tensors))).device

    @property
    def inputs(self) -> Mapping[str, Tensor | None]:
        """The tensors of the call."""
        return self.tensors

    def on(self: Same, inputs: Mapping[str, Tensor | None]) -> Same:
        """The same call on other tensors."""
        return replace(self, tensors=inputs)

    def complete(self: Same) -> Same:
        """The call as it is: its derivative reads no more than it returns."""
        return self

    def rows(self, tensor: Tensor, heads: int = 1) -> RowView:
        """Rows of the query side."""
        return row_view(tensor, self.layout, heads, self.extents, "q")

    def covers(self, tensor: Tensor, side: str = "q") -> bool:
        """Whether every token of a tensor of the query ("q") or key ("kv") side belongs to a sequence."""
        return covered(tensor, self.layout, self.extents, side)


class OfCall:
    """What is planned of a call: its problem, its extents and its device."""

    def __init__(self, call: Any) -> None:
        self.call, self.problem, self.extents = call, call.problem, call.extents

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        result: torch.device = self.call.device
        return result
