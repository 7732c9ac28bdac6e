"""The indexer's loss with a given target: golden against autograd, back ends against golden."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.contract_failures import by_name
from support.sparse_checks import LEAST, Args, Results, check_half_of_a_loss, close, leaves_of

import fusion_attention as fa
from fusion_attention import ContractError
from fusion_attention.backends import cpu
from fusion_attention.ops.indexer_loss import api_target_definition as record
from fusion_attention.ops.indexer_loss.lowered_call import DIFFERENTIABLE, RESULTS, TARGET_RESULTS
from fusion_attention.testing.expected_indexer import check_index
from fusion_attention.testing.sparse import sequence_of
from fusion_attention.testing.target_loss import TargetCase, arguments, each_row, golden, lowered
from fusion_attention.torch_ops.eager import run

PACKED = TargetCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9))
HALF = {"dtype": "bfloat16", "weights": "bfloat16"}
LISTS = ("all", "repeated", "short", "none", "wild")
CASES = [
    *(TargetCase(dtype=d, layout=n, count=c) for d in ("float32", "float16") for n in ("BSND", "TND") for c in (0, 4)),
    *(replace(PACKED, count=count, **HALF) for count in (0, 4)),
    *(TargetCase(lists=lists, count=7, mode=mode, dtype="bfloat16") for lists in LISTS for mode in (0, 3)),
    *(TargetCase(target=target, count=count) for target in ("unit", "zero", "nan") for count in (0, 6)),
    TargetCase(dtype="float16", weights="float16", lists="repeated", wide=True, count=9, dim=5),
    *(TargetCase(q_len=(9, 9), kv_len=(4, 4), count=count, lists="all") for count in (0, 6)),
    *(
        replace(PACKED, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, lists="all", count=count)
        for count in (0, 6)
    ),
    *(TargetCase(q_len=(5, 2, 0), kv_len=(3, 9, 4), q_rest=1, kv_rest=2, count=count) for count in (0, 6)),
    *(TargetCase(q_len=(0, 0), kv_len=(4, 4), count=count) for count in (0, 6)),
    *(replace(PACKED, q_len=(0,), kv_len=(0,), count=count) for count in (0, 6)),
    *(TargetCase(q_len=(9, 8), kv_len=(2, 2), ratio=4, residual=(1, 0), count=count) for count in (0, 3)),
    *(TargetCase(q_len=(2, 3), kv_len=(5, 5), ratio=4, residual=(3, 0), count=count, **HALF) for count in (0, 9)),
    *(replace(PACKED, q_len=(9, 2, 7), kv_len=(3, 6, 1), ratio=3, residual=(0, 2, 1), count=count) for count in (0, 5)),
    *(TargetCase(q_len=(13,), kv_len=(3,), ratio=4, residual=(1,), lists="wild", count=count) for count in (0, 5)),
    *(TargetCase(q_len=(70,), kv_len=(450,), count=count, lists="all", heads=8, dim=32, **HALF) for count in (0, 300)),
]


@cache
def operands(case: TargetCase) -> Args:
    return arguments(case)


def both(case: TargetCase) -> list[Any]:
    """Returns two lowered calls: one returns the loss, the other y."""
    return [lowered(case, operands(case), names) for names in (RESULTS, TARGET_RESULTS)]


def chosen(call: Any, results: Results) -> Results:
    return {name: results[name] for name in call.names}


def witness(case: TargetCase, args: Args, unit: bool = False) -> Results:
    """Returns the loss, y, and by torch.autograd the gradients of sum_t (P ln sum_j exp(I_j) - p . I), where P is the
    sum of p, or 1 if `unit`."""
    leaves = {name: args[name].double().detach().requires_grad_() for name in DIFFERENTIABLE}
    loss, total = torch.zeros(1, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    every_y = torch.zeros(args["target"].shape, dtype=torch.float64)
    for b, row, slots, keys in each_row(case, args):
        q, w = (sequence_of(case, leaves[name], "q", b)[row] for name in ("query_index", "weights"))
        scores = (w[:, None] * (q @ sequence_of(case, leaves["key_index"], "kv", b)[keys, 0].mT).relu()).sum(0)
        y = scores.detach().softmax(-1)
        p = sequence_of(case, args["target"], "q", b)[row, 0, slots].double()
        loss += (p * (p.clamp(min=LEAST).log() - y.clamp(min=LEAST).log())).sum()
        sequence_of(case, every_y, "q", b)[row, 0, slots] = y
        total = total + (1 if unit else p.sum()) * scores.logsumexp(-1) - (p * scores).sum()
    grads = torch.autograd.grad(total, list(leaves.values())) if total.requires_grad else None
    gradients = {f"d{name}": grads[i] if grads else torch.zeros_like(t) for i, (name, t) in enumerate(leaves.items())}
    return gradients | {"softmax_out": every_y, "loss": loss.float()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_golden_target_loss_and_gradients_match_autograd(case: TargetCase) -> None:
    want = witness(case, operands(case))
    for call in both(case):
        close_with_nan(golden(call), chosen(call, want))


def close_with_nan(got: Results, want: Results) -> None:
    """Checks close values, and NaN in the same places."""
    for name, t in want.items():
        assert torch.equal(got[name].isnan(), t.isnan()), name
    close(*({name: t.nan_to_num(0.0) for name, t in each.items()} for each in (got, want)))


def test_target_loss_with_unit_target_matches_autograd() -> None:
    case = TargetCase(count=0)
    call = lowered(case, operands(case), TARGET_RESULTS)
    call = replace(call, problem=replace(call.problem, unit_target=True))
    close(golden(call), chosen(call, witness(case, operands(case), unit=True)))
    check_index(call, {"cpu": run(call, "cpu")})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_target_loss_of_cpu_back_end_matches_reference(case: TargetCase) -> None:
    for call in both(case):
        assert not cpu.reasons_against(call.problem, torch.device("cpu"))
        check_index(call, {"cpu": run(call, "cpu")})


@pytest.mark.parametrize("count", [0, 6])
def test_target_loss_is_bitwise_equal_for_any_thread_count(count: int) -> None:
    case = TargetCase(q_len=(70,), kv_len=(450,), count=count, lists="all", heads=8, dim=32, **HALF)
    threads = torch.get_num_threads()
    results = []
    for n in (1, 3):
        torch.set_num_threads(n)
        results.append([run(call, "cpu") for call in both(case)])
    torch.set_num_threads(threads)
    for one, other in zip(*results, strict=True):
        same_bits(one, other)


@pytest.mark.parametrize("case", [c for c in CASES if max(c.q_len) < 20], ids=lambda case: case.id)
def test_target_loss_backward_scales_gradients_computed_in_forward(case: TargetCase) -> None:
    args = operands(case)
    leaves = leaves_of(args, *DIFFERENTIABLE)
    want = run(lowered(case, args), "cpu")
    loss = fa.indexer_target_loss(**by_name(record.RECORD, {**args, **leaves}))
    assert loss.shape == ()
    check_half_of_a_loss(loss, leaves, want)


def test_indexer_target_loss_error_names_invalid_target() -> None:
    case = TargetCase(count=4)
    args = operands(case)
    for name, wrong, words in (
        ("target", args["target"][..., :3], "target"),
        ("target", args["target"].half(), "float32"),
        ("sparse_indices", None, "target"),
    ):
        with pytest.raises(ContractError, match=words):
            fa.indexer_target_loss(**by_name(record.RECORD, {**args, name: wrong}))
