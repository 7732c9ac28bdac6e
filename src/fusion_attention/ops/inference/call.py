"""Inference as faces run it: query rows against a cache that is stacked, listed or paged, of floats or integers.

Views are made here, from a cache's layout and its lengths. Refuses to know how an interface says any of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from fusion_attention.contract import Memo
from fusion_attention.memory import another, template
from fusion_attention.ops.shared.call import over, over_nothing
from fusion_attention.ops.shared.layouts import LAYOUTS, Form, keep, matrix_view, row_shape, row_view, stats_view
from fusion_attention.waist.kv import Dequant, MatrixView, PagedView, RowView
from fusion_attention.waist.lowered import Filled, room
from fusion_attention.waist.problem import Extents, Operands, Problem, Stats

Tensor = torch.Tensor
Scales = tuple[Tensor | None, Tensor | None]  # scale and offset


@dataclass(frozen=True)
class Cache:
    """How keys and values lie.

    Args:
        layout: of each tensor: "BSND", "BNSD" or "BSH"; its batch axis counts pages where page_size is not 0.
        page_size: slots of a page; 0: not paged.
    """

    layout: str
    page_size: int = 0


@dataclass(eq=False)
class InferenceCall:
    """A lowered call of inference (waist.lowered.Lowered).

    Args:
        layout: of q and out; cache: of k and v.
        q: query rows. k, v: one tensor, or one per sequence; v None: the first elements of k's rows.
        table: int32 [sequences, pages] of a paged cache.
        first: int64 [sequences], the slot of each sequence's first token, where that is not 0.
        k_dequant, v_dequant: (scale, offset). Per channel: [heads_kv, dim]; per token: as k without its last axis.
        bias, blocked: 4-D, broadcast over [B, N1, S1, slots].
        sink: float32 [N1]. out_quant: (scale, offset), one number or N1 * dim_v of them.
        names: of the results: out, and max and sum where the caller wants them.
        memo: shared by all calls of the same shapes, strides and lengths.
    """

    problem: Problem
    extents: Extents
    layout: str
    cache: Cache
    q: Tensor
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...] | None
    table: Tensor | None = None
    first: np.ndarray | None = None
    k_dequant: Scales = (None, None)
    v_dequant: Scales = (None, None)
    bias: Tensor | None = None
    blocked: Tensor | None = None
    sink: Tensor | None = None
    out_quant: Scales = (None, None)
    names: tuple[str, ...] = ("attention_out",)
    memo: Memo = field(default_factory=Memo)

    verb = "attention_forward"

    @property
    def device(self) -> torch.device:
        """Where the query lies."""
        return self.q.device

    def results(self) -> dict[str, Tensor]:
        """out in the query's layout, and statistics [B, N1, S1] where they have names."""
        out = another(self._templates()[0])
        if len(self.names) == 1:
            return {self.names[0]: out}
        return dict(zip(self.names, (out, *self.stats()), strict=True))

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        """Views of the query, the cache and the outputs."""
        out, *given = (outputs[name] for name in self.names)
        max_, sum_ = given or self.stats()
        return _laid(self, out, (max_, sum_))

    def stats(self) -> tuple[Tensor, Tensor]:
        """Room for statistics."""
        _, stats = self._templates()
        return another(stats), another(stats)

    def _templates(self) -> tuple[Tensor, Tensor]:
        """Of out and of one statistic."""
        made: tuple[Tensor, Tensor] | None = self.memo.templates
        if made is None:
            p, q = self.problem, self.q
            _, token, _ = LAYOUTS[self.layout]
            shape = q.shape if p.dim_v == p.dim_qk else row_shape(q, self.layout, p.heads_q, p.dim_v)
            dtype = torch.float64 if p.dtype == "float64" else torch.float32
            out = template(q, shape, q.dtype if p.out_quant == "none" else torch.int8)
            made = self.memo.templates = out, template(q, (q.shape[0], p.heads_q, q.shape[token]), dtype)
        return made

    def operands(self, out: Tensor, max_: Tensor, sum_: Tensor) -> Operands:
        """The views of a call, its output and its statistics."""
        p, e, form = self.problem, self.extents, Form(self.layout)
        k = self.rows(self.k, p.dim_qk)
        v = narrowed(k, p.dim_v) if self.v is None else self.rows(self.v, p.dim_v)
        operands = Operands(
            q=row_view(self.q, self.layout, p.heads_q, e, "q"),
            k=k,
            v=v,
            out=row_view(out, self.layout, p.heads_q, e, "q"),
            stats=Stats(stats_view(max_, form, p.heads_q, e), stats_view(sum_, form, p.heads_q, e)),
            sink=self.sink,
        )
        if p.dequant_k != "none":
            operands.dequant_k = self._dequant(self.k_dequant, p.dequant_k, p.dim_qk)
            values = self.k_dequant if self.v is None else self.v_dequant
            operands.dequant_v = self._dequant(values, p.dequant_v, p.dim_v)
        if p.out_quant != "none":
            operands.out_scale, operands.out_offset = (
                None if t is None else _float(t).reshape(-1, p.dim_v if t.numel() > 1 else 1).expand(p.heads_q, p.dim_v)
                for t in self.out_quant
            )
        operands.bias = None if self.bias is None else self._matrix(self.bias)
        # A bool and a byte are the same memory; the view makes one kernel type of them.
        operands.blocked = None if self.blocked is None else self._matrix(self.blocked.view(torch.uint8))
        return operands

    def pattern(self, operands: Operands) -> Operands | None:
        """Operands without memory that over() lays on that of the next call; None where more than rows is read."""
        p = self.problem
        more = p.dequant_k != "none" or p.out_quant != "none" or p.has_blocked or p.has_sink or p.bias != "none"
        return None if more else over_nothing(operands, (self.q, *self.k, *(self.v or ()), self.table))

    def whole(self) -> InferenceCall:
        """The call as it is."""
        return self

    def again(self) -> tuple[Operands, Operands, tuple[Tensor, Tensor, Tensor]] | None:
        """As waist.lowered.Repeatable."""
        _, token, _ = LAYOUTS[self.layout]
        if len(self.k) > 1 or (self.extents.q_len != self.q.shape[token]).any():
            return None
        results = another(self._templates()[0]), *self.stats()
        views = self.operands(*results)
        rows = self.pattern(views)
        return None if rows is None else (views, rows, results)

    def rows(self, tensors: tuple[Tensor, ...], dim: int) -> RowView | PagedView:
        """The rows of keys or values; dim counts elements, which two to a byte are fewer bytes."""
        if any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in tensors):
            tensors = tuple(t.contiguous() for t in tensors)  # Kernels read rows of neighbouring elements.
        one, e = tensors[0], self.extents
        batch, token, head = LAYOUTS[self.cache.layout]
        assert batch is not None
        bytes_ = (dim + 1) // 2 if self.problem.kv_dtype == "int4" else dim
        if self.cache.page_size:
            assert self.table is not None
            stride = bytes_ if head is None else one.stride(head)
            size, table = self.cache.page_size, self.table
            if table.dtype != torch.int32:
                table = table.to(torch.int32)  # Kernels read 32 bits; every id in use was found to fit.
            if table.stride(-1) != 1 and table.shape[-1] > 1:
                table = table.contiguous()  # A row of page ids is read at neighbouring addresses.
            return PagedView(one, table, size, one.stride(batch), one.stride(token), stride, dim)
        if len({t.stride(token) for t in tensors if t.shape[token] > 1}) > 1:
            tensors = tuple(t.contiguous() for t in tensors)  # One stride serves all sequences.
        # A tensor of one token or none may say any stride, contiguous or not.
        one = max(tensors, key=lambda t: t.shape[token])
        key = ("cache", dim, *((t.shape, t.stride()) for t in tensors))
        view = e.memo.get(key)
        if view is None:
            listed = len(tensors) > 1
            address = np.arange(len(e)) * (0 if listed else one.stride(batch))
            if self.first is not None:
                address = address + self.first * one.stride(token)
            strides = [bytes_ if head is None else t.stride(head) for t in tensors]
            heads = np.array(strides if listed else strides * len(e), np.int64)
            view = keep(e, key, RowView((), address.astype(np.int64), one.stride(token), heads, dim))
        return RowView(tensors, view.address, view.stride_token, view.stride_head, view.dim)

    def _dequant(self, scales: Scales, kind: str, dim: int) -> Dequant:
        views = [None if t is None else self._scale(_float(t), kind, dim) for t in scales]
        assert views[0] is not None
        return Dequant(views[0], views[1])

    def _scale(self, scale: Tensor, kind: str, dim: int) -> RowView | PagedView:
        if kind == "token":
            return self.rows((scale.unsqueeze(-1),), 1)
        count, scale = len(self.extents), scale[:, :dim].contiguous()  # One number per element, however it was given.
        heads = np.full(count, scale.shape[1], np.int64)
        return RowView((scale,), np.zeros(count, np.int64), 0, heads, dim)

    def _matrix(self, tensor: Tensor) -> MatrixView:
        view = matrix_view(tensor, "broadcast", self.problem.heads_q, self.extents)
        if self.first is not None:
            view.address = view.address + self.first * view.stride_key  # Columns count the cache's slots.
        return view


def _laid(call: InferenceCall, out: Tensor, stats: tuple[Tensor, Tensor]) -> Filled:
    rooms = room(out), *stats
    last = call.memo.run
    if last is None or last[0] != out.stride():
        _, token, _ = LAYOUTS[call.layout]
        short = bool((call.extents.q_len != call.q.shape[token]).any())
        operands = call.operands(*rooms)
        call.memo.run = out.stride(), short, call.pattern(operands)
    else:
        _, short, pattern = last
        if pattern is None:
            operands = call.operands(*rooms)
        else:
            operands = over(pattern, call.q, call.k, call.v or call.k, call.table, rooms)
    return Filled((operands,), rooms, (out,), rooms if short else ())


def narrowed(view: RowView | PagedView, dim: int) -> RowView | PagedView:
    """The first elements of every row."""
    if isinstance(view, RowView):
        return RowView(view.keep, view.address, view.stride_token, view.stride_head, dim)
    strides = view.stride_page, view.stride_token, view.stride_head
    return PagedView(view.pool, view.table, view.page_size, *strides, dim)


def _float(scale: Tensor) -> Tensor:
    """A scale as float32; 64 bits are a hardware word whose bits 13 to 31 are the upper ones of a float32."""
    if scale.dtype == torch.uint64:
        return (scale.view(torch.int64) & 0xFFFFE000).to(torch.int32).view(torch.float32)
    return scale.float()


def extents_of(q_len: np.ndarray, kv_len: np.ndarray, band: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Extents:
    """Lengths and bands of a call without computed biases."""
    return Extents(q_len, kv_len, *band, np.zeros_like(q_len))


def stored_as(tensor: Tensor, dtype: torch.dtype) -> str:
    """Problem.kv_dtype of a cache, from its tensor and the query's dtype."""
    return {torch.int8: "int8", torch.uint8: "int4"}.get(tensor.dtype, "") if tensor.dtype != dtype else ""
