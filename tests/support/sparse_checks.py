"""Shared functions of the tests of sparse attention, of the indexer and of its loss."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from support.bits import same_bits

from fusion_attention.backends import cpu
from fusion_attention.contract import Op
from fusion_attention.ops.indexer_loss.lowered_call import DIFFERENTIABLE
from fusion_attention.testing import indexer_loss as loss
from fusion_attention.testing import sparse
from fusion_attention.testing.sparse import IndexerCase, Rows, SparseCase, scores_of, sequence_of

LEAST = 1e-8  # of probabilities in the logarithms of losses
Args = dict[str, Any]
Results = dict[str, torch.Tensor]
ARGUMENTS: dict[type, Callable[[Any], Args]] = {
    SparseCase: sparse.arguments,
    IndexerCase: sparse.indexer_arguments,
    loss.LossCase: loss.arguments,
}
LOWERED: dict[type, Callable[[Any, Args], Any]] = {
    SparseCase: lambda _, args: sparse.lowered(args),
    IndexerCase: lambda _, args: sparse.lowered_indexer(args),
    loss.LossCase: loss.lowered,
}


@cache
def operands(case: Rows) -> Args:
    return ARGUMENTS[type(case)](case)


def leaves_of(args: Args, *names: str) -> Results:
    """Returns the tensors of a call as leaves that require gradients."""
    return {name: args[name].detach().requires_grad_() for name in names if args[name] is not None}


def check_half_of_a_loss(result: torch.Tensor, leaves: Results, want: Results) -> None:
    """Compares a loss and the gradients of half of it."""
    same_bits(result.detach().reshape(1), want["loss"], "loss")
    (result * 0.5).backward()
    for name in DIFFERENTIABLE:
        gradient = leaves[name].grad
        assert gradient is not None
        same_bits(gradient, want[f"d{name}"] * 0.5, name)


def cloned(args: Args) -> Args:
    return {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in args.items()}


def shown(op: Op, case: Rows, args: Args) -> Args:
    """Returns the arguments by their names in the Python API."""
    given = {p.shown: args[p.name] for p in op.params if p.name in args}
    return {**given, "causal": case.mode == 3, "q_len": case.q_len, "kv_len": case.kv_len}


def backends(case: Rows) -> list[str]:
    """Returns the back ends that support a case; golden first."""
    problem = LOWERED[type(case)](case, operands(case)).problem
    return ["golden", *([] if cpu.reasons_against(problem, torch.device("cpu")) else ["cpu"])]


def close(got: Results, want: Results) -> None:
    """Compares results in float64, and a loss in float32."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        rtol = torch.finfo(torch.float32).eps if name == "loss" else 1e-11
        torch.testing.assert_close(
            got[name].double(), value.double(), rtol=rtol, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


def ordered(case: IndexerCase, args: Args, indices: torch.Tensor, values: torch.Tensor, at: Any) -> None:
    """Asserts descending scores, then ascending indices, then -1 and -inf; the scores must be exact in any sum."""
    for b, rows in enumerate(case.q_len):
        scores, (scores_here, theirs) = (
            scores_of(case, args, b, torch.float64),
            (sequence_of(case, t, "q", b) for t in (indices, values)),
        )
        for row in range(rows):
            order = torch.sort(scores[row, : case.seen(b, row)], descending=True, stable=True)
            n = min(case.top_k, len(order.values))
            rest = case.top_k - n
            assert scores_here[row, 0].tolist() == order.indices[:n].tolist() + [-1] * rest, (at, b, row)
            want = order.values[:n].to(values.dtype).tolist() + [-math.inf] * rest
            assert theirs[row, 0].tolist() == want, (at, b, row)
