"""Attention between chunks of sequences on one process: forward, backward, and the gradient of a sink.

A chunk is a range of adjacent tokens of one sequence. A chunk of rows and a chunk of keys are a *pair*. A back end
computes a pair as a sequence whose ChunkOrigin has its position in the unsharded sequence (ir/problem.py). If chunks
begin at multiples of CHUNK_UNIT, the bits are those of the unsharded call for

* out, statistics and dq, if each chunk of rows has all keys of its sequence in one pair;
* dk and dv, if each chunk of keys has all rows of its sequence in one pair.

Pairs with common rows, or keys, have partial results in float32: those of rows are merged (ir/merge.py), gradients are
added, in ascending order of the other chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.memory_views import MatrixView, RowView
from fusion_attention.ir.merge import Partial, merge
from fusion_attention.ir.problem import ChunkOrigin, Extents, Grads, Operands, Problem, Stats
from fusion_attention.memory import empty
from fusion_attention.plan import plan

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks (adjacent tokens) of sequences, and their positions in tensors [batch, tokens, heads, dim]: int64, one
    element per chunk."""

    seq: np.ndarray  # the sequence
    first: np.ndarray  # position of the chunk's first token in it
    count: np.ndarray  # number of tokens
    batch: np.ndarray  # the chunk's index on a tensor's first axis
    start: np.ndarray  # its first index on the second axis

    @classmethod
    def packed(cls, seq: Any, first: Any, count: Any) -> Chunks:
        """Makes chunks, int64 fields of this class, that lie one after the other in tensors [1, tokens, heads, dim]."""
        seq, first, count = (np.array(a, np.int64) for a in (seq, first, count))
        return cls(seq, first, count, np.zeros_like(seq), np.cumsum(count) - count)

    @classmethod
    def full(cls, lengths: np.ndarray) -> Chunks:
        """Makes one chunk per sequence, packed in tensors [1, tokens, heads, dim]; lengths: tokens of each sequence."""
        return cls.packed(np.arange(len(lengths)), np.zeros(len(lengths)), lengths)

    def __len__(self) -> int:
        return len(self.seq)

    def view(self, tensor: Tensor, chosen: np.ndarray, layer: np.ndarray | None = None) -> RowView:
        """Returns a view of chosen chunks (indices into this object) in a tensor [batch, tokens, heads, dim], or
        [layers, batch, tokens, heads, dim] with `layer`, the index on the first axis of each chosen chunk."""
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            tensor = tensor.contiguous()
        *layers, batch, token, head, _ = tensor.stride()
        address = self.batch[chosen] * batch + self.start[chosen] * token
        if layer is not None:
            address = address + layer * layers[0]
        return RowView((tensor,), address, token, np.full(len(chosen), head, np.int64), tensor.shape[-1])


@dataclass(frozen=True, eq=False)
class FullCall:
    """The attention call over complete sequences (on one process), of which chunks on several ranks are parts."""

    problem: Problem  # heads, dims and modifiers; if heads are sharded, those of this process
    extents: Extents  # lengths and bands of the sequences
    heads: int  # number of query heads of this call
    first_head: int = 0  # index of this process's first one among them
    slopes: Tensor | None = None  # float32 ALiBi slopes [sequences, heads_q]
    sink: Tensor | None = None  # float32 sink logits [heads_q]
    seed: int = 0  # of dropout's random generator, as offset
    offset: int = 0
    # True if each element of the unsharded bias belongs to one pair of row and key: bias gradients then have the bias's
    # dtype, else they are sums in float32.
    owns_bias: bool = False


@dataclass(frozen=True, eq=False)
class Rows:
    """Chunks of query rows with their tensors: q [batch, tokens, heads_q, dim_qk]; q_rope; bias and mask matrix
    `blocked` [batch or 1, heads_q or 1, tokens or 1, keys of the complete sequence or 1], whose rows are q's tokens."""

    chunks: Chunks
    q: Tensor
    q_rope: Tensor | None = None
    bias: Tensor | None = None
    blocked: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Saved:
    """Inputs of a backward: dout and out [batch, tokens, heads_q, dim_v], and the softmax's max and sum [batch, tokens,
    heads_q] of the rows over all their keys."""

    dout: Tensor
    out: Tensor
    max: Tensor
    sum: Tensor


@dataclass(frozen=True, eq=False)
class Keys:
    """Chunks of keys with their tensors: k [batch, tokens, heads_kv, dim_qk], v [.., dim_v], k_rope [.., dim_rope]."""

    chunks: Chunks
    k: Tensor
    v: Tensor
    k_rope: Tensor | None = None


@dataclass(eq=False)
class Gradients:
    """Gradients in the shapes of their inputs, or None; float32 where several are added later. dbias has the bias's
    dtype if each of its elements belongs to one (row, key) pair of the unsharded call, else float32."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dq_rope: Tensor | None = None
    dk_rope: Tensor | None = None
    dbias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of a chunk of query rows and a chunk of keys of one sequence, ordered by row chunk, then by the keys'
    position.

    row, key: int [pairs], indices of the two chunks. extents: lengths and band of each pair. row_layer, key_layer: the
    number of earlier pairs with the same chunk of rows, and with the same chunk of keys.
    """

    row: np.ndarray
    key: np.ndarray
    extents: Extents
    row_layer: np.ndarray = field(init=False)
    key_layer: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_layer", _rank_among_equals(self.row))
        object.__setattr__(self, "key_layer", _rank_among_equals(self.key))

    def __len__(self) -> int:
        return len(self.row)


def pairs(full: FullCall, rows: Chunks, keys: Chunks, *, partial: bool = False) -> Pairs:
    """Returns the pairs of a chunk of rows and a chunk of keys in which a row may see a key; all pairs of a sequence if
    rows without keys return the mean of V, or if the call has a sink and results are not merged later (`partial`)."""
    order = np.lexsort((keys.first, keys.seq))
    begin, end = (np.searchsorted(keys.seq[order], rows.seq, side) for side in ("left", "right"))
    row = np.repeat(np.arange(len(rows)), end - begin)
    key = order[np.arange(len(row)) - np.repeat(np.cumsum(end - begin) - end, end - begin)]
    extents = _extents(full, rows, keys, row, key)
    if full.problem.empty_rows == "zero" and (partial or full.sink is None):
        visible = _sees(extents)
        if not visible.all():
            row, key = row[visible], key[visible]
            extents = _extents(full, rows, keys, row, key)
    return Pairs(row, key, extents)


def forward(
    full: FullCall, rows: Rows, keys: Keys, met: Pairs | None = None, backend: str = "auto", *, partial: bool = False
) -> Partial:
    """Computes attention of chunks of query rows over chunks of keys, in the pairs `met` (None: all in which a row sees
    a key); returns out [batch, tokens, heads_q, dim_v] and the softmax's max and sum [batch, tokens, heads_q]. partial:
    out is float32 without the sink, which join_sink() of ir/merge.py adds after the last keys, and rows may be in
    several pairs."""
    met = pairs(full, rows.chunks, keys.chunks, partial=partial) if met is None else met
    problem = _partial(full.problem) if partial else full.problem
    layers = int(met.row_layer.max(initial=0)) + 1
    if layers > 1 and not partial:
        raise ValueError("fusion_attention: chunks: expected every chunk of rows in one pair, or a partial result")
    batch, tokens, heads, _ = rows.q.shape
    shape = layers, batch, tokens, heads
    dtype = torch.float32 if partial else rows.q.dtype
    fills = _fills(rows.chunks, met.row, layers, batch * tokens)
    out = _buffer(rows.q, (*shape, problem.dim_v), dtype, fills, 0.0)
    max_, sum_ = (_buffer(rows.q, shape, torch.float32, fills, value) for value in (-torch.inf, 0.0))
    if len(met):
        o = _operands(full, problem, rows, keys, met, (out, max_, sum_), met.row_layer)
        plan(problem, met.extents, rows.q.device, backend).run(o)
    result = Partial(out[0], max_[0], sum_[0])
    for layer in range(1, layers):
        for at in _runs(rows.chunks, met.row[met.row_layer == layer]):
            merge(Partial(*(t[at] for t in result)), Partial(out[layer][at], max_[layer][at], sum_[layer][at]))
    return result


def backward(
    full: FullCall,
    rows: Rows,
    saved: Saved,
    keys: Keys,
    met: Pairs | None = None,
    backend: str = "auto",
    *,
    partial: bool = False,
    dbias: bool = False,
) -> Gradients:
    """Computes the gradients, but not the sink's, of attention of chunks of rows over chunks of keys from `saved`
    (dout, out, statistics), summed over the pairs `met` (None: all in which a row sees a key); zeros for tokens without
    a pair. partial: they are float32, as they must be if rows or keys are in several pairs. dbias: True in every call
    of a backward with a bias gradient, because it changes the bits of other gradients."""
    met = pairs(full, rows.chunks, keys.chunks, partial=True) if met is None else met
    problem = replace(_partial(full.problem), wide_results=partial)
    if not partial and (met.row_layer.any() or met.key_layer.any()):
        raise ValueError("fusion_attention: chunks: expected all chunks in one pair each, or partial gradients")
    dtype = torch.float32 if partial else rows.q.dtype
    of_rows, of_keys = (rows.chunks, met.row, met.row_layer), (keys.chunks, met.key, met.key_layer)
    dq, dq_rope = (_Sum(t, dtype, *of_rows) for t in (rows.q, rows.q_rope))
    dk, dv, dk_rope = (_Sum(t, dtype, *of_keys) for t in (keys.k, keys.v, keys.k_rope))
    added = None
    if rows.bias is not None and dbias:
        added = rows.bias.new_zeros(rows.bias.shape, dtype=rows.bias.dtype if full.owns_bias else torch.float32)
    if len(met):
        assert dq.view is not None
        assert dk.view is not None
        grads = Grads(
            dout=rows.chunks.view(saved.dout, met.row),
            dq=dq.view,
            dk=dk.view,
            dv=dv.view,
            dq_rope=dq_rope.view,
            dk_rope=dk_rope.view,
            dbias=None if added is None else _matrix(added, rows.chunks, met),
            owns_dbias=added is not None and full.owns_bias,
        )
        o = _operands(full, problem, rows, keys, met, (saved.out, saved.max, saved.sum))
        plan(problem, met.extents, rows.q.device, backend, "attention_backward").run(o, grads)
    return Gradients(dq.total(), dk.total(), dv.total(), dq_rope.total(), dk_rope.total(), added)


def sink_gradient(full: FullCall, rows: Rows, saved: Saved, backend: str = "auto") -> Tensor:
    """Returns the contribution of these query rows to the gradient of the sink logits, float32 [heads_q]; with the rows
    of all ranks it has the bits of the call on one process."""
    assert full.sink is not None
    dsink = torch.zeros_like(full.sink)
    none = Chunks.packed(np.arange(len(full.extents)), np.zeros(len(full.extents)), np.zeros(len(full.extents)))
    p, q = full.problem, rows.q
    bare = replace(p, dim_rope=0, bias="none", has_blocked=False, dropout="none", keep_prob=1.0, empty_rows="zero")
    everything = np.arange(len(rows.chunks))
    extents = _extents(full, rows.chunks, none, everything, rows.chunks.seq)
    k, v = q.new_zeros(1, 0, p.heads_kv, p.dim_qk), q.new_zeros(1, 0, p.heads_kv, p.dim_v)
    met = Pairs(everything, rows.chunks.seq, extents)
    keys = Keys(none, k, v)
    o = _operands(full, bare, Rows(rows.chunks, q), keys, met, (saved.out, saved.max, saved.sum))
    view = rows.chunks.view
    dq = view(empty(q, q.shape), everything)
    dk, dv = (none.view(t, met.key) for t in (k, v))
    grads = Grads(dout=view(saved.dout, everything), dq=dq, dk=dk, dv=dv, dsink=dsink)
    if len(met):
        plan(bare, extents, q.device, backend, "attention_backward").run(o, grads)
    return dsink


class _Sum:
    """A buffer for a gradient to which several pairs of chunks add: the n-th pair of a chunk writes to layer n, and
    total() adds the layers in order. Without a tensor (like None), total() is None."""

    def __init__(
        self, like: Tensor | None, dtype: torch.dtype, chunks: Chunks, chosen: np.ndarray, layer: np.ndarray
    ) -> None:
        self.layers: Tensor | None = None
        self.view: RowView | None = None
        self.chunks, self.chosen, self.layer = chunks, chosen, layer
        if like is not None:
            count = int(layer.max(initial=0)) + 1
            filled = _fills(chunks, chosen, count, like.shape[:2].numel())
            self.layers = _buffer(like, (count, *like.shape), dtype, filled, 0.0)
            self.view = chunks.view(self.layers, chosen, layer)

    def total(self) -> Tensor | None:
        """Returns the sum over the layers, of the gradient's shape, in the memory of the first; None without one."""
        if self.layers is None:
            return None
        for n in range(1, len(self.layers)):
            for at in _runs(self.chunks, self.chosen[self.layer == n]):
                self.layers[0][at] += self.layers[n][at]
        return self.layers[0]


def _partial(problem: Problem) -> Problem:
    """Returns the problem for computing a part of the keys: float32 results, without a sink, to be merged later."""
    return replace(problem, wide_results=True, has_sink=False)


def _rank_among_equals(values: np.ndarray) -> np.ndarray:
    """Returns for each element the number of equal elements before it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    rank = np.zeros_like(order)
    rank[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return rank


def _extents(full: FullCall, rows: Chunks, keys: Chunks, row: np.ndarray, key: np.ndarray) -> Extents:
    """Returns lengths and bands of pairs of chunks, each pair like a sequence that begins at the chunks' first row and
    first key. row, key: for each pair, the index of its chunk in `rows` and in `keys`."""
    e, seq, first_row, first_key = full.extents, rows.seq[row], rows.first[row], keys.first[key]
    apart = first_row - first_key
    lo, hi = (np.where(np.abs(edge) < INFINITE, edge + apart, edge) for edge in (e.lo[seq], e.hi[seq]))
    origin = ChunkOrigin(first_row, first_key, seq * full.heads + full.first_head, e.q_len[seq], e.kv_len[seq])
    prefix = np.maximum(e.prefix[seq] - first_key, 0)
    # Without slopes the shift has no effect; with 0, more calls use the same plan.
    shift = e.shift[seq] - apart if full.slopes is not None else np.zeros_like(seq)
    return Extents(rows.count[row], keys.count[key], lo, hi, prefix, shift, origin)


def _sees(e: Extents) -> np.ndarray:
    """Returns bool [sequences], true for sequences in which some query row sees a key; e: lengths and bands."""
    some = (e.q_len > 0) & (e.kv_len > 0)
    by_prefix = e.prefix > 0
    # A row sees a key if the first row whose band ends after key 0 has a band that begins before the last key.
    by_band = (e.hi > e.lo) & (np.maximum(1 - e.hi, 0) <= np.minimum(e.q_len, e.kv_len - e.lo) - 1)
    visible: np.ndarray = some & (by_prefix | by_band)
    return visible


def _fills(chunks: Chunks, chosen: np.ndarray, layers: int, tokens: int) -> bool:
    """True if the `chosen` chunks cover a buffer [layers, tokens, ...] completely, so that it is not initialized."""
    return layers == 1 and int(chunks.count[chosen].sum()) == tokens


def _buffer(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, filled: bool, value: float) -> Tensor:
    return empty(like, shape, dtype) if filled else like.new_full(shape, value, dtype=dtype)


def _runs(chunks: Chunks, chosen: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yields (batch index, slice of tokens) for each run of `chosen` chunks that are adjacent in memory."""
    batch, start, end = chunks.batch[chosen], chunks.start[chosen], (chunks.start + chunks.count)[chosen]
    order = np.lexsort((start, batch))
    batch, start, end = batch[order], start[order], end[order]
    breaks = np.flatnonzero((batch[1:] != batch[:-1]) | (start[1:] != end[:-1])) + 1
    for first, last in zip([0, *breaks], [*breaks, len(order)], strict=True):
        if last > first:
            yield int(batch[first]), slice(int(start[first]), int(end[last - 1]))


def _matrix(tensor: Tensor, chunks: Chunks, met: Pairs) -> MatrixView:
    """Returns a strided view of a bias or mask matrix with one block for each pair in `met`: rows of a chunk of
    queries, columns of a chunk of keys; axes of size 1 broadcast."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
    batch, head, row, key = (s if n > 1 else 0 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    assert met.extents.chunk_origin is not None
    address = chunks.batch[met.row] * batch + chunks.start[met.row] * row + met.extents.chunk_origin.first_key * key
    return MatrixView(tensor, address, np.full_like(address, head), np.full_like(address, row), key)


def _operands(
    full: FullCall,
    problem: Problem,
    rows: Rows,
    keys: Keys,
    met: Pairs,
    results: tuple[Tensor, Tensor, Tensor],
    layer: np.ndarray | None = None,
) -> Operands:
    """Returns the tensors of the pairs `met` of chunks as strided views for a back end; results: memory of out, max and
    sum; layer: each pair's index on their first axis; None: they have no axis of layers."""
    of_rows, of_keys = rows.chunks.view, keys.chunks.view
    out, max_, sum_ = results[0], *(t[..., None] for t in results[1:])
    given: dict[str, Any] = {}
    if problem.dim_rope and rows.q_rope is not None and keys.k_rope is not None:
        given |= {"q_rope": of_rows(rows.q_rope, met.row), "k_rope": of_keys(keys.k_rope, met.key)}
    if problem.bias == "matrix" and rows.bias is not None:
        given["bias"] = _matrix(rows.bias, rows.chunks, met)
    if problem.bias == "slopes" and full.slopes is not None:
        given["slopes"] = full.slopes[torch.from_numpy(rows.chunks.seq[met.row])]
    if problem.has_blocked and rows.blocked is not None:
        given["blocked"] = _matrix(rows.blocked.view(torch.uint8), rows.chunks, met)
    return Operands(
        q=of_rows(rows.q, met.row),
        k=of_keys(keys.k, met.key),
        v=of_keys(keys.v, met.key),
        out=of_rows(out, met.row, layer),
        stats=Stats(of_rows(max_, met.row, layer), of_rows(sum_, met.row, layer)),
        sink=full.sink if problem.has_sink else None,
        seed=full.seed,
        offset=full.offset,
        **given,
    )
