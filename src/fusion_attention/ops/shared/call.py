"""What lowered calls of several families share: tensors by canonical name, and what a gradient has of its forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fusion_attention.ir.call import Lowered, tensors_in
from fusion_attention.ir.kv import PagedView, RowView
from fusion_attention.ir.problem import Extents, Operands, Stats
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

    def whole(self: Same) -> Same:
        """The call as it is: its derivative reads no more than it returns."""
        return self

    def rows(self, tensor: Tensor, heads: int = 1) -> RowView:
        """Rows of the query side."""
        return row_view(tensor, self.layout, heads, self.extents, "q")

    def covers(self, tensor: Tensor, side: str = "q") -> bool:
        """Whether every token of a tensor of the query ("q") or key ("kv") side belongs to a sequence."""
        return covered(tensor, self.layout, self.extents, side)


def over(
    rows: Operands,
    q: Tensor,
    k: tuple[Tensor, ...],
    v: tuple[Tensor, ...],
    table: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor],
) -> Operands:
    """The same rows of other tensors; results: out, max and sum."""
    out, max_, sum_ = results
    stats = Stats(rows.stats.max.over(max_), rows.stats.sum.over(sum_))
    return Operands(rows.q.over(q), _over(rows.k, k, table), _over(rows.v, v, table), rows.out.over(out), stats)


def _over(view: RowView | PagedView, tensors: tuple[Tensor, ...], table: Tensor | None) -> RowView | PagedView:
    if isinstance(view, RowView):
        return RowView(tensors, view.address, view.stride_token, view.stride_head, view.dim)
    assert table is not None
    strides = view.stride_page, view.stride_token, view.stride_head
    return PagedView(tensors[0], table, view.page_size, *strides, view.dim, view.piece, view.stride_piece)


def over_nothing(views: Operands, given: Sequence[Tensor | None]) -> Operands | None:
    """The views of q, k and v over no memory, for over(); None where one of them shows no memory of the given tensors.

    What is kept must not keep a caller's memory, and a tensor that was copied for its view has strides of its own.
    """
    own = {t.untyped_storage()._cdata for t in given if t is not None}
    if any(t.untyped_storage()._cdata not in own for t in tensors_in((views.q, views.k, views.v))):
        return None
    blank = torch.empty(0, dtype=torch.float32)
    return over(views, blank, (blank,), (blank,), blank, (blank, blank, blank))


class OfCall:
    """What is planned of a call: its problem, its extents and its device."""

    def __init__(self, call: Any) -> None:
        self.call, self.problem, self.extents, self.device = call, call.problem, call.extents, call.device
