"""Cases of fa.indexer_target_loss(): operands in memory filled with NaN, golden's results, and a reference by loops."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_attention.contract import bind
from fusion_attention.ops.indexer_loss import api_target_definition
from fusion_attention.ops.indexer_loss.lower import lower_target
from fusion_attention.ops.indexer_loss.lowered_call import DIFFERENTIABLE, TargetLoss
from fusion_attention.testing.cases import Results, Tensor
from fusion_attention.testing.indexer_loss import LEAST, LossCase
from fusion_attention.testing.sparse import Maker, bound_of, in_float64, lists_of, sequence_of
from fusion_attention.torch_ops.eager import run


@dataclass(frozen=True)
class TargetCase(LossCase):
    """A test call of the indexer's loss with a given target, and its gradients.

    Args:
        target: "part" (sums to less than 1), "unit" (sums to 1), "zero", or "nan" (a NaN in every third row).
    """

    target: str = "part"


def slots_of(case: TargetCase, args: Mapping[str, Any], b: int, row: int) -> list[tuple[int, int]]:
    """Returns (position in the list and the target, key) of each key that a row of sequence b reads: the keys of its
    list, or all visible keys. args: the test call's arguments."""
    visible = case.seen(b, row)
    if not case.count:
        return [(key, key) for key in range(visible)]
    result = []
    for slot, key in enumerate(sequence_of(case, args["sparse_indices"], "q", b)[row, 0].tolist()[:visible]):
        if key < 0:
            break
        if key < visible:
            result.append((slot, key))
    return result


def arguments(case: TargetCase) -> dict[str, Any]:
    """Returns {name: argument} of indexer_target_loss() for a test call; targets that no row reads are NaN."""
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
    """Returns a target of `count` probabilities for a row, of kind case.target, such as "zero"; make: draws them."""
    p = (2 * make.draw(count)).softmax(-1) * {"zero": 0.0, "part": 0.6}.get(case.target, 1.0)
    if case.target == "nan" and row % 3 == 0:
        p[0] = torch.nan
    return p


def lowered(case: TargetCase, args: Mapping[str, Any], names: tuple[str, ...] = ()) -> TargetLoss:
    """Returns a test call, as back ends compute it; names: of the results to compute, if not the default ones."""
    call = lower_target(bind(api_target_definition.RECORD, args))
    return replace(call, names=names or call.names)


def golden(call: TargetLoss) -> Results:
    """Returns {name: result} of the call in float64, by the reference back end; the loss is rounded to float32."""
    return run(in_float64(call), "golden")


def reference(case: TargetCase, args: Mapping[str, Any], unit: bool = False) -> Results:
    """Returns {name: result} of a test call by the formulas, row by row in float64; the loss is rounded to float32.
    unit: True for the gradients of a target that sums to 1."""
    results = {f"d{name}": torch.zeros(args[name].shape, dtype=torch.float64) for name in DIFFERENTIABLE}
    results["softmax_out"] = torch.zeros(args["target"].shape, dtype=torch.float64)
    total = torch.zeros(1, dtype=torch.float64)
    for b, row, slots, keys in each_row(case, args):
        q, w = (sequence_of(case, args[name], "q", b)[row].double() for name in ("query_index", "weights"))
        k = sequence_of(case, args["key_index"], "kv", b)[keys, 0].double()
        dots = q @ k.mT
        y = (w[:, None] * dots.relu()).sum(0).softmax(-1)
        p = sequence_of(case, args["target"], "q", b)[row, 0, slots].double()
        total += (p * (p.clamp(min=LEAST).log() - y.clamp(min=LEAST).log())).sum()
        di = (y if unit else y * p.sum()) - p
        ds = torch.where(dots > 0, di * w[:, None], 0)
        sequence_of(case, results["softmax_out"], "q", b)[row, 0, slots] = y
        sequence_of(case, results["dweights"], "q", b)[row] = (di * dots.relu()).sum(-1)
        sequence_of(case, results["dquery_index"], "q", b)[row] = ds @ k
        sequence_of(case, results["dkey_index"], "kv", b)[:, 0].index_add_(0, torch.tensor(keys), ds.mT @ q)
    return results | {"loss": total.float()}


def each_row(case: TargetCase, args: Mapping[str, Any]) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Yields (sequence, row, slots, keys) for every row that reads a key; slots: the keys' positions in its list."""
    for b, rows in enumerate(case.q_len):
        for row in range(rows):
            if pairs := slots_of(case, args, b, row):
                slots, keys = zip(*pairs, strict=True)
                yield b, row, list(slots), list(keys)
