"""The lightning indexer below its interfaces' words: the IndexerProblem, the views, and what goes before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_attention.contract import Bound, dtype_text
from fusion_attention.memory import empty
from fusion_attention.ops.shared.layouts import row_view
from fusion_attention.ops.sparse.checks import keys_in
from fusion_attention.ops.sparse.lower import OfCall, covered, extents_of, key_view, unpaged
from fusion_attention.waist.kv import PagedView, RowView
from fusion_attention.waist.lowered import Filled, Lowered, room
from fusion_attention.waist.problem import Extents, IndexerGrads, IndexerOperands, IndexerProblem

Tensor = torch.Tensor
DIFFERENTIABLE = ("query", "key", "weights")
INPUTS = (*DIFFERENTIABLE, "block_table")
RESULTS = ("sparse_indices_out", "sparse_values_out")
GRADIENTS = ("dquery", "dkey", "dweights")


@dataclass(frozen=True, eq=False)
class Indexer:
    """A call: what is computed, how its tensors lie, and the tensors.

    Args:
        layout: of query rows; layout_kv: of key rows.
    """

    problem: IndexerProblem
    extents: Extents
    layout: str
    layout_kv: str
    query: Tensor
    key: Tensor
    weights: Tensor
    table: Tensor | None

    def rows(self, tensor: Tensor, heads: int = 1) -> RowView:
        """Rows of the query side."""
        return row_view(tensor, self.layout, heads, self.extents, "q")

    def lists(self, tensor: Tensor) -> RowView:
        """Rows of one head, whose axis may be left out."""
        return self.rows(tensor if tensor.dim() == self.query.dim() else tensor.unsqueeze(-2))

    def keys(self, tensor: Tensor) -> RowView | PagedView:
        """Rows of the key side."""
        return key_view(tensor, self.layout_kv, 1, self.extents, self.table)

    def operands(self, indices: Tensor, values: Tensor | None) -> IndexerOperands:
        """The views of the call's tensors and its lists."""
        return IndexerOperands(
            q=self.rows(self.query, self.problem.heads),
            k=self.keys(self.key),
            weights=self.rows(self.weights.unsqueeze(-2)),
            indices=self.lists(indices),
            values=None if values is None else self.lists(values),
        )


def fresh(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Memory for the results of a forward call with these arguments."""
    q = n["query"]
    shape = (*q.shape[:-2], 1, n["sparse_count"])
    found = {RESULTS[0]: empty(q, shape, torch.int32)}
    return found | ({RESULTS[1]: empty(q, shape)} if n["return_values"] else {})


class Forward(OfCall):
    """A forward call; its results are sparse_indices_out and, where they are wanted, sparse_values_out."""

    call: Indexer
    verb = "indexer_topk"

    @property
    def inputs(self) -> Mapping[str, Tensor | None]:
        """The tensors of the call."""
        c = self.call
        return dict(zip(INPUTS, (c.query, c.key, c.weights, c.table), strict=True))

    def on(self, inputs: Mapping[str, Any]) -> Forward:
        """The same call on other tensors."""
        q, k, weights, table = (inputs[name] for name in INPUTS)
        return Forward(replace(self.call, query=q, key=k, weights=weights, table=table))

    def whole(self) -> Forward:
        """The call as it is: without values there is no derivative."""
        return self

    def gradients(
        self,
        results: Mapping[str, Tensor],
        upstream: Mapping[str, Tensor],
        run: Callable[[Lowered], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """The gradients of values."""
        unpaged(self.problem.page_size)
        found = run(Backward(self.call, upstream[RESULTS[1]], results[RESULTS[0]]))
        return {name: found[f"d{name}"] for name in DIFFERENTIABLE}

    def results(self) -> dict[str, Tensor]:
        """Fresh memory."""
        p = self.problem
        return fresh({"query": self.call.query, "sparse_count": p.top_k, "return_values": p.has_values})

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        """Views of the call's tensors and its results."""
        return _ForwardRun(self.call, outputs)


class _ForwardRun(Filled):
    __slots__ = ()

    def __init__(self, call: Indexer, outputs: Mapping[str, Tensor]) -> None:
        found = tuple(outputs[name] for name in RESULTS if name in outputs)
        rooms = tuple(room(tensor) for tensor in found)
        clears = () if covered(call.extents.q_len, call.query, call.layout) else rooms
        super().__init__((call.operands(rooms[0], rooms[1] if len(rooms) > 1 else None),), rooms, found, clears)

    def begin(self) -> None:
        for tensor, nothing in zip(self.clears, (-1, -torch.inf), strict=False):
            tensor.fill_(nothing)  # Rows of no sequence choose nothing.


def fresh_gradients(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Memory for the gradients."""
    return {name: empty(n[source], n[source].shape) for name, source in zip(GRADIENTS, DIFFERENTIABLE, strict=True)}


class Backward(OfCall):
    """A gradient call: of the values, from the indices that the forward chose."""

    call: Indexer
    verb = "indexer_backward"

    def __init__(self, call: Indexer, dvalues: Tensor, indices: Tensor) -> None:
        super().__init__(call)
        self.dvalues, self.indices = dvalues, indices

    def results(self) -> dict[str, Tensor]:
        """The gradients."""
        return fresh_gradients({name: getattr(self.call, name) for name in DIFFERENTIABLE})

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        """Views of the call's tensors, what was saved, and its gradients."""
        call, found = self.call, tuple(outputs[name] for name in GRADIENTS)
        dq, dk, dweights = rooms = tuple(room(tensor) for tensor in found)
        grads = IndexerGrads(
            dvalues=call.lists(self.dvalues),
            dq=call.rows(dq, call.problem.heads),
            dk=call.keys(dk),  # type: ignore[arg-type]  # a gradient's keys are not in pages
            dweights=call.rows(dweights.unsqueeze(-2)),
        )
        e = call.extents
        sides = ((dq, e.q_len, call.layout), (dk, e.kv_len, call.layout_kv), (dweights, e.q_len, call.layout))
        clears = tuple(tensor for tensor, lengths, layout in sides if not covered(lengths, tensor, layout))
        # Kernels read 32 bits; every entry was found to fit.
        return Filled((call.operands(self.indices.to(torch.int32), None), grads), rooms, found, clears)


def indexer_call(bound: Bound) -> Indexer:
    """The call of a bound record of the indexer."""
    n = bound.names
    known = bound.memo.get("lowered")
    if known is None:
        known = bound.memo["lowered"] = (_problem(n), extents_of(n))
    problem, extents = known
    form = keys_in(n["layout"], n["layout_kv"], n["block_table"])
    q, k, weights, table = (n[name] for name in INPUTS)
    return Indexer(problem, extents, n["layout"], form, q, k, weights, table)


def lower(bound: Bound, *, seed: int = 0, offset: int = 0) -> Forward | Backward:
    """A bound record of the indexer, forward or gradient."""
    call = indexer_call(bound)
    if "dy" not in bound.op.by_name:
        return Forward(call)
    return Backward(call, bound["dy"], bound["sparse_indices"])


def _problem(n: Mapping[str, Any]) -> IndexerProblem:
    return IndexerProblem(
        heads=n["N1"],
        dim=n["D"],
        dtype=dtype_text(n["query"]),
        weights_dtype=dtype_text(n["weights"]),
        top_k=n["K"],
        has_values=n["return_values"],
        page_size=n["Ps"] if n["block_table"] is not None else 0,
    )
