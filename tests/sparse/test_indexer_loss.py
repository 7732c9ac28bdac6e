"""The indexer's loss: golden against autograd, back ends against golden, identities."""

from dataclasses import replace

import pytest
import torch
from support.bits import same_bits
from support.contract_failures import by_name
from support.sparse_checks import (
    LEAST,
    Args,
    Results,
    backends,
    check_half_of_a_loss,
    cloned,
    close,
    leaves_of,
    operands,
)

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.backends import cpu
from fusion_attention.contract import bind
from fusion_attention.ir.problem import IndexerProblem
from fusion_attention.ops.indexer_loss import api_definition as own_loss
from fusion_attention.ops.indexer_loss import definitions as indexer_loss
from fusion_attention.ops.indexer_loss.lowered_call import DIFFERENTIABLE, RESULTS
from fusion_attention.testing.expected_indexer import check_index
from fusion_attention.testing.indexer_loss import (
    LossCase,
    by_python,
    distributions,
    each_row,
    golden,
    in_float64,
    lowered,
    python_arguments,
    sequence_of,
    statistics,
)
from fusion_attention.testing.sparse import bounded, keys_of
from fusion_attention.torch_ops.eager import run

PACKED = LossCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9))
HALF = {"dtype": "bfloat16", "weights": "bfloat16"}
MLA = {"dim_qk": 32, "dim_rope": 8, "heads_q": 8, "heads": 4, "dim": 16}
LISTS = ("all", "repeated", "short", "none", "wild")

COMPRESSED = [
    *(LossCase(q_len=(30, 9), kv_len=(7, 7), count=count, lists="all", ratio=4, residual=(2, 0)) for count in (0, 5)),
    *(
        replace(
            PACKED, q_len=(9, 2, 3), kv_len=(40, 0, 5), count=count, lists="wild", ratio=3, residual=(2, 1, 0), **HALF
        )
        for count in (0, 7)
    ),
]
CASES = [
    *(LossCase(dtype=d, layout=n, count=c) for d in ("float32", "float16") for n in ("BSND", "TND") for c in (0, 4)),
    *(LossCase(layout=layout, count=count, **HALF) for layout in ("BSND", "TND") for count in (0, 4)),
    *(LossCase(lists=lists, count=7, mode=mode) for lists in LISTS for mode in (0, 3)),
    *(replace(PACKED, lists=lists, count=7, **HALF) for lists in LISTS),
    *(LossCase(dtype=d, count=count, lists="all", **MLA) for d in ("float32", "bfloat16") for count in (0, 9)),
    LossCase(dtype="float16", weights="float16", lists="repeated", wide=True, heads_q=6, heads_kv=3, dim_qk=7, dim=5),
    LossCase(count=0, heads_q=6, heads_kv=6, dim_qk=7, dim_rope=3, heads=1, dim=1),
    *(replace(PACKED, sink=True, count=count, heads_kv=2, dim_rope=3) for count in (0, 5)),
    *(LossCase(q_len=(9, 9), kv_len=(4, 4), count=count, lists="all", sink=True) for count in (0, 6)),
    *(
        replace(PACKED, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, lists="all", count=count, **HALF)
        for count in (0, 6)
    ),
    *(LossCase(q_len=(5, 2, 0), kv_len=(3, 9, 4), q_rest=1, kv_rest=2, count=count) for count in (0, 6)),
    *(LossCase(q_len=(0, 0), kv_len=(4, 4), count=count) for count in (0, 6)),
    *(replace(PACKED, q_len=(0,), kv_len=(0,), count=count) for count in (0, 6)),
    *(LossCase(q_len=(40,), kv_len=(150,), count=count, lists="all", **MLA, **HALF) for count in (0, 64, 200)),
    *COMPRESSED,
]


def exactly(case: LossCase, args: Args, more: float = 1.0) -> Results:
    """Returns golden's results from statistics in float64, not rounded to float32, and `more` times the sum."""
    saved = statistics(case, args, stats_dtype=torch.float64)
    saved["softmax_sum"] = saved["softmax_sum"] * more
    saved["lse"] = python_arguments(case, {**args, **saved})["lse"]
    call = in_float64(lowered(case, args))
    return run(
        replace(call, tensors={n: t if t is None else saved.get(n, t) for n, t in call.tensors.items()}), "golden"
    )


# -------------------------------------------------------------------------------------------------- golden, back ends


def witness(case: LossCase, args: Args) -> Results:
    """Returns the loss, and by torch.autograd the gradients of sum_t (ln sum_j exp(I_j) - p . I); if statistics of the
    indexer are given, sum_j exp(I_j - max) / sum replaces the logarithm. A key counts as often as it is listed."""
    leaves = {name: args[name].double().detach().requires_grad_() for name in DIFFERENTIABLE}
    given = {**args, **leaves}
    loss, total = torch.zeros(1, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for b, row, tokens in each_row(case, args):
        p, y = distributions(case, given, b, row, tokens, torch.float64)
        q, w = (sequence_of(case, leaves[name], "q", b)[row] for name in ("query_index", "weights"))
        scores = (w[:, None] * (q @ keys_of(case, given, "key_index", b)[tokens, 0].mT).relu()).sum(0)
        clamped = p.clamp(min=LEAST)
        loss += ((clamped if case.count else p) * (clamped.log() - y.detach().clamp(min=LEAST).log())).sum()
        listed = case.count or by_python(case)
        total = total + (scores.logsumexp(-1) if listed else y.sum()) - (p * scores).sum()
    grads = torch.autograd.grad(total, list(leaves.values())) if total.requires_grad else None
    gradients = {f"d{name}": grads[i] if grads else torch.zeros_like(t) for i, (name, t) in enumerate(leaves.items())}
    return gradients | {"loss": loss.float()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_golden_indexer_loss_and_gradients_match_autograd(case: LossCase) -> None:
    args = operands(case)
    close(golden(case, args), witness(case, args))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_indexer_loss_of_every_back_end_matches_reference(case: LossCase) -> None:
    judge(case, operands(case))


def judge(case: LossCase, args: Args) -> None:
    """Compares every back end with golden."""
    call = lowered(case, args)
    check_index(call, {backend: run(call, backend) for backend in backends(case)[1:]})


STATISTICS = [case for case in CASES if case.count == 0 and not case.sink]


@pytest.mark.parametrize("case", STATISTICS, ids=lambda case: case.id)
def test_indexer_softmax_max_and_sum_match_reference(case: LossCase) -> None:
    """max and sum are 0 in rows without keys, and in rows that belong to no sequence."""
    args, op = operands(case), indexer_loss.TORCH_LSE
    given = {name: value for name, value in args.items() if not name.startswith("softmax")}
    call = bounded(op.lower(bind(op, given)), args)  # type: ignore[misc]
    assert call.problem == IndexerProblem(case.heads, case.dim, case.dtype, case.weights, top_k=0, ratio=case.ratio)
    exact = statistics(case, args, stats_dtype=torch.float64)
    wanted = {name: exact[f"{name}_index"].nan_to_num(0.0) for name in ("softmax_max", "softmax_sum")}
    close(run(in_float64(call), "golden"), wanted)
    results = ["golden", *([] if cpu.reasons_against(call.problem, torch.device("cpu")) else ["cpu"])]
    check_index(call, {backend: run(call, backend) for backend in results})


# ---------------------------------------------------------------------------------------------------------- identities


def run_own(args: Args, backend: str) -> Results:
    return run(own_loss.RECORD.lower(bind(own_loss.RECORD, args)), backend)  # type: ignore[misc]


def with_constant_head(case: LossCase) -> Args:
    """Returns arguments; the indexer's last head scores 1 for every key, so its dweights is sum_j dI_j."""
    args = cloned(operands(case))
    args["key_index"][..., -1] = 1
    args["query_index"][..., -1, :] = 0
    args["query_index"][..., -1, -1] = 1
    return args


@pytest.mark.parametrize("count", [0, 6])
def test_indexer_loss_with_statistics_of_more_keys_is_not_renormalised(count: int) -> None:
    """p then sums to less than 1 and is not normalised: sum dI = 1 - sum p."""
    case = LossCase(count=count)
    args = with_constant_head(case)
    rests = exactly(case, args, 2)["dweights"][..., -1]
    torch.testing.assert_close(rests, torch.full_like(rests, 0.5), rtol=0, atol=1e-11)
    judge(case, {**args, "softmax_sum": args["softmax_sum"] * 2})


def test_indexer_loss_ignores_nan_in_unselected_keys() -> None:
    case = LossCase(count=2, mode=0, dim_rope=4)
    args = cloned(operands(case))
    args["sparse_indices"].remainder_(4)
    wild = cloned(args)
    for name in ("key", "key_rope", "key_index"):
        wild[name][:, 4:] = torch.nan
    for backend in backends(case):
        same_bits(run(lowered(case, wild), backend), run(lowered(case, args), backend))


# ----------------------------------------------------------------------------------------------------------- interfaces


INTERFACE_CASES = [case for case in CASES if max(case.q_len, default=0) < 20 and case.ratio == 1]


@pytest.mark.parametrize("case", [c for c in INTERFACE_CASES if not c.sink or c.count], ids=lambda case: case.id)
def test_npu_indexer_loss_is_bitwise_equal_to_lowered_call(case: LossCase) -> None:
    args = operands(case)
    op = indexer_loss.TORCH if case.count else indexer_loss.TORCH_DENSE
    trained = leaves_of(args, *DIFFERENTIABLE)
    got = getattr(npu, op.name)(**by_name(op, {**args, **trained}))
    want = run(lowered(case, args), "auto")
    for name, tensor in zip(RESULTS, got, strict=True):
        same_bits(tensor, want[name], name)
        assert not tensor.requires_grad


@pytest.mark.parametrize("case", INTERFACE_CASES, ids=lambda case: case.id)
def test_indexer_loss_backward_scales_gradients_computed_in_forward(case: LossCase) -> None:
    backend = backends(case)[-1]
    args = python_arguments(case, operands(case))
    leaves = leaves_of(args, "query", "key", *DIFFERENTIABLE)
    want = run_own(args, backend)
    loss = fa.indexer_loss(**by_name(own_loss.RECORD, {**args, **leaves}), backend=backend)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    check_half_of_a_loss(loss, leaves, want)
    assert leaves["query"].grad is leaves["key"].grad is None
    with torch.no_grad():
        assert not fa.indexer_loss(**by_name(own_loss.RECORD, {**args, **leaves}), backend=backend).requires_grad


# ----------------------------------------------------------------------------------------------------------- bad input

CALL = LossCase(layout="TND", q_len=(3, 5), kv_len=(5, 7), count=4)
BAD: list[tuple[Args, str]] = [
    (
        {"sparse_indices": torch.full((8, 1, 4), 5)},
        "sparse_indices: expected -1, or the number of a block of the row's",
    ),
    ({"actual_seq_qlen": [3, 9]}, "actual_seq_qlen: expected the lengths .* got 9 tokens in all, 8 in the tensor"),
    ({"actual_seq_qlen": [4, 3]}, "actual_seq_qlen: expected the lengths of the sequences in the query tensor, got"),
    ({"actual_seq_kvlen": [5, 13]}, "actual_seq_klen: expected the lengths .* got 13 tokens in all, 12 in the tensor"),
    ({"actual_seq_kvlen": [12]}, r"actual_seq_klen: expected len\(actual_seq_qlen\) == len\(actual_seq_klen\), got"),
    ({"weights": torch.zeros(8, 3, dtype=torch.float16)}, "weights: expected the dtype of query, or float32, got"),
    ({"weights": torch.zeros(8, 4)}, "weights: expected one weight for every head of query_index, got weights=float32"),
    ({"sparse_indices": torch.zeros(8, 1, 0).int()}, "sparse_indices: expected lists of at least one entry, got K=0"),
    ({"sparse_indices": torch.zeros(8, 4).int()}, r"sparse_indices: expected 3 dimensions \[T1, 1, K\] in layout TND"),
    ({"softmax_max": torch.zeros(1, 8, 5)}, r"softmax_sum: expected axis 2 to be G=5 as in softmax_max, got 4"),
    ({"softmax_sum": torch.zeros(1, 9, 4)}, r"softmax_sum: expected axis 1 to be T1=8 as in query, got 9"),
    ({"softmax_sum": torch.zeros(1, 8, 4).double()}, "softmax_sum: expected float32, got float64"),
    ({"key_index": torch.zeros(12, 2, 8)}, "key_index: expected axis 1 to be 1, got 2"),
    ({"query_index": torch.zeros(8, 3, 8).bfloat16()}, "query_index: expected float32 as query, got bfloat16"),
    ({"query_rope": torch.zeros(8, 4, 2)}, "query_rope: expected query_rope and key_rope, or neither"),
    ({"scale_value": float("inf")}, "scale_value: expected a finite scale, got inf"),
    ({"layout": "BNSD"}, "layout: expected one of BSND, TND, got 'BNSD'"),
]


@pytest.mark.parametrize(("wrong", "text"), BAD, ids=[text[:48] for _, text in BAD])
def test_npu_indexer_loss_refuses_invalid_arguments(wrong: Args, text: str) -> None:
    given = by_name(indexer_loss.TORCH, {**operands(CALL), **wrong})
    with pytest.raises(fa.ContractError, match=f"npu_sparse_lightning_indexer_grad_kl_loss: {text}"):
        npu.npu_sparse_lightning_indexer_grad_kl_loss(**given)
