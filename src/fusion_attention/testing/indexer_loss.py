"""LossCase: a test call of the indexer's loss, with tensors in memory filled with NaN, its float64 results, and the
probabilities of every row by the formulas.

LossCase extends SparseCase by fields for the indexer.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_attention.contract import bind
from fusion_attention.ops.indexer_loss import api_definition as own_loss
from fusion_attention.ops.indexer_loss import definitions as indexer_loss
from fusion_attention.ops.indexer_loss.lower import lower
from fusion_attention.ops.indexer_loss.lowered_call import Loss
from fusion_attention.ops.sparse.lowered_call import grouped
from fusion_attention.testing.cases import Results, Tensor, hostile
from fusion_attention.testing.sparse import (
    Maker,
    SparseCase,
    bound_of,
    bounded,
    in_float64,
    keys_of,
    layouts_of,
    lengths_of,
    lists_of,
    selected,
    sequence_of,
)
from fusion_attention.torch_ops.eager import run


@dataclass(frozen=True)
class LossCase(SparseCase):
    """A test call of the indexer's loss with its gradients.

    Args:
        heads, dim: heads of the indexer, and elements per head.
        weights: dtype of the indexer's weights.
        count: keys that each row selects; 0: the loss is over all visible keys.
        window: number of visible keys before the diagonal; None: all. Only back ends support it, no interface does.
    """

    heads: int = 3
    dim: int = 8
    weights: str = "float32"
    window: int | None = None

    def first(self, b: int, row: int) -> int:
        """Returns the number of the first visible key of a row of sequence b."""
        return 0 if self.window is None else max(self.kv_len[b] - self.q_len[b] + row - self.window, 0)


def arguments(case: LossCase) -> dict[str, Any]:
    """Returns {name: argument} of torch_npu's loss of an indexer for a test call, in memory filled with NaN."""
    make = Maker(case)
    args = {
        "query": make.rows("q", case.heads_q, case.dim_qk),
        "key": make.rows("kv", case.heads_kv, case.dim_qk),
        "query_index": make.rows("q", case.heads, case.dim),
        "key_index": make.rows("kv", 1, case.dim),
        "weights": make.rows("q", case.heads, dtype=getattr(torch, case.weights)),
        "query_rope": make.rows("q", case.heads_q, case.dim_rope) if case.dim_rope else None,
        "key_rope": make.rows("kv", case.heads_kv, case.dim_rope) if case.dim_rope else None,
        "sparse_indices": lists_of(case, make, 1) if case.count else None,
        "sinks": hostile(make.draw(case.heads_q)) if case.sink else None,
        "block_table": None,
        "scale_value": case.scale,
        **lengths_of(case),
        **layouts_of(case),
        **bound_of(case),
    }
    return args | statistics(case, args)


def statistics(
    case: LossCase,
    args: Mapping[str, Any],
    dtype: torch.dtype = torch.float64,
    stats_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Returns {name: tensor}: softmax max and sum of a test call's attention and indexer, in CANN's axis order. dtype:
    of the computation; stats_dtype: of the results."""
    make = Maker(case)
    stats = {name: make.empty("q", case.heads_q, dtype=stats_dtype) for name in ("max", "sum")}
    index = {name: make.empty("q", 1, dtype=stats_dtype) for name in ("max", "sum")}
    for b, rows in enumerate(case.q_len):
        for row in range(rows):
            tokens = tokens_of(case, args, b, row)
            results = (_scores(case, args, b, row, tokens, dtype), _index(case, args, b, row, tokens, dtype)[0][None])
            sinks = args["sinks"] if case.sink else None
            for store, scores, sink in zip((stats, index), results, (sinks, None), strict=True):
                for name, value in zip(("max", "sum"), _statistics(scores, sink), strict=True):
                    sequence_of(case, store[name], "q", b)[row] = value
    saved = {f"softmax_{name}": grouped(stats[name], case.heads_kv, case.layout) for name in stats}
    return saved | {f"softmax_{name}_index": index[name].transpose(-1, -2) for name in index}


def tokens_of(case: LossCase, args: Mapping[str, Any], b: int, row: int) -> list[int]:
    """Returns the numbers of the keys that a row of sequence b reads, in the order of its selection, repetitions
    included; args: from arguments()."""
    if not case.count:
        return list(range(case.first(b, row), case.seen(b, row)))
    return selected(case, sequence_of(case, args["sparse_indices"], "q", b)[row, 0].tolist(), b, row)


def _scores(case: LossCase, args: Mapping[str, Any], b: int, row: int, tokens: list[int], dtype: torch.dtype) -> Tensor:
    """Returns the attention's scaled scores, [heads_q, tokens], of a row of sequence b and the keys `tokens`."""
    total = torch.zeros(case.heads_q, len(tokens), dtype=dtype)
    for q, k in (("query", "key"), ("query_rope", "key_rope")):
        if args[q] is not None:
            keys = keys_of(case, args, k, b)[tokens].to(dtype)  # [tokens, heads_kv, dim]
            keys = keys.repeat_interleave(case.heads_q // case.heads_kv, 1)
            total += torch.einsum("hd,khd->hk", sequence_of(case, args[q], "q", b)[row].to(dtype), keys)
    return case.scale * total


def _index(
    case: LossCase, args: Mapping[str, Any], b: int, row: int, tokens: list[int], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the indexer's (scores [tokens], products [heads, tokens], q, k, weights) of a row and keys `tokens`."""
    q, w = (sequence_of(case, args[name], "q", b)[row].to(dtype) for name in ("query_index", "weights"))
    k = keys_of(case, args, "key_index", b)[tokens, 0].to(dtype)
    dots = q @ k.mT
    return (w[:, None] * dots.relu()).sum(0), dots, q, k, w


def _statistics(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the softmax (max, sum), [heads] each, of scores [heads, keys] and sinks [heads]; 0, 0 if empty."""
    extra = (
        torch.full((len(scores), 1), -math.inf, dtype=scores.dtype) if sink is None else sink[:, None].to(scores.dtype)
    )
    every = torch.cat((scores, extra), -1)
    top = every.amax(-1)
    empty = top == -math.inf
    return top.masked_fill(empty, 0), (every - top[:, None]).exp().sum(-1).masked_fill(empty, 0)


def lowered(case: LossCase, args: Mapping[str, Any]) -> Loss:
    """Returns a test call for back ends, made from torch_npu's function, or indexer_loss() if only that has it."""
    if by_python(case):
        call = lower(bind(own_loss.RECORD, python_arguments(case, args)))
    else:
        call = lower(bind(indexer_loss.TORCH if case.count else indexer_loss.TORCH_DENSE, args))
    assert isinstance(call, Loss)
    call = bounded(call, args)
    if case.window is None:
        return call
    e = call.extents
    return replace(call, extents=replace(e, lo=e.kv_len - e.q_len - case.window))


def by_python(case: LossCase) -> bool:
    """True if only the Python API has this test call: the loss over all visible keys with a sink."""
    return case.sink and not case.count


def python_arguments(case: LossCase, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {name: argument} of indexer_loss(), from torch_npu's (`args`) for the same test call."""
    given = {p.name: args[p.name] for p in own_loss.RECORD.params if p.name in args}
    lse = args["softmax_max"] + args["softmax_sum"].log()
    lse = lse.movedim(0, 1).flatten(1) if case.packed else lse.mT.flatten(1, 2)
    lengths = {"actual_seq_qlen": list(case.q_len), "actual_seq_kvlen": list(case.kv_len)}
    return {**given, "lse": lse, "causal": case.mode == 3, **lengths}


def golden(case: LossCase, args: Mapping[str, Any]) -> Results:
    """Returns {name: result} of a test call in float64, from the reference back end; the loss is rounded to float32."""
    return run(in_float64(lowered(case, args)), "golden")


def each_row(case: LossCase, args: Mapping[str, Any]) -> Iterator[tuple[int, int, list[int]]]:
    """Yields (sequence, row, keys that it reads) for every row of a test call that reads a key; args: arguments()."""
    for b, rows in enumerate(case.q_len):
        for row in range(rows):
            if tokens := tokens_of(case, args, b, row):
                yield b, row, tokens


def distributions(
    case: LossCase, args: Mapping[str, Any], b: int, row: int, tokens: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns (p, y), attention's and indexer's probabilities, [tokens], of a row of sequence b over keys `tokens`."""

    def statistic(name: str) -> Tensor:
        stats = args[name].movedim(1, 0) if case.packed else args[name][b].movedim(1, 0)
        return stats[sum(case.q_len[:b]) + row if case.packed else row].reshape(-1, 1)

    top, total = statistic("softmax_max"), statistic("softmax_sum")
    if by_python(case):
        top, total = top + total.log(), torch.ones_like(total)
    top, total = top.to(dtype), total.to(dtype)
    heads: Any = case.heads_q
    if case.sink:
        heads = heads - ((args["sinks"][:, None].to(dtype) - top).exp() / total).sum()
    p = ((_scores(case, args, b, row, tokens, dtype) - top).exp() / total).sum(0) / heads
    scores = _index(case, args, b, row, tokens, dtype)[0]
    if case.count or by_python(case):
        return p, scores.softmax(-1)
    top, total = (statistic(name)[0, 0].to(dtype) for name in ("softmax_max_index", "softmax_sum_index"))
    return p, (scores - top).exp() / total
