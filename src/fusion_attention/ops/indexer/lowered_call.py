"""Calls of the lightning indexer, forward and gradient, as back ends compute them: parameters, tensors, views."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusion_attention.ir.call import Filled, Further, buffer
from fusion_attention.ir.memory_views import PagedView, RowView
from fusion_attention.ir.problem import IndexerGrads, IndexerOperands, IndexerProblem, Stats
from fusion_attention.memory import empty
from fusion_attention.ops.shared.layouts import row_view
from fusion_attention.ops.shared.lowered_call import OfCall, Results, Run, TensorCall
from fusion_attention.ops.sparse.lowered_call import key_view, narrow, unpaged

Tensor = torch.Tensor
DIFFERENTIABLE = ("query", "key", "weights")
INPUTS = (*DIFFERENTIABLE, "block_table")
RESULTS = ("sparse_indices_out", "sparse_values_out")
GRADIENTS = ("dquery", "dkey", "dweights")
_LISTS = ("indices", "values")  # the operands that are RESULTS


@dataclass(frozen=True, eq=False)
class IndexCall(TensorCall):
    """Base class of calls of an indexer and its losses for back ends; trained: names of its query, key and weights."""

    problem: Any
    trained = DIFFERENTIABLE

    @property
    def heads(self) -> int:
        """The number of query heads of the indexer."""
        result: int = self.problem.heads
        return result

    def keys(self, tensor: Tensor, heads: int = 1) -> RowView | PagedView:
        """Returns a view of a tensor that has a row per key token and head."""
        return row_view(tensor, self.layout, heads, self.extents, "kv")

    def index(self, lists: Sequence[RowView] = (), stats: Stats | None = None) -> IndexerOperands:
        """Returns memory views of query, key, weights, with `lists` (selected keys, scores) and `stats` (max, sum)."""
        q, k, weights = (self.given(name) for name in self.trained)
        lists_and_values = dict(zip(_LISTS, lists, strict=False))
        rows = self.rows(q, self.heads), self.keys(k), self.rows(weights.unsqueeze(-2))
        return IndexerOperands(*rows, **lists_and_values, stats=stats)

    def written(
        self, gradients: Sequence[Tensor], dvalues: RowView | None = None
    ) -> tuple[IndexerGrads, tuple[Tensor, ...]]:
        """Returns (views of the gradients of query, key and weights; the gradients that have rows outside all
        sequences, to be zeroed). dvalues: view of the gradient of the selected scores."""
        dq, dk, dweights = gradients
        keys: Any = self.keys(dk)  # not in pages
        grads = IndexerGrads(self.rows(dq, self.heads), keys, self.rows(dweights.unsqueeze(-2)), dvalues)
        sides = zip(gradients, ("q", "kv", "q"), strict=True)
        return grads, tuple(t for t, side in sides if not self.covers(t, side))


@dataclass(frozen=True, eq=False)
class Indexer(IndexCall):
    """A forward call of the lightning indexer, as back ends compute it.

    Args:
        offset: int32, added to the indices of a row: [B, S1, 1], [T1, 1], or one number per sequence. None: 0.
        layout_kv: axis order of the key tensor, "BSND", "TND", or paged.
    """

    problem: IndexerProblem
    offset: Tensor | None = None
    layout_kv: str = field(kw_only=True)
    op_kind = "indexer_topk"

    def lists(self, tensor: Tensor) -> RowView:
        """Returns a view of selected keys, or their scores, [.., K] per query token; its head axis may be absent."""
        return self.rows(tensor if tensor.dim() == self.given("query").dim() else tensor.unsqueeze(-2))

    def keys(self, tensor: Tensor, heads: int = 1) -> RowView | PagedView:
        return key_view(tensor, self.layout_kv, heads, self.extents, self.tensors["block_table"])

    def operands(self, lists: Mapping[str, Tensor]) -> IndexerOperands:
        """Returns memory views of the inputs, of the selected keys lists["indices"], and, if it has scores, of
        lists["values"]."""
        return self.index([self.lists(lists[name]) for name in _LISTS if name in lists])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the results: indices of the selected keys, and their scores if these are requested."""
        return RESULTS[: 1 + self.problem.has_values]

    @property
    def repeats(self) -> bool:
        """True if the kernels compute the complete call: no offset is added, and every row is in a sequence."""
        return self.offset is None and self.covers(self.given("query"))

    @property
    def further(self) -> Further:
        """The function that makes {name: result} from the tensors that kernels write."""
        names = self.names
        return Further(True, lambda *lists: dict(zip(names, lists, strict=True)))

    def memory(self) -> dict[str, Tensor]:
        return dict(zip(_LISTS, self.results().values(), strict=False))

    def gradients(
        self, results: Results, upstream: Results, run: Run, wanted: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        unpaged(self.problem.page_size)
        result = run(IndexerBackward(self, upstream[RESULTS[1]], results[RESULTS[0]]))
        return {name: result[f"d{name}"] for name in DIFFERENTIABLE}

    def results(self) -> dict[str, Tensor]:
        p = self.problem
        given = {"query": self.given("query"), "sparse_count": p.top_k, "return_values": p.has_values}
        return fresh(given, p.wide_values)

    def offsets(self) -> Tensor:
        """Returns the offset of the selected indices, in a shape that broadcasts to sparse_indices_out."""
        offset = self.offset
        assert offset is not None
        if offset.dim() > 1:
            return offset.unsqueeze(-1)
        if self.layout == "BSND":
            return offset[:, None, None, None]
        rows = len(self.given("query"))
        counts = torch.from_numpy(np.diff(self.extents.q_start, append=rows)).to(offset.device)
        return offset.repeat_interleave(counts, output_size=rows)[:, None, None]

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        results = tuple(outputs[name] for name in RESULTS if name in outputs)
        buffers = tuple(buffer(tensor) for tensor in results)
        operands = self.operands(dict(zip(_LISTS, buffers, strict=False)))
        is_covered = self.covers(self.given("query"))

        def prepare() -> None:
            for tensor, nothing in zip(() if is_covered else buffers, (-1, -torch.inf), strict=False):
                tensor.fill_(nothing)  # Rows outside all sequences select no key.

        def convert() -> None:
            if self.offset is not None:
                indices = buffers[0]
                indices += self.offsets() * (indices >= 0)

        return Filled((operands,), buffers, results, prepare=prepare, convert=convert)


def fresh(n: Mapping[str, Any], promoted: bool = False) -> dict[str, Tensor]:
    """Allocates {name: tensor} of the selected keys' indices and, if requested, their scores; n: arguments by name.
    promoted: the scores are float32, or float64 for a float64 query; False: of the query's dtype."""
    q = n["query"]
    shape = (*q.shape[:-2], 1, n["sparse_count"])
    results = {RESULTS[0]: empty(q, shape, torch.int32)}
    dtype = torch.promote_types(q.dtype, torch.float32) if promoted else q.dtype
    return results | ({RESULTS[1]: empty(q, shape, dtype)} if n["return_values"] else {})


def fresh_gradients(n: Mapping[str, Any], trained: tuple[str, ...] = DIFFERENTIABLE) -> dict[str, Tensor]:
    """Allocates {"d" + name: gradient} of the tensors named in `trained`; n: arguments by name."""
    return {f"d{name}": empty(n[name], n[name].shape) for name in trained}


class IndexerBackward(OfCall):
    """A gradient call of the indexer for back ends; dvalues: gradient of the scores of the selected keys, `indices`."""

    call: Indexer
    op_kind = "indexer_backward"

    def __init__(self, call: Indexer, dvalues: Tensor, indices: Tensor) -> None:
        super().__init__(call)
        self.dvalues, self.indices = dvalues, indices

    def results(self) -> dict[str, Tensor]:
        return fresh_gradients(self.call.tensors)

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        call, result = self.call, tuple(outputs[name] for name in GRADIENTS)
        buffers = tuple(buffer(tensor) for tensor in result)
        grads, clears = call.written(buffers, call.lists(self.dvalues))
        return Filled((call.operands({"indices": narrow(self.indices)}), grads), buffers, result, clears)
