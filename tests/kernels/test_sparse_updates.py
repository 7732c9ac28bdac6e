"""Plans over lists whose key lengths change: what an updated schedule gives has the bits of a fresh one's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fusion_attention.backends import triton as backend
from fusion_attention.ops.indexer.call import IndexerBackward
from fusion_attention.ops.sparse.call import SparseBackward
from fusion_attention.testing import indexer_loss, sparse
from fusion_attention.testing.indexer_loss import LossCase
from fusion_attention.testing.sparse import IndexerCase, SparseCase
from fusion_attention.torch_ops.eager import run
from fusion_attention.waist.kv import RowView

VERBS = ("attention_forward", "attention_backward", "indexer_topk", "indexer_backward", "indexer_lse", "indexer_loss")
LENGTHS: dict[str, Any] = {"layout": "TND", "q_len": (2, 3), "kv_len": (9, 20), "dtype": "float16"}


def of_lists() -> None:
    args = sparse.arguments(SparseCase(**LENGTHS, heads_q=3, count=9, lists="all", sink=True))
    call = sparse.lowered(args)
    run(SparseBackward(call, args["dy"], *run(call, "triton").values()), "triton")


def of_indexer() -> None:
    args = sparse.indexer_arguments(IndexerCase(**LENGTHS, heads=3, top_k=6))
    call = sparse.lowered_indexer(args)
    indices, _ = run(call, "triton").values()
    run(IndexerBackward(call, args["dy"], indices.clone()), "triton")  # what the choice writes anew stays apart


def of_loss(count: int) -> Callable[[], None]:
    def call() -> None:
        case = LossCase(**LENGTHS, heads_q=3, count=count, lists="all")
        run(indexer_loss.lowered(case, indexer_loss.arguments(case)), "triton")

    return call


def written(given: Any) -> list[torch.Tensor]:
    """Every tensor of operands and gradients, as copies."""
    if isinstance(given, torch.Tensor):
        return [given.clone()]
    if isinstance(given, RowView):
        return [t.clone() for t in given.keep]
    if is_dataclass(given):
        return [t for f in fields(given) for t in written(getattr(given, f.name))]
    return []


def same(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, want, strict=True))


CALLS = {"lists": of_lists, "indexer": of_indexer, "warm-up": of_loss(0), "loss": of_loss(8)}


@pytest.mark.parametrize("name", CALLS)
def test_an_updated_plan_is_a_fresh_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, tuple[Any, ...]] = {}
    for verb in VERBS:
        real = getattr(backend, verb)

        def noting(*given: Any, real: Any = real, verb: str = verb) -> None:
            made[verb] = (real, *given)
            real(*given)

        monkeypatch.setattr(backend, verb, noting)
    CALLS[name]()
    assert made
    for verb, (compute, problem, extents, schedule, *operands) in made.items():

        def results(lengths: Any, planned: Any, given: Any = operands, compute: Any = compute, p: Any = problem) -> Any:
            compute(p, lengths, planned, *given)
            return [t for each in given for t in written(each)]

        long = results(extents, schedule)
        short = replace(extents, kv_len=np.array([3, 14]), hi=extents.hi + np.array([-6, -6]))
        updated = results(short, backend.reschedule(problem, short, verb, schedule))
        assert not same(updated, long), verb
        assert same(updated, results(short, backend.schedule(problem, short, verb))), verb
