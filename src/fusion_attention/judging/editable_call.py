"""Setting: a call in the intermediate representation that can be changed; Block: some of its rows, heads and keys.

They read the same views of memory as back ends do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fusion_attention.backends.golden.sparse_indices import added_up
from fusion_attention.ir import bias
from fusion_attention.ir.dropout import keep_from_bits, keep_from_philox
from fusion_attention.ir.mask import blocked_by_tiles
from fusion_attention.ir.memory_views import PagedView, RowView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem

Tensor = torch.Tensor
WORKING_DTYPE = torch.float64


@dataclass(frozen=True, eq=False)
class Block:
    """Ranges of query heads, query rows and keys of one sequence of a call, in float64; k and v have the heads of q, or
    one."""

    problem: Problem
    b: int
    # heads, rows, keys: the ranges of the block in sequence b.
    heads: slice
    rows: slice
    keys: slice
    # kv_len, q_len: numbers of keys and query rows of the sequence.
    kv_len: int
    q: Tensor
    k: Tensor
    v: Tensor
    q_rope: Tensor | None
    k_rope: Tensor | None
    scores_by: Any  # factor on q . k, a number or [heads, rows, 1]
    softcap: float
    bias: Tensor | None
    visible: Tensor  # bool [heads or 1, rows, keys]
    in_band: Tensor  # bool [rows], true for rows with a key in the band
    times: Tensor | None = None  # how often a row selects a key, or None
    keep: Tensor | None = None  # bool, false for weights that dropout removes, or None
    keep_factor: float = 1.0  # factor on the other weights
    sink: Tensor | None = None
    weight_scale: Tensor | None = None  # factor on weights before they are rounded to int8, or None
    out_scale: tuple[Tensor, Tensor | None] | None = None  # (scale, offset) of a quantised output, or None
    bias_capped: bool = False  # True if the bias is added before the softcap
    dropped_divisor: bool = False  # True if the sum of weights excludes dropped ones
    delta_by: float = 1.0  # factor on delta
    sloped: bool = True  # False if gradients lack the softcap's derivative
    # Factor on the contribution of a (query, key) pair to gradients, [heads or 1, rows or 1, keys or 1], or None.
    counted: Tensor | None = None
    # By gradient, the vectors whose weighted sum it is, if they are not k, q or dout.
    summed: Mapping[str, Tensor] = field(default_factory=dict)
    gradient_scale: float | None = None  # factor of dq and dk, if it is not scores_by
    saved: tuple[Tensor, ...] = ()  # of a backward, (dout, out, max, sum) of these rows
    dlse: Tensor | None = None  # of a backward, the gradient of lse, or None
    q_len: int = 0

    @property
    def positions(self) -> Tensor:
        """The index of each key in its sequence: [keys]."""
        return torch.arange(self.keys.start, self.keys.stop)


Edit = Callable[[Block], Block]


class Lists(NamedTuple):
    """The selected keys (or blocks of keys) of each query head and row, by number."""

    entries: Tensor  # the numbers, [heads, rows, selected]
    read: Tensor  # bool in the same shape, true for entries that are read; false after the first -1
    keys: int  # the number of keys (or blocks) that exist


@dataclass(frozen=True, eq=False)
class Setting:
    """An attention call with all parameters that a mistake of a kernel may change."""

    # op_kind, problem, extents, operands, grads: its kind, parameters, lengths and mask bands, tensors, gradients.
    op_kind: str
    problem: Problem
    extents: Extents
    operands: Operands
    grads: Grads | None = None
    kv_heads: np.ndarray | None = None  # the key head of each query head; None: the correct one
    v_heads: np.ndarray | None = None  # the head of its values, if it is not kv_heads
    q_heads: np.ndarray | None = None  # the query head that is read in place of each query head
    edits: tuple[Edit, ...] = ()  # functions applied to every Block (range of heads, queries and keys)
    offset_outside: bool = False  # True to dequantise as stored * scale + offset, not (stored + offset) * scale
    high_first: bool = False  # True if the even element of an int4 pair is in the high half of the byte
    unsigned: bool = False  # True if integers of 4 bits have no sign
    drop_msb: bool = False  # True if dropout bits begin with the most significant one
    lists: Callable[[Lists], Lists] | None = None  # function applied to lists of selected keys
    # Functions applied to every result: (kind, value, all results, block, precision) -> value; for gradients no
    # results, and in place of a block the range of the output's rows.
    returns: tuple[Callable[..., Tensor], ...] = ()
    # Functions applied to the variance of every result's error: (kind, variance, values before and after `returns`,
    # block, grade) -> variance.
    errors: tuple[Callable[..., Tensor], ...] = ()
    cached: dict[Any, Any] = field(default_factory=dict)
    deltas: dict[Any, Tensor] = field(default_factory=dict)  # cached variances of delta
    sums: dict[Any, Any] = field(default_factory=dict)  # cached gradients of keys, summed over rows

    def changed(self, edit: Edit | None = None, **fields: Any) -> Setting:
        """Returns this call with changed fields, and with the function `edit`, if given, applied to its Blocks."""
        edits = self.edits if edit is None else (*self.edits, edit)
        return replace(self, edits=edits, cached={}, deltas={}, sums={}, **fields)

    def of_blocks(self, **fields: Any) -> Setting:
        """Returns this call with other values in the named fields of its Blocks (ranges of heads, queries and keys)."""
        return self.changed(lambda x: replace(x, **fields))

    def of_problem(self, **fields: Any) -> Setting:
        """Returns this call with changed parameters, such as scale or softcap."""
        return self.changed(problem=replace(self.problem, **fields))

    def of_extents(self, **fields: Any) -> Setting:
        """Returns this call with changed sequence lengths or edges of the mask's band."""
        return self.changed(extents=replace(self.extents, **fields))

    def of_compressed(self, hi: np.ndarray) -> Setting:
        """Returns this call with another bound `hi` of the visible compressed keys, int64 [sequences]."""
        second = self.extents.compressed
        assert second is not None
        return self.changed(extents=replace(self.extents, compressed=replace(second, hi=hi)))

    def of_operands(self, **fields: Any) -> Setting:
        """Returns this call with changed tensors, by name (q, k, v, ...)."""
        return self.changed(operands=replace(self.operands, **fields))

    @property
    def group(self) -> int:
        """The number of query heads per key head."""
        return self.problem.group

    def block(self, b: int, heads: slice, rows: slice, keys: slice | None = None) -> Block:
        """Returns a range of query heads, rows and keys of sequence b, in float64, to compute attention of; keys None:
        those that the rows may see."""
        p, e, o = self.problem, self.extents, self.operands
        first, end = e.row_interval(b, np.arange(rows.start, rows.stop))
        kv_len = e.all_keys(b)
        keys = _keys(p, first, end, kv_len) if keys is None else keys
        position = torch.arange(keys.start, keys.stop)
        low, high = (torch.from_numpy(edge)[:, None] for edge in (first, end))
        visible = ((position >= low) & (position < high))[None]
        if p.compressed_ratio:
            behind = int(e.kv_len[b])
            visible = visible | ((position >= behind) & (position < behind + self._listed(b, rows)[0]))
        visible = self._unblocked(visible, b, heads, rows, keys)
        times = self._times(b, heads, rows, keys)
        kv = self._kv_heads()[heads]
        by: Any = p.scale
        if o.row_scale is not None:
            by = by * _rows(o.row_scale, b, p.heads_q, int(e.q_len[b]), heads, rows)
        of_values = kv if self.v_heads is None else self.v_heads[heads]
        k, v = self._keys_of(b, "k", kv, keys), self._keys_of(b, "v", of_values, keys)
        place = (p, b, heads, rows, keys, kv_len)
        result = Block(
            *place,
            q=self._query(o.q, b, heads, rows),
            k=k,
            v=v,
            q_rope=self._query(o.q_rope, b, heads, rows) if p.dim_rope and o.q_rope is not None else None,
            k_rope=self._keys_of(b, "k_rope", kv, keys) if p.dim_rope and o.k_rope is not None else None,
            scores_by=by,
            softcap=p.softcap,
            bias=self._bias(b, heads, rows, keys),
            visible=visible if times is None else visible & (times > 0),
            in_band=torch.from_numpy(end > first),
            times=times,
            keep=self._keep(b, heads, rows, keys),
            keep_factor=1.0 / max(p.keep_prob, 1e-100) if p.dropout != "none" else 1.0,
            sink=o.sink[heads].to(WORKING_DTYPE) if p.has_sink and o.sink is not None else None,
            weight_scale=None if o.weight_scale is None or not p.has_weight_scale else o.weight_scale.to(WORKING_DTYPE),
            out_scale=self._out_scale(heads),
            saved=self._saved(b, heads, rows),
            dlse=self._query(self.grads.dlse, b, heads, rows) if self.grads and self.grads.dlse else None,
            q_len=int(e.q_len[b]),
        )
        for edit in self.edits:
            result = edit(result)
        return result

    def _kv_heads(self) -> np.ndarray:
        return np.arange(self.problem.heads_q) // self.group if self.kv_heads is None else self.kv_heads

    def _query(self, view: RowView, b: int, heads: slice, rows: slice) -> Tensor:
        count, length = self.problem.heads_q, int(self.extents.q_len[b])
        if self.q_heads is None:
            return _rows(view, b, count, length, heads, rows)
        return _rows(view, b, count, length, slice(None), rows)[torch.from_numpy(self.q_heads[heads])]

    def _saved(self, b: int, heads: slice, rows: slice) -> tuple[Tensor, ...]:
        if self.grads is None:
            return ()
        o = self.operands
        return tuple(self._query(view, b, heads, rows) for view in (self.grads.dout, o.out, o.stats.max, o.stats.sum))

    def _keys_of(self, b: int, name: str, kv: np.ndarray, keys: slice) -> Tensor:
        """Returns keys or values of sequence b, dequantised: [heads, keys, dim], or [1, keys, dim] if all are equal.
        name: "k", "v" or "k_rope"; kv: the key head of each query head."""
        stored = self._stored(b, name)
        one = np.unique(kv)
        picked = stored[one, keys] if len(one) == 1 else stored[torch.from_numpy(kv), keys]
        result = picked.to(WORKING_DTYPE)
        dequant = {"k": self.operands.dequant_k, "v": self.operands.dequant_v}.get(name)
        if dequant is None:
            return result
        which = one if len(one) == 1 else kv
        scale, offset = (self._scales(values, b, which, keys) for values in (dequant.scale, dequant.offset))
        if self.offset_outside and offset is not None:
            return result * scale + offset
        return (result if offset is None else result + offset) * scale

    def _scales(self, view: RowView | PagedView | None, b: int, heads: np.ndarray, keys: slice) -> Any:
        if view is None:
            return None
        rows = view.sequence(b, self.problem.heads_kv, int(self.extents.kv_len[b]))
        return rows[torch.from_numpy(np.asarray(heads)), keys].to(WORKING_DTYPE)

    def _stored(self, b: int, name: str) -> Tensor:
        """Returns "k", "v" or "k_rope" of sequence b as stored, not dequantised: [heads_kv, kv_len, dim]. The keys that
        all sequences share are first, then the sequence's, then compressed keys. The latest sequence is cached."""
        if (b, name) in self.cached:
            result: Tensor = self.cached[b, name]
            return result
        p, o, length = self.problem, self.operands, int(self.extents.kv_len[b])
        shared = min(p.common_keys, length)
        rows = self._unpacked(getattr(o, name), b, length - shared, name)
        common = {"k": o.k_common, "v": o.v_common}.get(name)
        if common is not None and shared:
            rows = torch.cat((self._unpacked(common, 0, shared, name), rows), 1)
        compressed = {"k": o.k_compressed, "v": o.v_compressed}.get(name)
        if compressed is not None:
            rows = torch.cat((rows, compressed.sequence(b, p.heads_kv, self.extents.all_keys(b) - length)), 1)
        for key in [key for key in self.cached if key[0] != b]:
            del self.cached[key]
        self.cached[b, name] = rows
        return rows

    def _unpacked(self, view: RowView | PagedView, b: int, length: int, name: str) -> Tensor:
        p = self.problem
        if p.kv_dtype != "int4" or name == "k_rope":
            return view.sequence(b, p.heads_kv, length)
        packed = replace(view, dim=-(-view.dim // 2)).sequence(b, p.heads_kv, length).int()
        halves = (packed & 15, packed >> 4)
        both = torch.stack(halves[::-1] if self.high_first else halves, -1).flatten(-2)[..., : view.dim]
        return both if self.unsigned else (both ^ 8) - 8

    def _unblocked(self, visible: Tensor, b: int, heads: slice, rows: slice, keys: slice) -> Tensor:
        p, o = self.problem, self.operands
        q_len, kv_len = int(self.extents.q_len[b]), int(self.extents.kv_len[b])
        if p.has_blocked and o.blocked is not None:
            start = o.blocked.first_of(b)
            matrix = o.blocked.sequence(b, p.heads_q, q_len, kv_len)[heads, rows]
            free = matrix[..., max(keys.start - start, 0) : max(keys.stop - start, 0)] == 0
            visible = visible & torch.nn.functional.pad(free, (visible.shape[-1] - free.shape[-1], 0), value=True)
        if p.has_blocked_tiles and o.blocked_tiles is not None:
            removed = blocked_by_tiles(o.blocked_tiles, o.blocked_bits, b, p.heads_q, q_len, kv_len)
            visible = visible & ~removed[heads, rows, keys]
        return visible

    def _times(self, b: int, heads: slice, rows: slice, keys: slice) -> Tensor | None:
        p, e = self.problem, self.extents
        if not p.select_count or self.operands.indices is None:
            return None
        entries = self.operands.indices.sequence(b, p.heads_kv, int(e.q_len[b]))
        entries = entries[torch.from_numpy(self._kv_heads()[heads])][:, rows].long()
        end, listed = self._listed(b, rows)
        read = (torch.arange(entries.shape[2]) < -(-end // p.select_block)) & (entries >= 0).cumprod(-1).bool()
        if self.lists is not None:
            entries, read, _ = self.lists(Lists(entries, read, -(-listed // p.select_block)))
        blocks = added_up(read.to(WORKING_DTYPE), entries, read, -(-listed // p.select_block))
        times = blocks.repeat_interleave(p.select_block, -1)[..., :listed]
        if p.compressed_ratio:  # all keys of the first source's band are visible
            times = torch.nn.functional.pad(times, (int(e.kv_len[b]), 0), value=1.0)
        return times[..., keys]

    def _listed(self, b: int, rows: slice) -> tuple[Tensor, int]:
        """Returns (int [rows, 1], the end of the keys of sequence b that each query row may select; number of all such
        keys). If there are compressed keys, rows select only among those."""
        p, e, row = self.problem, self.extents, np.arange(rows.start, rows.stop)
        if p.compressed_ratio:
            end, count = e.compressed_end(b, row, p.compressed_ratio), e.all_keys(b) - int(e.kv_len[b])
        else:
            end, count = np.maximum(e.row_interval(b, row)[1], 0), int(e.kv_len[b])
        return torch.from_numpy(end)[:, None], count

    def _bias(self, b: int, heads: slice, rows: slice, keys: slice) -> Tensor | None:
        p, o, e = self.problem, self.operands, self.extents
        if p.bias == "none":
            return None
        if p.bias in ("slopes", "slopes_sqrt"):
            assert o.slopes is not None
            slopes, root = o.slopes[b, heads].to(WORKING_DTYPE), p.bias == "slopes_sqrt"
            result = bias.from_slopes(slopes, int(e.shift[b]), rows, keys, root)
            return p.scale * result if p.bias_scaled else result
        assert o.bias is not None
        if p.bias == "table":
            lengths = int(e.q_len[b]), int(e.kv_len[b])
            result = bias.from_table(o.bias, b, p.heads_q, lengths, rows, keys)[heads].to(WORKING_DTYPE)
        else:
            result = o.bias.sequence(b, p.heads_q, rows.stop, keys.stop)[heads, rows, keys].to(WORKING_DTYPE)
        return p.scale * result if p.bias_scaled else result

    def _keep(self, b: int, heads: slice, rows: slice, keys: slice) -> Tensor | None:
        p, o = self.problem, self.operands
        count = heads.stop - heads.start
        if p.dropout == "none":
            return None
        if p.dropout == "philox":
            stream = b * p.heads_q + heads.start
            return keep_from_philox(o.seed, o.offset, p.keep_prob, stream, count, rows, keys)
        assert o.drop_bits is not None
        view = o.drop_bits
        if self.drop_msb:
            bit = torch.arange(8, dtype=torch.uint8)
            bits = ((view.keep.reshape(-1)[:, None] >> bit) & 1).flip(-1)
            view = replace(view, keep=(bits << bit).sum(-1, dtype=torch.uint8))
        here = replace(view, address=view.address + heads.start * view.stride_head)
        return keep_from_bits(here, b, count, rows, keys)

    def _out_scale(self, heads: slice) -> tuple[Tensor, Tensor | None] | None:
        o = self.operands
        if self.problem.out_quant == "none" or o.out_scale is None:
            return None
        offset = None if o.out_offset is None else o.out_offset[heads].to(WORKING_DTYPE)[:, None]
        return o.out_scale[heads].to(WORKING_DTYPE)[:, None], offset


def _rows(view: RowView, b: int, heads_all: int, length: int, heads: slice, rows: slice) -> Tensor:
    return view.sequence(b, heads_all, length)[heads, rows].to(WORKING_DTYPE)


def _keys(p: Problem, first: np.ndarray, end: np.ndarray, kv_len: int) -> slice:
    """Returns the range of keys that some query rows may see; all `kv_len` if a row without keys may return the mean of
    V. first, end: for each row, the band's first key and the key after its last one; p: the call's parameters."""
    means = p.empty_rows == "mean" or (p.empty_rows != "zero" and (p.has_blocked or p.bias != "none"))
    some = end > first
    if means or p.has_blocked_tiles or p.selects or not some.any():
        return slice(0, kv_len)
    return slice(int(first[some].min()), int(end[some].max()))
