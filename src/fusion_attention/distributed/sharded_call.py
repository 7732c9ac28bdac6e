"""A call of several ranks: validated as one call on all tokens, then computed on this rank's rows over gathered keys.

Calls here are packed: padded sequences are concatenated, and lengths exclude the padding. This module serves every
operator.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fusion_attention.contract import ContractError, Op, bind
from fusion_attention.distributed.groups import AnyGroup, Call, group_of
from fusion_attention.distributed.layout import layout_of
from fusion_attention.distributed.schedules import Side
from fusion_attention.distributed.sharding import gathered, shape_of, shard_of, summed_shards
from fusion_attention.ir.call import Lowered
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import EXTENT_ROWS, Extents
from fusion_attention.memory import empty
from fusion_attention.plan import compute
from fusion_attention.settings import chosen

Tensor = torch.Tensor
Given = Mapping[str, Tensor | None]
Tokens = int | tuple[int, int] | None
PACKED = "TND"


class Segment(NamedTuple):
    """Adjacent tokens of one sequence on this rank."""

    sequence: int  # number of the sequence
    first: int  # position of the first token in the sequence
    tokens: int  # number of tokens
    at: int  # index of the first token among this rank's tokens


@dataclass(frozen=True, eq=False)
class RankSide(Side):
    """The distribution of the tokens of queries, or of keys, over ranks, as this rank sees it."""

    rank: int

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Index of every sequence's first token in the unsharded tensor: int64."""
        starts = np.cumsum((0, *self.placement.lengths), dtype=np.int64)
        return starts[:-1] if self.packed else np.arange(len(self.lengths), dtype=np.int64) * starts[-1]

    @functools.cached_property
    def segments(self) -> list[Segment]:
        """This rank's segments (adjacent tokens of one sequence), in order, without padding."""
        chunks = self.chunks(self.rank)
        at = chunks.batch * self.placement.sizes[self.rank] + chunks.start
        columns = (chunks.seq, chunks.first, chunks.count, at)
        return [Segment(*one) for one in zip(*(column.tolist() for column in columns), strict=True)]

    @functools.cached_property
    def rounds(self) -> list[list[Segment]]:
        """This rank's token ranges in groups, at most one per sequence, so that a call writes no gradient twice."""
        results: list[list[Segment]] = []
        met = [0] * len(self.lengths)
        for segment in self.segments:
            if met[segment.sequence] == len(results):
                results.append([])
            results[met[segment.sequence]].append(segment)
            met[segment.sequence] += 1
        return results or [[]]

    def flat(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with one axis of tokens: padded [B, S, ...] becomes [B * S, ...], packed [T, ...] stays."""
        return tensor if self.packed else tensor.flatten(0, 1)

    def unflattened(self, tensor: Tensor) -> Tensor:
        """Returns a tensor [tokens, ...] as [B, S, ...] if sequences are padded; the inverse of flat()."""
        if self.packed:
            return tensor
        return tensor.unflatten(0, (len(self.lengths), len(tensor) // max(len(self.lengths), 1)))

    def gathered(self, call: Call, tensor: Tensor) -> Tensor:
        """Returns the tokens of all ranks, [tokens of all ranks, ...], from this rank's tensor."""
        return self.flat(gathered(self.unflattened(tensor), call, self.placement, int(not self.packed)))

    def local(self, full: Tensor) -> Tensor:
        """Returns this rank's shard [tokens of this rank, ...] of `full` [tokens of all ranks, ...]."""
        return self.flat(shard_of(self.unflattened(full), self.placement, self.rank, int(not self.packed)))

    def summed(self, call: Call, full: Tensor) -> Tensor:
        """Sums [tokens of all ranks, ...] over ranks, in their order, and returns this rank's shard of the sum."""
        return self.flat(summed_shards(call, self.shards(full)))

    def shards(self, full: Tensor) -> list[Tensor]:
        """Returns the shard of each rank of `full` [tokens of all ranks, ...], with a batch axis if it is padded."""
        full, ranks = self.unflattened(full), range(len(self.placement.ranks))
        return [shard_of(full, self.placement, rank, int(not self.packed)).contiguous() for rank in ranks]


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """A call of an operator on the sequences of all ranks, with the distribution of its tokens over ranks."""

    full: Any  # the operator's parameters for the unsharded sequences, with meta tensors
    call: Call  # the communication between the ranks
    q: RankSide  # the distribution of queries over ranks
    kv: RankSide  # the distribution of keys over ranks
    backend: str

    def extents(self, segments: Sequence[Segment]) -> Extents:
        """Returns lengths and mask bands of sequences: each of `segments` (this rank's queries) with all its keys."""
        e: Extents = self.full.extents
        b, first, count, at = np.array(segments, np.int64).reshape(-1, 4).T
        # A segment's row 0 is its sequence's row `first`.
        lo, hi = (np.where(np.abs(edge[b]) < INFINITE, edge[b] + first, edge[b]) for edge in (e.lo, e.hi))
        starts = at, self.kv.starts[b]
        return Extents(count, e.kv_len[b], lo, hi, e.prefix[b], e.shift[b] - first, starts=starts)

    def rows(self, tensors: Given, segments: Sequence[Segment]) -> Any:
        """Returns the operator's call on this rank's queries in `segments` and all keys of their sequences."""
        return self._on(tensors, self.extents(segments))

    def keys_of(self, tensors: Given, segments: Sequence[Segment]) -> Any:
        """Returns the operator's call on the queries of all ranks and this rank's keys in `segments`, at most one per
        sequence, whose first key is key 0; tensors by name, with one axis of tokens."""
        e: Extents = self.full.extents
        b, first, count, at = np.array(segments, np.int64).reshape(-1, 4).T
        lo, hi = (np.where(np.abs(edge[b]) < INFINITE, edge[b] - first, edge[b]) for edge in (e.lo, e.hi))
        starts = self.q.starts[b], at
        prefix = np.maximum(e.prefix[b] - first, 0)
        return self._on(tensors, Extents(e.q_len[b], count, lo, hi, prefix, e.shift[b] + first, starts=starts))

    def everything(self, tensors: Given) -> Any:
        """Returns the operator's call on all queries and keys; tensors: by name, with one axis of tokens."""
        e: Extents = self.full.extents
        edges = {name: getattr(e, name) for name in EXTENT_ROWS}
        return self._on(tensors, Extents(**edges, starts=(self.q.starts, self.kv.starts)))

    def _on(self, tensors: Given, extents: Extents) -> Any:
        changes: dict[str, Any] = {"layout": PACKED, "extents": extents, "tensors": tensors}
        if hasattr(self.full, "layout_kv"):
            changes["layout_kv"] = PACKED
        return replace(self.full, **changes)

    def run(self, call: Lowered, float32_results: Sequence[str] = ()) -> dict[str, Tensor]:
        """Computes a call and returns its results by name, those of `float32_results` in float32 or wider."""
        results = call.results()
        for name in results.keys() & set(float32_results):
            t = results[name]
            results[name] = empty(t, t.shape, torch.promote_types(t.dtype, torch.float32))
        compute(call, results, self.backend)
        return results

    def keys(self, tensors: Given, names: Iterable[str]) -> dict[str, Tensor | None]:
        """Gathers the key tensors `names` of all ranks in one exchange; returns {name: tensor, or None if absent}."""
        given = {name: t for name in names if (t := tensors[name]) is not None}
        results = _as_one(given, lambda packed: self.kv.gathered(self.call, packed))
        return {name: results.get(name) for name in names}

    def all_rows(self, tensors: Given) -> dict[str, Tensor | None]:
        """Gathers tensors [tokens, ...] along query tokens of all ranks; returns {name: tensor, or None if absent}."""
        return {name: None if t is None else self.q.gathered(self.call, t) for name, t in tensors.items()}


def _as_one(tensors: Mapping[str, Tensor], exchange: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Returns exchange(t) of several tensors [tokens, ...] by name, sent at once as one tensor t [tokens, elements]."""
    widths = [t.shape[1:].numel() for t in tensors.values()]
    split = exchange(torch.cat([t.flatten(1) for t in tensors.values()], 1)).split(widths, 1)
    return {name: chunk.unflatten(1, t.shape[1:]) for (name, t), chunk in zip(tensors.items(), split, strict=True)}


@dataclass(frozen=True, eq=False)
class Sums:
    """Collects the gradients of several calls, each on other tokens of this rank: gradients of these tokens are
    assigned, and gradients of the tokens of all ranks are summed."""

    call: Call  # the communication between the ranks
    side: RankSide  # whose gradients are summed: keys if a round has some of this rank's queries, else queries
    names: Sequence[str]  # of the gradients of this rank's tokens; all others are summed
    dtype: torch.dtype  # to which summed() converts the sums
    local: dict[str, Tensor] = field(default_factory=dict)  # the gradients of this rank's tokens
    added: dict[str, Tensor] = field(default_factory=dict)  # the other gradients, summed over the rounds so far

    def add(self, segments: Sequence[Segment], results: Mapping[str, Tensor]) -> None:
        """Adds one call's gradients `results`, by name; segments: the ranges of this rank's tokens in the call."""
        for name, tensor in results.items():
            if name not in self.names:
                self.added[name] = self.added[name].add_(tensor) if name in self.added else tensor
            elif name not in self.local:
                self.local[name] = tensor
            else:
                for one in segments:
                    tokens = slice(one.at, one.at + one.tokens)
                    self.local[name][tokens] = tensor[tokens]

    def scaled(self, factor: Tensor) -> Sums:
        """Returns a new Sums with all gradients multiplied by a factor."""
        local, added = ({name: t * factor for name, t in each.items()} for each in (self.local, self.added))
        return replace(self, local=local, added=added)

    def summed(self) -> dict[str, Tensor]:
        """Sums all gradients but `local` over ranks in one exchange; returns name -> gradient of this rank's tokens."""
        results = _as_one(self.added, lambda packed: self.side.summed(self.call, packed))
        return {name: t.to(self.dtype) for name, t in results.items()}


# --------------------------------------------------------------------------------------------------- the unsharded call


def make_sharded_call(
    function: str,
    op: Op,
    args: Mapping[str, Any],
    rows: Sequence[str],
    keys: Sequence[str],
    *,
    group: AnyGroup,
    schedule: str,
    tokens: Tokens,
    backend: str,
    settings: Mapping[str, Any],
) -> ShardedCall:
    """Validates the call of an operator on the sequences of all ranks, and returns it with the distribution of tokens.

    Args:
        function: the name in errors.
        op, args: the operator's definition, and this rank's arguments by name.
        rows, keys: the names of tensors along query tokens and along keys; the first of each is required.
        tokens: S, or (S1, S2), of unsharded padded sequences; None: every rank has as many tokens as this one.
        settings: other values that must be the same on every rank.

    Raises:
        ContractError: the call of all ranks is invalid.
        GroupError: ranks make different calls, or a shard does not have the size of its layout.
    """
    ranks = group_of(group)
    shape, padded = shape_of(function, ranks, schedule), args["layout"] != PACKED
    counts = _counts(args, (rows[0], keys[0]), tokens, ranks.world)
    full, sides, fault, broken = None, [], "", None
    try:
        assert op.lower is not None
        full = op.lower(bind(op, _full_args(args, dict(zip((rows, keys), counts, strict=True)))))
    except ContractError as error:
        fault, broken = str(error), error
    for name, count, lengths in ((rows[0], counts[0], "q_len"), (keys[0], counts[1], "kv_len")):
        if full is None:
            break
        used = getattr(full.extents, lengths)
        placement = layout_of(schedule, (count,) if padded else tuple(used.tolist()), shape)
        sides.append(RankSide(placement, used, not padded, ranks.rank))
        have, want = args[name].shape[int(padded)], placement.sizes[ranks.rank]
        if have != want:
            fault = (
                f"{op.by_name[name].shown} has {have} tokens, not the {want} of this rank's layout: shard() the "
                "complete tensor with the same schedule and lengths, and pass tokens= if ranks have different numbers"
            )
    words = _words(args, (*rows, *keys)) | {"schedule": schedule, "tokens": counts, "backend": chosen(backend)}
    words |= settings
    try:
        call = ranks.call(function, words, args[rows[0]].device, fault)
    finally:
        if broken is not None:
            raise broken
    return ShardedCall(full, call, sides[0], sides[1], backend)


def _counts(args: Mapping[str, Any], names: Sequence[str], tokens: Tokens, ranks: int) -> list[int]:
    """Returns [unsharded query tokens, unsharded keys]; names: the query and the key argument; tokens: the counts that
    the caller passed, or None. Invalid tensors or lengths give 0, and bind() reports them later."""
    sizes = tokens if isinstance(tokens, tuple) else (tokens, tokens)
    if len(sizes) != 2 or not all(size is None or (type(size) is int and 0 <= size < INFINITE) for size in sizes):
        raise ValueError(f"fusion_attention: distributed: tokens: expected S, (S1, S2) or None, got {tokens!r}")
    results = []
    for name, size, lengths in zip(names, sizes, ("actual_seq_qlen", "actual_seq_kvlen"), strict=True):
        if args["layout"] == PACKED:
            total = 0
            with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
                total = sum(int(n) for n in (args["actual_seq_qlen"] if args[lengths] is None else args[lengths]))
            results.append(total if 0 <= total < INFINITE else 0)
        else:
            tensor = args[name]
            local = tensor.shape[1] if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 else 0
            results.append(ranks * local if size is None else size)
    return results


def _words(args: Mapping[str, Any], along: Sequence[str]) -> dict[str, Any]:
    """Returns name -> value that must be equal on all ranks: options, shapes (but token axes of `along`) and dtypes."""
    results: dict[str, Any] = {}
    for name, value in args.items():
        if isinstance(value, torch.Tensor) and name.startswith("actual_seq"):
            results[name] = value.tolist()
        elif isinstance(value, torch.Tensor):
            axis = _axis(name, args["layout"]) if name in along else value.dim()
            results[name] = (*value.shape[:axis], *value.shape[axis + 1 :], value.dtype)
        else:
            results[name] = list(value) if isinstance(value, np.ndarray) else value
    return results


def _axis(name: str, layout: str) -> int:
    """Returns the index of the token axis of the argument `name`: 0 if packed, 2 in a padded lse [B, N, S], else 1."""
    return 0 if layout == PACKED else 2 if name == "lse" else 1


def _full_args(args: Mapping[str, Any], counts: Mapping[Sequence[str], int]) -> dict[str, Any]:
    """Returns this rank's arguments `args` with every tensor replaced by a meta tensor of the unsharded size; counts:
    for a tuple of argument names, their tokens on all ranks."""
    results = dict(args)
    for names, count in counts.items():
        for name in names:
            tensor = args.get(name)
            if isinstance(tensor, torch.Tensor):
                axis = _axis(name, args["layout"])
                sizes = (*tensor.shape[:axis], count, *tensor.shape[axis + 1 :])
                results[name] = torch.zeros(sizes, dtype=tensor.dtype, device="meta")
    for name, value in results.items():
        if isinstance(value, torch.Tensor) and not value.is_meta and not name.startswith("actual_seq"):
            results[name] = torch.zeros(value.shape, dtype=value.dtype, device="meta")
    return results


def returned(ctx: Any, gradients: dict[str, Tensor], names: Sequence[str], before: int) -> tuple[Tensor | None, ...]:
    """Returns gradients (a dict by input name) as autograd.Function.backward() must: first None for the `before` inputs
    without a derivative, then one for each of `names`, None for inputs that need no gradient."""
    wanted = ctx.needs_input_grad[before:]
    result = (gradients.get(name) if need else None for name, need in zip(names, wanted, strict=True))
    return (*(None,) * before, *result)
