"""The indexer without gathered keys: each rank selects among its keys for all rows, then the selections are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fusion_attention.distributed.lists import owned
from fusion_attention.distributed.sharded_call import ShardedCall, Sums, returned
from fusion_attention.memory import empty
from fusion_attention.ops.indexer import lowered_call as indexer
from fusion_attention.plan import compute
from fusion_attention.torch_ops.autograd_guards import once

Tensor = torch.Tensor
_ROWS = ("query", "weights")
# Rows per sort, which limits temporary memory.
_TOGETHER = 4096


def best(indices: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns (key indices, scores) of the `count` candidates with the largest scores of each query token [..., count].
    Scores descend, NaN first; ties are in the order of indices. Index -1 and score -inf mean no candidate."""
    # Stable sorts, the secondary order first.
    order = indices.sort(dim=-1, stable=True).indices
    indices, values = indices.gather(-1, order), values.gather(-1, order)
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return indices.gather(-1, order), values.gather(-1, order)


class Merged(torch.autograd.Function):
    """The autograd function of lightning_indexer(merge_topk=True) for this rank's query tokens: key indices and scores,
    merged from the selections that each rank makes among its keys; scores have a derivative."""

    @staticmethod
    def forward(ctx: Any, sharded: ShardedCall, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = named(tensors)
        everything = given | sharded.all_rows({name: given[name] for name in _ROWS})
        indices, values = _chosen(sharded, everything)
        indices, values = _exchanged(sharded, indices, values)
        ctx.sharded = sharded
        ctx.save_for_backward(indices, *tensors)
        ctx.mark_non_differentiable(indices)
        return indices, values.to(tensors[0].dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, upstream: Tensor) -> Any:
        indices, *tensors = ctx.saved_tensors

        sharded = ctx.sharded

        def gradients() -> tuple[Tensor | None, ...]:
            given, beside = named(tensors), {"indices": indices, "dvalues": upstream}
            rows = sharded.all_rows({name: given[name] for name in _ROWS} | beside)
            lists, grads, everything = rows.pop("indices"), rows.pop("dvalues"), given | rows
            sum_dtype = torch.promote_types(upstream.dtype, torch.float32)
            sums = Sums(sharded.call, sharded.q, ("dkey",), sum_dtype)
            for segments in sharded.kv.rounds:
                some, more = owned(sharded, segments, lists, 1, grads, own_count=True)
                result = sharded.run(indexer.IndexerBackward(sharded.keys_of(everything, segments), more, some))
                sums.add(segments, {n: t if n == "dkey" else t.to(sum_dtype) for n, t in result.items()})
            by_name = {"key": sums.local["dkey"]}
            for name, gradient in sums.summed().items():
                by_name[name[1:]] = gradient.to(given[name[1:]].dtype)  # type: ignore[union-attr]
            return returned(ctx, by_name, indexer.DIFFERENTIABLE, 1)

        return once(gradients, (upstream, *tensors))


def named(tensors: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Returns the indexer's inputs by name; tensors: query, key and weights; "block_table" is None."""
    return {**dict(zip(indexer.DIFFERENTIABLE, tensors, strict=True)), "block_table": None}


def _chosen(sharded: ShardedCall, tensors: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Returns (positions in unsharded sequences, scores) [query tokens, heads, top_k] of the best keys of this rank for
    each query token of all ranks; tensors, by name: queries and weights of all ranks, keys of this rank."""
    q, problem = tensors["query"], replace(sharded.full.problem, has_values=True, wide_values=True)
    assert q is not None
    count, values_dtype = problem.top_k, torch.promote_types(q.dtype, torch.float32)
    results = []
    for segments in sharded.kv.rounds:
        indices, values = empty(q, (len(q), 1, count), torch.int32), empty(q, (len(q), 1, count), values_dtype)
        call = replace(sharded.keys_of(tensors, segments), problem=problem)
        compute(call, dict(zip(indexer.RESULTS, (indices, values), strict=True)), sharded.backend)
        for one in segments:
            start = int(sharded.q.starts[one.sequence])
            rows = indices[start : start + int(sharded.q.lengths[one.sequence])]
            rows += one.first * (rows >= 0)
        results.append((indices, values))
    if len(results) == 1:
        return results[0]
    return _best_of([result[0] for result in results], [result[1] for result in results], count)


def _best_of(indices: Sequence[Tensor], values: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Concatenates (key indices, scores) [query tokens, heads, n] of several ranks, and returns those with the `count`
    largest scores of each token."""
    best_pairs = []
    for at in range(0, max(len(indices[0]), 1), _TOGETHER):
        some, more = (torch.cat([t[at : at + _TOGETHER] for t in offers], -1) for offers in (indices, values))
        best_pairs.append(best(some, more, count))
    return torch.cat([pair[0] for pair in best_pairs]), torch.cat([pair[1] for pair in best_pairs])


def _exchanged(sharded: ShardedCall, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sends each rank its query tokens' candidates (key indices, scores); returns the best ones, [tokens, heads, n]."""
    side, count = sharded.q, indices.shape[-1]
    offers = torch.cat((indices.view(torch.uint8), values.view(torch.uint8)), -1)
    sends = side.shards(offers)
    shape = sends[sharded.call.rank].shape
    parts = [side.flat(t) for t in sharded.call.to_each("exchanging the best keys", sends, [shape] * len(sends))]
    size = count * indices.element_size()
    some = [shard[..., :size].contiguous().view(indices.dtype) for shard in parts]
    more = [shard[..., size:].contiguous().view(values.dtype) for shard in parts]
    return _best_of(some, more, count)
