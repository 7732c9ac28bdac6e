"""Calls of sparse attention, as back ends compute them: memory views, axis order of statistics in CANN and kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from fusion_attention.ir.call import Filled, Further, buffer
from fusion_attention.ir.memory_views import PagedView, RowView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem, Stats
from fusion_attention.memory import empty
from fusion_attention.ops.shared.layouts import covered, row_view
from fusion_attention.ops.shared.lowered_call import OfCall, Results, Run, TensorCall
from fusion_attention.ops.sparse.checks import PAGED

Tensor = torch.Tensor
Call = TypeVar("Call", bound="Sparse")
# Inputs with a gradient, in the order of GRADIENTS; inputs without; and inputs of a second source of keys.
DIFFERENTIABLE = ("query", "key", "value", "query_rope", "key_rope", "sinks")
GRADIENTS = ("dquery", "dkey", "dvalue", "dquery_rope", "dkey_rope", "dsinks")
OTHERS = ("sparse_indices", "block_table")
COMPRESSED = ("key_compressed", "value_compressed")
GRADIENT_OF = dict(zip((*DIFFERENTIABLE, *COMPRESSED), (*GRADIENTS, *(f"d{n}" for n in COMPRESSED)), strict=True))
STATISTICS = ("softmax_max", "softmax_sum")
RESULTS = ("attention_out", *STATISTICS)
# Gradients that have rows: their field of Grads, and the tokens that the rows belong to.
_GRADS = {
    "dquery": ("dq", "q"),
    "dkey": ("dk", "kv"),
    "dvalue": ("dv", "kv"),
    "dquery_rope": ("dq_rope", "q"),
    "dkey_rope": ("dk_rope", "kv"),
    "dkey_compressed": ("dk_compressed", "compressed"),
    "dvalue_compressed": ("dv_compressed", "compressed"),
}
_WRITTEN = ("out", "max", "sum")  # the operands that a run writes; statistics in the kernels' order


@dataclass(frozen=True, eq=False)
class Sparse(TensorCall):
    """A forward call of sparse attention, as back ends compute it.

    Args:
        layout_kv: axis order of keys, or paged.
        stats: True if softmax max and sum are results, in addition to attention_out.
        second: layout of additional, compressed keys, and extents whose kv_len are their lengths; None: there are none.
    """

    problem: Problem
    layout_kv: str
    stats: bool
    second: tuple[str, Extents] | None = None
    op_kind = "attention_forward"
    names = RESULTS

    def keys(self, tensor: Tensor, dim: int = 0) -> RowView | PagedView:
        """Returns a view of keys or values; dim: number of leading elements of a row in the view, 0: all."""
        view = key_view(tensor, self.layout_kv, self.problem.heads_kv, self.extents, self.tensors["block_table"])
        return replace(view, dim=dim) if dim else view

    def compressed(self, tensor: Tensor | None, dim: int = 0) -> RowView | PagedView | None:
        """Returns a view of compressed keys or values, or None; dim: number of leading elements of a row, 0: all."""
        if self.second is None or tensor is None:
            return None
        layout, extents = self.second
        view = key_view(tensor, layout, self.problem.heads_kv, extents, self.tensors["compressed_table"])
        return replace(view, dim=dim) if dim else view

    def lists(self) -> Tensor | None:
        """Returns the tensor of selected keys per row, [.., entries], -1 behind the last; None: no selection."""
        return self.tensors["sparse_indices"]

    def covers(self, tensor: Tensor, side: str = "q") -> bool:
        """True if every token of a tensor belongs to a sequence; side: "q" for query rows, "kv" for keys, "compressed"
        for compressed keys."""
        if side == "compressed" and self.second is not None:
            return covered(tensor, self.layout, self.second[1], "kv")
        return super().covers(tensor, side)

    def operands(self, memory: Mapping[str, Tensor]) -> Operands:
        """Returns memory views of the input tensors and of the tensors "out", "max" and "sum" in `memory`."""
        p, t = self.problem, self.tensors
        k, v, q_rope, k_rope = (t[n] for n in ("key", "value", "query_rope", "key_rope"))
        assert k is not None
        indices = self.lists()
        k_compressed, v_compressed = (t.get(name) for name in COMPRESSED)
        shares = v_compressed is None
        return Operands(
            q=self.rows(self.given("query"), p.heads_q),
            k=self.keys(k),
            v=self.keys(k, p.dim_v) if v is None else self.keys(v),
            out=self.rows(memory["out"], p.heads_q),
            stats=Stats(*(self.rows(memory[name].unsqueeze(-1), p.heads_q) for name in _WRITTEN[1:])),
            q_rope=None if q_rope is None else self.rows(q_rope, p.heads_q),
            k_rope=None if k_rope is None else self.keys(k_rope),
            sink=t["sinks"],
            indices=None if indices is None else self.rows(narrow(indices), p.heads_kv),
            k_compressed=self.compressed(k_compressed),
            v_compressed=self.compressed(k_compressed if shares else v_compressed, p.dim_v if shares else 0),
        )

    def grouped(self, stats: Tensor) -> Tensor:
        """Returns a view of statistics [.., N1] in CANN's axis order: [B, N2, S1, G] or [N2, T1, G], G = N1 / N2."""
        return grouped(stats, self.problem.heads_kv, self.layout)

    @property
    def repeats(self) -> bool:
        """True if the kernels write all results: every row belongs to a sequence."""
        return self.covers(self.given("query"))

    @property
    def further(self) -> Further:
        """The function that makes {name: result} from the tensors that kernels write."""
        return Further(self.stats, partial(_results, self.problem, self.layout, self.extents))

    def memory(self) -> dict[str, Tensor]:
        """Allocates {"out", "max", "sum"}: output and softmax statistics, [.., N1] in the kernels' axis order."""
        return dict(zip(_WRITTEN, (self.results()[RESULTS[0]], *statistics(self.given("query"))), strict=True))

    def complete(self: Call) -> Call:
        """Returns the same call, whose results also include softmax max and sum."""
        return replace(self, stats=True)

    def backward(self, results: Results, upstream: Results) -> SparseBackward:
        """Returns the gradient call, from the results (output, softmax max and sum) and their gradients, `upstream`."""
        out, top, total = (results[name] for name in RESULTS)
        dout, dlse = (upstream.get(name) for name in RESULTS[:2])
        return SparseBackward(self, torch.zeros_like(out) if dout is None else dout, out, top, total, dlse)

    def gradients(
        self, results: Results, upstream: Results, run: Run, wanted: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        unpaged(self.problem.page_size)
        result = run(self.backward(results, upstream))
        return {t: result[name] for t, name in GRADIENT_OF.items() if name in result}

    def results(self) -> dict[str, Tensor]:
        result = fresh({**self.tensors, "layout": self.layout, "dim_v": self.problem.dim_v})
        return result if self.stats else {RESULTS[0]: result[RESULTS[0]]}

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        written = buffer(outputs[RESULTS[0]]), *statistics(self.given("query"))
        clears = () if self.covers(self.given("query")) else written
        operands = self.operands(dict(zip(_WRITTEN, written, strict=True)))
        convert = partial(self.convert, outputs, *written[1:])
        return Filled((operands,), written, (outputs[RESULTS[0]],), clears, convert=convert)

    def convert(self, outputs: Mapping[str, Tensor], max_: Tensor, sum_: Tensor) -> None:
        """Writes softmax max and sum, [.., N1] in the kernels' axis order, to those of `outputs`, in CANN's order."""
        values = _returned(self.problem, self.layout, self.extents, max_, sum_)
        for name, value in zip(STATISTICS, values, strict=True):
            if name in outputs:
                outputs[name].copy_(value)


def statistics(query: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates softmax (max, sum) in the kernels' axis order, [B, S1, N1] or [T1, N1], on the device of `query`."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return empty(query, query.shape[:-1], dtype), empty(query, query.shape[:-1], dtype)


def grouped(stats: Tensor, heads_kv: int, layout: str) -> Tensor:
    """Returns a view of statistics [.., N1] in CANN's axis order, [B, N2, S1, G] or [N2, T1, G]; N2: heads_kv."""
    return stats.unflatten(-1, (heads_kv, stats.shape[-1] // heads_kv)).movedim(-2, 0 if layout == "TND" else 1)


def key_view(tensor: Tensor, layout: str, heads: int, extents: Extents, table: Tensor | None) -> RowView | PagedView:
    """Returns a memory view of keys in a layout, packed, padded or paged; heads: key heads; table: the page table."""
    if layout != PAGED:
        return row_view(tensor, layout, heads, extents, "kv")
    assert table is not None
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        tensor = tensor.contiguous()  # Kernels read contiguous rows.
    page, token, head, _ = tensor.stride()
    return PagedView(tensor, table, tensor.shape[1], page, token, head, tensor.shape[3])


def narrow(lists: Tensor) -> Tensor:
    """Returns selected keys as int32, which kernels read; entries beyond int32 become -1 or the largest int32."""
    if lists.dtype == torch.int32:
        return lists
    return lists.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)


def page_table(table: Tensor | None) -> Tensor | None:
    """Returns a page table in the format that kernels read: int32 with contiguous rows; None for None."""
    if table is None:
        return None
    table = table.to(torch.int32)
    return table if table.stride(-1) == 1 else table.contiguous()


# ------------------------------------------------------------------------------------------------------------- forward


def fresh(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocates {name: tensor}: attention_out, softmax_max, softmax_sum; n: arguments and derived values by name."""
    q, k, v = (n[name] for name in ("query", "key", "value"))
    heads = k.shape[-2]
    out = empty(q, (*q.shape[:-1], (n["dim_v"] or k.shape[-1]) if v is None else v.shape[-1]))
    rows = (heads, q.shape[0]) if n["layout"] == "TND" else (q.shape[0], heads, q.shape[1])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    stats = (empty(q, (*rows, q.shape[-2] // heads), dtype) for _ in STATISTICS)
    return dict(zip(RESULTS, (out, *stats), strict=True))


def _returned(p: Problem, layout: str, extents: Extents, max_: Tensor, sum_: Tensor) -> Iterator[Tensor]:
    """Yields softmax max_ and sum_, [.., N1], in CANN's axis order, [B, N2, S1, G] or [N2, T1, G]. Both are 0 for rows
    without visible keys, also with a sink in a sequence without keys."""
    empty = max_ == -torch.inf
    for b in extents.keyless:
        rows = row_view(empty.unsqueeze(-1), layout, p.heads_q, extents, "q")
        rows.sequence(b, p.heads_q, int(extents.q_len[b])).fill_(True)
    for value in (max_, sum_):
        yield grouped(value.masked_fill(empty, 0), p.heads_kv, layout)


def _results(p: Problem, layout: str, extents: Extents, out: Tensor, *stats: Tensor | None) -> dict[str, Tensor]:
    """Returns {name: result} of the forward: the output and, if written, softmax max and sum in CANN's axis order."""
    if stats[0] is None or stats[1] is None:
        return {RESULTS[0]: out}
    values = _returned(p, layout, extents, stats[0], stats[1])
    return dict(zip(RESULTS, (out, *(value.contiguous() for value in values)), strict=True))


# ------------------------------------------------------------------------------------------------------------ backward


def unpaged(page_size: int) -> None:
    """Raises NotImplementedError if page_size is not 0: paged keys have no gradient."""
    if page_size:
        raise NotImplementedError("fusion_attention: paged keys have no gradient: pass them padded or packed")


def fresh_gradients(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocates {name: gradient} of all differentiable inputs that are not None; n: inputs by name."""
    given = ((name, n.get(source)) for source, name in GRADIENT_OF.items())
    return {name: empty(t, t.shape) for name, t in given if t is not None}


class SparseBackward(OfCall):
    """A gradient call of sparse attention for back ends; max, sum, dlse (of log-sum-exp) are in CANN's axis order."""

    call: Sparse
    op_kind = "attention_backward"

    def __init__(
        self, call: Sparse, dout: Tensor, out: Tensor, max_: Tensor, sum_: Tensor, dlse: Tensor | None = None
    ) -> None:
        super().__init__(call)
        self.saved, self.dlse = (dout, out, max_, sum_), dlse

    def results(self) -> dict[str, Tensor]:
        return fresh_gradients(self.call.tensors)

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        call, (dout, out, *saved), stats = self.call, self.saved, statistics(self.call.given("query"))
        g, heads = {name: buffer(tensor) for name, tensor in outputs.items()}, call.problem.heads_q
        view: dict[str, Any] = {
            "q": lambda rows: call.rows(rows, heads), "kv": call.keys, "compressed": call.compressed
        }  # fmt: skip
        views: dict[str, Any] = dict.fromkeys(field for field, _ in _GRADS.values())
        views |= {field: view[side](g[name]) for name, (field, side) in _GRADS.items() if name in g}
        grads = Grads(
            dout=call.rows(dout, heads),
            dsink=g.get("dsinks"),
            dlse=None if self.dlse is None else self._ungrouped(self.dlse),
            **views,
        )
        clears = [g[name] for name, (_, side) in _GRADS.items() if name in g and not call.covers(g[name], side)]
        if "dsinks" in g and not len(call.extents):
            clears.append(g["dsinks"])  # No back end runs.

        def prepare() -> None:
            for tensor, of_kernels in zip(saved, stats, strict=True):
                call.grouped(of_kernels).copy_(tensor)
            max_, sum_ = stats
            max_.masked_fill_(sum_ == 0, -torch.inf)  # a row without keys

        read = call.operands(dict(zip(_WRITTEN, (out, *stats), strict=True)))
        buffers = (*g.values(), *stats)
        return Filled((read, grads), buffers, tuple(outputs.values()), tuple(clears), prepare=prepare)

    def _ungrouped(self, dlse: Tensor) -> RowView:
        """Returns a view of a copy of dlse in the kernels' axis order, [B, S1, N1] or [T1, N1]."""
        given, _ = statistics(self.call.given("query"))
        self.call.grouped(given).copy_(dlse)
        return self.call.rows(given.unsqueeze(-1), self.call.problem.heads_q)
