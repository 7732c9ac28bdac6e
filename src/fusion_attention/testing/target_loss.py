"""TargetCase: test calls of indexer_target_loss(), with tensors in memory filled with NaN, and float64 results."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_attention.contract import bind
from fusion_attention.ops.indexer_loss import api_target_definition
from fusion_attention.ops.indexer_loss.lower import lower_target
from fusion_attention.ops.indexer_loss.lowered_call import TargetLoss
from fusion_attention.testing.cases import Results, Tensor
from fusion_attention.testing.indexer_loss import LossCase
from fusion_attention.testing.sparse import Maker, bound_of, in_float64, lists_of, sequence_of
from fusion_attention.torch_ops.eager import run


@dataclass(frozen=True)
class TargetCase(LossCase):
    """A test call of the indexer's loss with a given target, and its gradients.

    Args:
        target: probabilities "part" (sum below 1), "unit" (sum 1), "zero", or "nan" (a NaN in every third row).
    """

    target: str = "part"


def slots_of(case: TargetCase, args: Mapping[str, Any], b: int, row: int) -> list[tuple[int, int]]:
    """Returns (index in the row's target, number of the key) of each key that a row of sequence b reads: the selected
    ones, or all visible ones. args: from arguments()."""
    visible = case.seen(b, row)
    if not case.count:
        return [(key, key) for key in range(visible)]
    entries = sequence_of(case, args["sparse_indices"], "q", b)[row, 0].tolist()[:visible]
    entries = entries[: entries.index(-1)] if -1 in entries else entries
    return [(slot, key) for slot, key in enumerate(entries) if key < visible]


def arguments(case: TargetCase) -> dict[str, Any]:
    """Returns {name: argument} of indexer_target_loss() for a test call; unread elements of the target are NaN."""
    make = Maker(case)
    args = {
        "query_index": make.rows("q", case.heads, case.dim),
        "key_index": make.rows("kv", 1, case.dim),
        "weights": make.rows("q", case.heads, dtype=getattr(torch, case.weights)),
        "target": make.empty("q", 1, case.count or case.tokens("kv"), dtype=torch.float32),
        "sparse_indices": lists_of(case, make, 1) if case.count else None,
        "layout": case.layout,
        "actual_seq_qlen": list(case.q_len),
        "actual_seq_kvlen": list(case.kv_len),
        "causal": case.mode == 3,
        **bound_of(case),
    }
    for b, rows in enumerate(case.q_len):
        for row in range(rows):
            if slots := [slot for slot, _ in slots_of(case, args, b, row)]:
                sequence_of(case, args["target"], "q", b)[row, 0, slots] = _target(case, make, len(slots), row)
    return args


def _target(case: TargetCase, make: Maker, count: int, row: int) -> Tensor:
    """Returns `count` target probabilities for a row, of the kind case.target, such as "zero"; make: draws them."""
    p = (2 * make.draw(count)).softmax(-1) * {"zero": 0.0, "part": 0.6}.get(case.target, 1.0)
    if case.target == "nan" and row % 3 == 0:
        p[0] = torch.nan
    return p


def lowered(case: TargetCase, args: Mapping[str, Any], names: tuple[str, ...] = ()) -> TargetLoss:
    """Returns a test call, as back ends compute it; names: results to compute; (): gradients and loss."""
    call = lower_target(bind(api_target_definition.RECORD, args))
    return replace(call, names=names or call.names)


def golden(call: TargetLoss) -> Results:
    """Returns {name: result} of `call` in float64, from the reference back end; the loss is rounded to float32."""
    return run(in_float64(call), "golden")


def each_row(case: TargetCase, args: Mapping[str, Any]) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Yields (sequence, row, slots, keys) for every row that reads keys; slots: indices of the keys in its target."""
    for b, rows in enumerate(case.q_len):
        for row in range(rows):
            if pairs := slots_of(case, args, b, row):
                slots, keys = zip(*pairs, strict=True)
                yield b, row, list(slots), list(keys)
