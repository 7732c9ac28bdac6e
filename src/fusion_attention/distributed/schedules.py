"""Schedules that combine sharded rows and keys: gathered keys, or keys that circulate around a ring.

Each schedule is a forward and a backward over tensors [batch, tokens, heads, dim] of this rank; chunk_attention.py
computes the attention. ulysses.py combines either schedule with an exchange of heads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fusion_attention.distributed import chunk_attention
from fusion_attention.distributed.chunk_attention import Chunks, FullCall, Gradients, Keys, Pairs, Rows, Saved
from fusion_attention.distributed.groups import Call, Pending
from fusion_attention.distributed.layout import Chunk, Layout, joined
from fusion_attention.distributed.sharding import shard_of
from fusion_attention.ir.merge import Partial, join_sink, merge
from fusion_attention.memory import empty

Tensor = torch.Tensor
Results = tuple[Gradients, Tensor | None]  # and the sink's gradient from this rank's rows


@dataclass(frozen=True, eq=False)
class Side:
    """The distribution of the tokens of queries, or of keys, over ranks."""

    placement: Layout  # the token ranges of each rank
    lengths: np.ndarray  # tokens of each sequence, without padding
    packed: bool  # True if sequences are concatenated; else each item of a batch is one, and all are divided equally

    def chunks(self, rank: int) -> Chunks:
        """Returns one rank's token ranges, with their positions in the sequences and in the rank's local tensors."""
        return _chunks(self.placement.ranks[rank], self.lengths, self.packed)

    def all(self) -> Chunks:
        """Returns one token range per sequence, with its position in tensors that hold the tokens of all ranks."""
        full = tuple(Chunk(b, 0, n) for b, n in enumerate(self.placement.lengths))
        return _chunks(full, self.lengths, self.packed, empty=True)

    def joined(self, columns: int) -> Side:
        """Returns the distribution over fewer ranks, with the tokens of `columns` adjacent ranks on each."""
        ranks = self.placement.ranks
        parts = (joined(itertools.chain(*ranks[at : at + columns])) for at in range(0, len(ranks), columns))
        return replace(self, placement=Layout(self.placement.lengths, tuple(parts)))


def _chunks(chunks: tuple[Chunk, ...], lengths: np.ndarray, packed: bool, empty: bool = False) -> Chunks:
    b, first, end = np.array(chunks, np.int64).reshape(-1, 3).T
    start = np.cumsum(end - first) - (end - first)
    if packed:
        return Chunks(b, first, end - first, np.zeros_like(b), start)
    item = np.repeat(np.arange(len(lengths)), len(first))
    first, end, start = (np.tile(a, len(lengths)) for a in (first, end, start))
    count = np.minimum(end, lengths[item]) - first
    some = (count > 0) | empty
    return Chunks(item[some], first[some], count[some], item[some], start[some])


@dataclass(frozen=True, eq=False)
class ScheduleInputs:
    """The inputs of a schedule, an algorithm that brings other ranks' keys to a rank's queries: call, shards, ..."""

    full: FullCall
    call: Call  # the communication between the ranks
    rows: Side
    keys: Side
    backend: str = "auto"
    deterministic: bool = False  # gradients of gathered keys must be bitwise equal to those of one process
    dbias: bool = False  # the bias needs a gradient

    def pairs(self, name: Any, rows: Chunks, keys: Chunks, *, partial: bool = False) -> Pairs:
        """Returns the pairs of a query chunk and a key chunk that it sees, cached as `name`; partial: merged later."""
        result: Pairs | None = self.call.call_cache.get(name)
        if result is None:
            result = self.call.call_cache[name] = chunk_attention.pairs(self.full, rows, keys, partial=partial)
        return result


# ------------------------------------------------------------------------------------------------------ gathered keys


def gathered_forward(m: ScheduleInputs, rows: Rows, keys: Keys) -> Partial:
    """Gathers the keys of all ranks, and returns out and softmax max and sum of this rank's query tokens, bitwise equal
    to those that one process computes. m: the schedule's inputs, as in all functions of this module."""
    everything = _gather_keys(m, keys)
    met = m.pairs("gathered", rows.chunks, everything.chunks)
    return chunk_attention.forward(m.full, rows, everything, met, m.backend)


def gathered_backward(m: ScheduleInputs, rows: Rows, keys: Keys, saved: Saved) -> Results:
    """Returns (gradients of this rank's queries and keys, gradient of the sink from its queries); saved: dout, out,
    statistics. Key gradients are summed over ranks, in order; if m.deterministic, computed here from all queries."""
    everything = _gather_keys(m, keys)
    met = m.pairs("gathered", rows.chunks, everything.chunks)
    g = chunk_attention.backward(m.full, rows, saved, everything, met, m.backend, partial=True, dbias=m.dbias)
    if m.deterministic:
        g = replace(g, dk=None, dv=None, dk_rope=None)  # frees the memory
        owned = _owned(m, *_gather_rows(m, rows, saved), keys)
        of_keys: list[Tensor | None] = [owned.dk, owned.dv, owned.dk_rope]
    else:
        of_keys = _scatter(m, "summing gradients of keys", [g.dk, g.dv, g.dk_rope])
    return replace(g, **dict(zip(("dk", "dv", "dk_rope"), of_keys, strict=True))), _sink(m, rows, saved)


def _owned(m: ScheduleInputs, rows: Rows, saved: Saved, keys: Keys) -> Gradients:
    """Returns the gradients of this rank's keys from the queries of all ranks (rows, saved), bitwise equal to those of
    one process: one chunk of each sequence is computed at a time, so that no gradient is a sum of rounded parts."""
    p, total = keys.chunks, None
    turn = np.arange(len(p)) - np.searchsorted(p.seq, p.seq)
    for n in range(int(turn.max(initial=0)) + 1):
        some = turn == n
        chunks = Chunks(p.seq[some], p.first[some], p.count[some], p.batch[some], p.start[some])
        met = m.pairs(("owned", n), rows.chunks, chunks)
        # The gradient of a bias that heads share changes the rounding of other gradients, so it is computed here too.
        g = chunk_attention.backward(m.full, rows, saved, replace(keys, chunks=chunks), met, m.backend, dbias=m.dbias)
        if total is None:
            total = g
            continue
        for b, start, end in zip(chunks.batch, chunks.start, chunks.start + chunks.count, strict=True):
            for ours, theirs in ((total.dk, g.dk), (total.dv, g.dv), (total.dk_rope, g.dk_rope)):
                if ours is not None and theirs is not None:
                    ours[b, start:end] = theirs[b, start:end]
    assert total is not None
    return total


def _gather_keys(m: ScheduleInputs, keys: Keys) -> Keys:
    """Returns the key, value and rope tensors of all ranks, gathered from `keys`, those of this rank."""
    k, v, k_rope = _gather(m.call, "gathering keys", m.keys.placement, (keys.k, keys.v, keys.k_rope))
    assert k is not None
    assert v is not None
    return Keys(m.keys.all(), k, v, k_rope)


def _gather_rows(m: ScheduleInputs, rows: Rows, saved: Saved) -> tuple[Rows, Saved]:
    """Returns (queries with bias and mask, saved tensors of the backward) of all ranks, gathered from this rank's; a
    bias or mask with one row for all query tokens is not exchanged."""
    matrices = [None if t is None or t.shape[-2] == 1 else t.movedim(-2, 1) for t in (rows.bias, rows.blocked)]
    given = (rows.q, rows.q_rope, saved.dout, saved.out, saved.max, saved.sum, *matrices)
    q, q_rope, *of_saved, bias, blocked = _gather(m.call, "gathering rows", m.rows.placement, given)
    bias = rows.bias if bias is None else bias.movedim(1, -2)
    blocked = rows.blocked if blocked is None else blocked.movedim(1, -2)
    return Rows(m.rows.all(), q, q_rope, bias, blocked), Saved(*of_saved)


def _gather(call: Call, step: str, placement: Layout, tensors: Sequence[Tensor | None]) -> list[Any]:
    """Returns [batch, tokens of all ranks, ...], in sequence order, from this rank's shards. step: name in errors."""
    given = [t.contiguous() for t in tensors if t is not None]
    parts = call.all_to_each(
        step, [([t] * call.world, [(t.shape[0], n, *t.shape[2:]) for n in placement.sizes]) for t in given]
    )
    results = []
    starts = np.cumsum((0, *placement.lengths)).tolist()
    for shares in parts:
        full = empty(shares[0], (shares[0].shape[0], sum(placement.sizes), *shares[0].shape[2:]))
        for chunks, shard in zip(placement.ranks, shares, strict=True):
            at = 0
            for b, first, end in chunks:
                full[:, starts[b] + first : starts[b] + end] = shard[:, at : (at := at + end - first)]
        results.append(full)
    gathered = iter(results)
    return [None if t is None else next(gathered) for t in tensors]


def _scatter(m: ScheduleInputs, step: str, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Sums [batch, tokens of all ranks, ...] over ranks, in order; returns this rank's shards. step: name in errors."""
    placement, call = m.keys.placement, m.call
    given = [t for t in tensors if t is not None]
    sends = [[shard_of(t, placement, rank, 1) for rank in range(call.world)] for t in given]
    passing = [(parts, [parts[call.rank].shape] * call.world) for parts in sends]
    result = iter(functools.reduce(torch.add, parts) for parts in call.all_to_each(step, passing))
    return [None if t is None else next(result) for t in tensors]


def _sink(m: ScheduleInputs, rows: Rows, saved: Saved) -> Tensor | None:
    return None if m.full.sink is None else chunk_attention.sink_gradient(m.full, rows, saved, m.backend)


# --------------------------------------------------------------------------------------------------------- ring of keys


def ring_forward(m: ScheduleInputs, rows: Rows, keys: Keys) -> Partial:
    """Returns the attention of this rank's query tokens (out, softmax max and sum), merged while keys circulate: first
    with its own keys, then with those of the rank before it, and so on. The next keys are received during the
    computation."""
    call = m.call
    if call.world == 1:
        keys = replace(keys, chunks=m.keys.all())
        return chunk_attention.forward(m.full, rows, keys, m.pairs("local", rows.chunks, keys.chunks), m.backend)
    block, result = _block(keys), None
    for step in range(call.world):
        source = (call.rank - step) % call.world
        coming, pending = _next_block(m, step, block)
        chunks = m.keys.chunks(source)
        met = m.pairs(("ring", source), rows.chunks, chunks, partial=True)
        with pending:
            if result is None or len(met):
                partial = chunk_attention.forward(m.full, rows, Keys(chunks, *block), met, m.backend, partial=True)
                if result is None:
                    result = partial
                else:
                    merge(result, partial)
        block = coming
    assert result is not None
    if m.full.sink is not None:
        for b, start, count in zip(rows.chunks.batch, rows.chunks.start, rows.chunks.count, strict=True):
            join_sink(Partial(*(t[b, start : start + count] for t in result)), m.full.sink)
    return result._replace(out=result.out.to(rows.q.dtype))


def ring_backward(m: ScheduleInputs, rows: Rows, keys: Keys, saved: Saved) -> Results:
    """Returns (gradients of this rank's queries and keys, gradient of the sink from its queries). Keys circulate as in
    the forward, and their float32 gradients follow them; a rank adds the contribution of its queries to its keys last.
    saved: dout, out and softmax statistics of this rank's queries."""
    call = m.call
    if call.world == 1:
        keys = replace(keys, chunks=m.keys.all())
        met = m.pairs("local", rows.chunks, keys.chunks)
        g = chunk_attention.backward(m.full, rows, saved, keys, met, m.backend, partial=True, dbias=m.dbias)
        return g, _sink(m, rows, saved)
    block, total = _block(keys), None
    mine: list[Tensor] = []
    added: list[Tensor] = []
    for step in range(call.world):
        source = (call.rank - step) % call.world
        coming, pending = _next_block(m, step, block)
        shapes = [t.shape for t in block] if step > 1 else []
        carried, behind = _pass_on(call, f"step {step}: gradients of the keys of rank {source}", added, shapes)
        of_block = Keys(m.keys.chunks(source), *block)
        met = m.pairs(("ring", source), rows.chunks, of_block.chunks, partial=True)
        with pending, behind:
            g = chunk_attention.backward(m.full, rows, saved, of_block, met, m.backend, partial=True, dbias=m.dbias)
            del of_block  # at most this block and the next one are in memory
            if total is None:
                total = g
            else:
                for name in ("dq", "dq_rope", "dbias"):  # gradients of keys follow the keys
                    if (ours := getattr(total, name)) is not None:
                        ours += getattr(g, name)
        gradients = [t for t in (g.dk, g.dv, g.dk_rope) if t is not None]
        for ours, theirs in zip(gradients, carried, strict=bool(carried)):
            torch.add(theirs, ours, out=ours)
        if step == 0:
            mine = gradients
        else:
            added = gradients
        block = coming
    shapes = [t.shape for t in (keys.k, keys.v, keys.k_rope) if t is not None]
    home, behind = _pass_on(call, "receiving the gradients of this rank's keys", added, shapes)
    assert total is not None
    behind.wait()
    dk, dv, *rest = [theirs.add_(ours) for theirs, ours in zip(home, mine, strict=True)]
    return replace(total, dk=dk, dv=dv, dk_rope=rest[0] if rest else None), _sink(m, rows, saved)


def _block(keys: Keys) -> list[Tensor]:
    """Returns the contiguous tensors [k, v, k_rope] that the ring sends to the next rank; no k_rope if it is None."""
    return [t.contiguous() for t in (keys.k, keys.v, keys.k_rope) if t is not None]


def _next_block(m: ScheduleInputs, step: int, block: list[Tensor]) -> tuple[list[Tensor], Pending]:
    """Starts iteration `step` of the ring: sends the key tensors `block` to the next rank; returns (memory that
    receives the previous rank's key tensors, the transfer in progress). The last iteration sends nothing."""
    source = (m.call.rank - step - 1) % m.call.world
    tokens, last = m.keys.placement.sizes[source], step == m.call.world - 1
    shapes = [] if last else [(t.shape[0], tokens, *t.shape[2:]) for t in block]
    return _pass_on(m.call, f"step {step + 1}: keys of rank {source}", block, shapes)


def _pass_on(
    call: Call, step: str, sent: list[Tensor], shapes: Sequence[Sequence[int]]
) -> tuple[list[Tensor], Pending]:
    """Sends tensors to the next rank of the ring; returns (memory for those of the previous rank, of these shapes, the
    Pending transfer). Without shapes nothing is sent. step: the transfer's name in errors."""
    if not shapes:
        return [], Pending(call, "", [], [])
    received = [empty(t, tuple(shape)) for t, shape in zip(sent, shapes, strict=True)]
    right, left = (call.rank + 1) % call.world, (call.rank - 1) % call.world
    return received, call.exchange(step, [(right, t) for t in sent], [(left, t) for t in received])
