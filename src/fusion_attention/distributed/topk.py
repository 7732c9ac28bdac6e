"""The indexer where keys stay on their ranks: each chooses among its own for all rows, and the choices are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fusion_attention.distributed.lists import owned
from fusion_attention.distributed.sharded_call import Cut
from fusion_attention.distributed.sharding import _share as share
from fusion_attention.memory import empty
from fusion_attention.ops.indexer import call as indexer
from fusion_attention.plan import compute
from fusion_attention.torch_ops.autograd_guards import once

Tensor = torch.Tensor
_ROWS = ("query", "weights")
# Rows whose candidates are sorted together.
_TOGETHER = 4096


def best(indices: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row's candidates, as the indexer orders them: by descending value, a NaN before all
    numbers, and among equals by ascending index; what is no candidate has index -1 and value -inf."""
    # Stable sorts, the lesser order first.
    order = indices.sort(dim=-1, stable=True).indices
    indices, values = indices.gather(-1, order), values.gather(-1, order)
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return indices.gather(-1, order), values.gather(-1, order)


class Merged(torch.autograd.Function):
    """Indices and values of flat rows; the gradient of values."""

    @staticmethod
    def forward(ctx: Any, cut: Cut, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = _named(tensors)
        everything = given | cut.all_rows({name: given[name] for name in _ROWS})
        indices, values = _chosen(cut, everything)
        indices, values = _exchanged(cut, indices, values)
        ctx.cut = cut
        ctx.save_for_backward(indices, *tensors)
        ctx.mark_non_differentiable(indices)
        return indices, values.to(tensors[0].dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, upstream: Tensor) -> Any:
        indices, *tensors = ctx.saved_tensors

        def found() -> tuple[Tensor | None, ...]:
            made = _gradients(ctx.cut, _named(tensors), indices, upstream)
            wanted = ctx.needs_input_grad[1:]
            return (None, *(made[n] if need else None for n, need in zip(indexer.DIFFERENTIABLE, wanted, strict=True)))

        return once(found, (upstream, *tensors))


def _named(tensors: Sequence[Tensor]) -> dict[str, Tensor | None]:
    return {**dict(zip(indexer.DIFFERENTIABLE, tensors, strict=True)), "block_table": None}


def _chosen(cut: Cut, tensors: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """What this rank's keys offer every row: positions in whole sequences, and values."""
    q, problem = tensors["query"], replace(cut.whole.problem, has_values=True, wide_values=True)
    assert q is not None
    count, wide = problem.top_k, torch.promote_types(q.dtype, torch.float32)
    results = []
    for own in cut.kv.rounds:
        indices, values = empty(q, (len(q), 1, count), torch.int32), empty(q, (len(q), 1, count), wide)
        call = replace(cut.keys_of(tensors, own), problem=problem)
        compute(call, dict(zip(indexer.RESULTS, (indices, values), strict=True)), cut.backend)
        for one in own:
            start = int(cut.q.starts[one.sequence])
            rows = indices[start : start + int(cut.q.lengths[one.sequence])]
            rows += one.first * (rows >= 0)
        results.append((indices, values))
    if len(results) == 1:
        return results[0]
    return _best_of([part[0] for part in results], [part[1] for part in results], count)


def _best_of(indices: Sequence[Tensor], values: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """best() of several offers."""
    made = []
    for at in range(0, max(len(indices[0]), 1), _TOGETHER):
        some, more = (torch.cat([t[at : at + _TOGETHER] for t in offers], -1) for offers in (indices, values))
        made.append(best(some, more, count))
    return torch.cat([part[0] for part in made]), torch.cat([part[1] for part in made])


def _exchanged(cut: Cut, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The best of what all ranks offer this rank's rows, from what this one offers all rows."""
    side, count = cut.q, indices.shape[-1]
    offers = torch.cat((indices.view(torch.uint8), values.view(torch.uint8)), -1)
    full = side.lying(offers)
    sends = [
        share(full, side.placement, rank, int(side.padded)).contiguous() for rank in range(len(side.placement.ranks))
    ]
    shape = sends[cut.call.rank].shape
    parts = [side.flat(t) for t in cut.call.to_each("exchanging the best keys", sends, [shape] * len(sends))]
    size = count * indices.element_size()
    some = [part[..., :size].contiguous().view(indices.dtype) for part in parts]
    more = [part[..., size:].contiguous().view(values.dtype) for part in parts]
    return _best_of(some, more, count)


def _gradients(cut: Cut, given: dict[str, Tensor | None], indices: Tensor, dvalues: Tensor) -> dict[str, Tensor]:
    rows = cut.all_rows({name: given[name] for name in _ROWS} | {"indices": indices, "dvalues": dvalues})
    lists, grads, everything = rows.pop("indices"), rows.pop("dvalues"), given | rows
    dkey: Tensor | None = None
    sums: Tensor | None = None
    shapes: list[torch.Size] = []
    for own in cut.kv.rounds:
        some, more = owned(cut, own, lists, 1, grads, own_count=True)
        result = cut.run(indexer.IndexerBackward(cut.keys_of(everything, own), more, some))
        if dkey is None:
            dkey = result["dkey"]
        for one in own:
            at = slice(one.at, one.at + one.tokens)
            dkey[at] = result["dkey"][at]
        parts = [result[f"d{name}"] for name in _ROWS]
        shapes = [part.shape[1:] for part in parts]
        wide = torch.cat([part.flatten(1).to(torch.promote_types(part.dtype, torch.float32)) for part in parts], 1)
        sums = wide if sums is None else sums + wide
    assert dkey is not None
    assert sums is not None
    split = cut.q.summed(cut.call, sums).split([shape.numel() for shape in shapes], 1)
    made = {
        name: part.unflatten(1, shape).to(given[name].dtype)  # type: ignore[union-attr]
        for name, part, shape in zip(_ROWS, split, shapes, strict=True)
    }
    return made | {"key": dkey}
