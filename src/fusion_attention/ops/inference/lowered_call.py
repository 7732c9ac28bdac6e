"""InferenceCall: a call of attention over a KV cache, as back ends compute it, and its views of tensors.

cache.py makes the views of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from fusion_attention.contract import CallCache
from fusion_attention.ir.call import Filled, Further, buffer
from fusion_attention.ir.memory_views import MatrixView, RowView
from fusion_attention.ir.problem import Extents, Operands, Problem, Stats
from fusion_attention.memory import another, empty, template
from fusion_attention.ops.inference.cache import UNSCALED, Cache, CacheViews, Scales, as_float, narrowed
from fusion_attention.ops.shared import layouts

Tensor = torch.Tensor

LSE = "softmax_lse"
_LOWEST = -float(np.finfo(np.float32).max)
# Number of rows that are checked together for visible keys.
_ROWS = 256


@dataclass(eq=False)
class InferenceCall:
    """A call of attention over a KV cache, as back ends compute it.

    Args:
        layout: axis order of q and q_rope.
        cache: layout of k, v and k_rope.
        q: query rows, floating-point or int8.
        k, v: one tensor, or one per sequence; v None: values are the first dim_v elements of k's rows.
        table: page table [sequences, pages] of a paged cache.
        first: int64 [sequences], the index of each sequence's first token in a padded cache; None: 0.
        k_dequant, v_dequant: scales of stored integers; if v_dequant is UNSCALED, k_dequant is used for v too.
        bias, blocked: 4-D, broadcast over [B, N1, rows, tokens of the cache]; with packed rows or a common prefix,
            columns count the keys of a sequence from 0.
        sink: [N1], one more logit per head in the softmax's denominator.
        out_quant: (scale, offset), each of 1 or N1 * dim_v elements.
        names: names of the results: out; optionally max and sum, or softmax_lse.
        call_cache: shared by all calls with the same shapes, strides and lengths.
        out_layout: axis order of the output; "": that of q.
        lse_by_batch: softmax_lse is [1, N1, S1, 1] although rows are packed.
        absent: results of the operator definition that were not requested: they have no elements.
        q_first: int64 [sequences], the index of each sequence's first row in padded rows; None: 0.
        q_rope, k_rope: rope elements in the layouts of q and k.
        k_common, v_common: keys and values of a prefix that all sequences share, in q's layout, with a batch of 1.
        row_scale: (scales, factor): float32 scales of q's shape without the axis of elements ([B, S1, N1] in layout
            BSH), and one number that multiplies all of them.
        weight_scale: one element, the scale of softmax weights that are rounded to int8.
        tree: blocked is [B, S1, S1], or 1-D with q_len * q_len elements per packed sequence, and covers the last q_len
            keys.
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
    k_dequant: Scales = UNSCALED
    v_dequant: Scales = UNSCALED
    bias: Tensor | None = None
    blocked: Tensor | None = None
    sink: Tensor | None = None
    out_quant: tuple[Tensor | None, Tensor | None] = (None, None)
    names: tuple[str, ...] = ("attention_out",)
    call_cache: CallCache = field(default_factory=CallCache)
    out_layout: str = ""
    lse_by_batch: bool = False
    absent: tuple[str, ...] = ()
    q_first: np.ndarray | None = None
    q_rope: Tensor | None = None
    k_rope: tuple[Tensor, ...] | None = None
    k_common: Tensor | None = None
    v_common: Tensor | None = None
    row_scale: tuple[Tensor, Tensor] | None = None
    weight_scale: Tensor | None = None
    tree: bool = False

    op_kind = "attention_forward"

    @property
    def device(self) -> torch.device:
        return self.q.device

    def results(self) -> dict[str, Tensor]:
        """Allocates {name: result}: the output, and those of softmax max and sum, or softmax_lse, that `names` has."""
        out, stats = self._templates()
        if self.names[1:] == (LSE,):
            shape = (1, *stats.shape[::-1], 1) if self.lse_by_batch else (*stats.shape, 1)
            return {self.names[0]: another(out), LSE: empty(stats, shape)}
        more = self.stats() if len(self.names) > 1 else ()
        result = dict(zip(self.names, (another(out), *more), strict=True))
        return result | {name: empty(stats, (0,)) for name in self.absent}

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        out, *given = (outputs[name] for name in self.names)
        lse = given[0] if self.names[1:] == (LSE,) else None
        stats = self.stats() if lse is not None or not given else given
        buffers = buffer(out), *stats
        clears = () if layouts.covered(self.q, self.layout, self.extents, "q") else buffers
        operands = self.operands(dict(zip(("out", "max", "sum"), buffers, strict=True)))

        def convert() -> None:
            if lse is not None:
                logarithms = _logarithm(*stats)
                if self.problem.has_sink:
                    _forget_sinks(self, operands, logarithms)
                lse.copy_(_shaped(logarithms, self.lse_by_batch))

        return Filled((operands,), buffers, (out,), clears, convert=convert)

    def stats(self) -> tuple[Tensor, Tensor]:
        """Allocates the softmax max and sum per row and head, which kernels write."""
        _, stats = self._templates()
        return another(stats), another(stats)

    def _templates(self) -> tuple[Tensor, Tensor]:
        """Returns templates, from which tensors are allocated, of the output and of the softmax max or sum."""
        templates: tuple[Tensor, Tensor] | None = self.call_cache.templates
        if templates is None:
            p, q = self.problem, self.q
            batch, token, _ = layouts.LAYOUTS[self.layout]
            sizes = 1 if batch is None else q.shape[batch], q.shape[token]
            shape = layouts.rows_shape(self.out_layout or self.layout, *sizes, p.heads_q, p.dim_v)
            out = template(q, shape, p.torch_dtype if p.out_quant == "none" else torch.int8)
            dtype = torch.float64 if p.dtype == "float64" else torch.float32
            templates = self.call_cache.templates = (
                out,
                template(q, layouts.stats_shape(q, self.layout, p.heads_q), dtype),
            )
        return templates

    def operands(self, memory: Mapping[str, Tensor]) -> Operands:
        """Returns views of the tensors that kernels read and write; memory: {"out", "max", "sum"}, in this order."""
        out, max_, sum_ = memory.values()
        p, e, form, views = self.problem, self.extents, layouts.Form(self.layout), self._views()
        k = views.rows(self.k, p.dim_qk)
        v = narrowed(k, p.dim_v) if self.v is None else views.rows(self.v, p.dim_v)
        stats = (layouts.stats_view(t, form, p.heads_q, e) for t in (max_, sum_))
        operands = Operands(
            q=self._row_view(self.q if self.q.dtype == p.torch_dtype else self.q.to(p.torch_dtype)),
            k=k,
            v=v,
            out=self._moved(layouts.row_view(out, self.out_layout or self.layout, p.heads_q, e, "q")),
            stats=Stats(*map(self._moved, stats)),
            sink=layouts.to_float32(self.sink, self.q),
        )
        if p.dim_rope:
            assert self.q_rope is not None
            assert self.k_rope is not None
            operands.q_rope, operands.k_rope = self._row_view(self.q_rope), views.rows(self.k_rope, p.dim_rope)
        if p.common_keys:
            assert self.k_common is not None
            operands.k_common = common = views.common_rows(self.k_common, self.layout, p.dim_qk)
            v_common = self.v_common
            operands.v_common = (
                narrowed(common, p.dim_v) if v_common is None else views.common_rows(v_common, self.layout, p.dim_v)
            )
        if p.dequant_k != "none":
            operands.dequant_k = views.dequant(self.k_dequant, p.dequant_k, p.dim_qk)
        if p.dequant_v != "none":
            scales = self.k_dequant if self.v_dequant.scale is None else self.v_dequant
            operands.dequant_v = views.dequant(scales, p.dequant_v, p.dim_v)
        if p.has_row_scale:
            assert self.row_scale is not None
            layout = "BSND" if self.layout == "BSH" else self.layout
            scale, factor = self.row_scale
            scale = (scale * factor.reshape(())).unsqueeze(-1)
            operands.row_scale = self._moved(layouts.row_view(scale, layout, p.heads_q, e, "q"))
        if self.weight_scale is not None:
            operands.weight_scale = as_float(self.weight_scale).reshape(1)
        if p.out_quant != "none":
            operands.out_scale, operands.out_offset = map(self._per_channel, self.out_quant)
        operands.bias = None if self.bias is None else self._matrix(self.bias)
        # Kernels read bytes; bool and uint8 have the same representation.
        blocked = None if self.blocked is None else self.blocked.view(torch.uint8)
        if blocked is not None:
            operands.blocked = self._tree(blocked) if self.tree else self._matrix(blocked)
        return operands

    def complete(self) -> InferenceCall:
        return self

    @property
    def repeats(self) -> bool:
        """True if the kernels compute the complete call: keys are one tensor, and every row is in a sequence."""
        forgets = self.names[1:] == (LSE,) and self.problem.has_sink
        return len(self.k) == 1 and not forgets and layouts.covered(self.q, self.layout, self.extents, "q")

    def memory(self) -> dict[str, Tensor]:
        return dict(zip(("out", "max", "sum"), (another(self._templates()[0]), *self.stats()), strict=True))

    @property
    def further(self) -> Further | None:
        """The function that converts out, max and sum to the results by name; None if they are the results."""
        names, absent, by_batch = self.names, self.absent, self.lse_by_batch
        if names[1:] == (LSE,):
            return Further(True, lambda out, *stats: {names[0]: out, LSE: _shaped(_logarithm(*stats), by_batch)})
        if not absent:
            return None
        stats = self._templates()[1].dtype
        return Further(False, lambda out, *_: {names[0]: out, **{n: out.new_empty(0, dtype=stats) for n in absent}})

    def _views(self) -> CacheViews:
        p = self.problem
        return CacheViews(self.cache, self.extents, self.table, self.first, p.common_keys, p.kv_dtype == "int4")

    def _row_view(self, tensor: Tensor) -> RowView:
        return self._moved(layouts.row_view(tensor, self.layout, self.problem.heads_q, self.extents, "q"))

    def _moved(self, view: RowView) -> RowView:
        """Returns the view, moved so that each sequence begins at its first row (q_first) in left-padded queries."""
        if self.q_first is None:
            return view
        address = view.address + self.q_first * view.stride_token
        return RowView(view.keep, address, view.stride_token, view.stride_head, view.dim)

    def _per_channel(self, scale: Tensor | None) -> Tensor | None:
        p = self.problem
        if scale is None:
            return None
        return as_float(scale).reshape(-1, p.dim_v if scale.numel() > 1 else 1).expand(p.heads_q, p.dim_v)

    def _matrix(self, tensor: Tensor) -> MatrixView:
        view = layouts.matrix_view(tensor, "broadcast", self.problem.heads_q, self.extents)
        # Columns count tokens of the padded cache; with a common prefix, which is not in it, they count keys.
        if self.first is not None and not self.problem.common_keys:
            view.address = view.address + self.first * view.stride_key
        if self.q_first is not None:
            view.address = view.address + self.q_first * view.stride_row
        return view

    def _tree(self, mask: Tensor) -> MatrixView:
        e = self.extents
        first = e.kv_len - e.q_len
        if mask.dim() == 1:
            size = e.q_len * e.q_len
            view = MatrixView(mask.contiguous(), np.cumsum(size) - size, np.zeros_like(size), e.q_len, 1)
        else:
            view = layouts.matrix_view(mask.unsqueeze(1), "broadcast", self.problem.heads_q, e)
        view.address, view.first = view.address - first * view.stride_key, first
        return view


def _logarithm(max_: Tensor, sum_: Tensor) -> Tensor:
    """Returns max + ln(sum); +inf for rows without keys or sequence, -FLT_MAX for fully masked rows (a mean of V)."""
    lse = sum_.log().add_(max_)
    return lse.masked_fill_(max_ == -math.inf, _LOWEST).masked_fill_(sum_ == 0, math.inf)


def _shaped(lse: Tensor, by_batch: bool) -> Tensor:
    """Returns lse with a last axis of 1, as CANN has it; [rows, heads] becomes [1, heads, rows, 1] if by_batch."""
    return (lse.mT.unsqueeze(0) if by_batch else lse).unsqueeze(-1)


def _forget_sinks(call: InferenceCall, operands: Operands, lse: Tensor) -> None:
    """Writes +inf to the softmax_lse of rows without visible keys, whose max and sum include the sink."""
    e, heads = call.extents, call.problem.heads_q
    view = call._moved(layouts.stats_view(lse, layouts.Form(call.layout), heads, e))
    for b in range(len(e)):
        q_len, kv_len = int(e.q_len[b]), int(e.kv_len[b])
        rows = view.sequence(b, heads, q_len).squeeze(-1)
        first, end = (torch.from_numpy(edge).to(lse.device) for edge in e.row_interval(b, np.arange(q_len)))
        rows.masked_fill_(end <= first, math.inf)
        if operands.blocked is None or not kv_len:
            continue
        matrix, start = operands.blocked.sequence(b, heads, q_len, kv_len), operands.blocked.first_of(b)
        key = torch.arange(start, kv_len, device=lse.device)
        for i in range(0, q_len, _ROWS):
            here = slice(i, min(i + _ROWS, q_len))
            low, high = first[here, None], end[here, None]
            visible = ((matrix[:, here] == 0) & (key >= low) & (key < high)).any(-1)
            history = (low < start) & (high > low)  # keys before the matrix are never blocked
            rows[:, here] = rows[:, here].masked_fill(~(visible | history[:, 0]), math.inf)


def extents_of(q_len: np.ndarray, kv_len: np.ndarray, band: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Extents:
    """Returns the Extents (lengths, bands of visible keys) of a call without ALiBi; band: (lo, hi, prefix) arrays."""
    return Extents(q_len, kv_len, *band, np.zeros_like(q_len))
