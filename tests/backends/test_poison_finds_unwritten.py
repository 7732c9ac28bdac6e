"""Tests detect elements that a back end does not write: result memory is poisoned, comparisons reject poison."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bits import same, same_bits

import fusion_attention as fa
from fusion_attention import memory
from fusion_attention.backends import cpu
from fusion_attention.contract import bind
from fusion_attention.contract.sampling import sample
from fusion_attention.ir.call import tensors_in
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.judging.expected_error import stored
from fusion_attention.ops import RECORDS
from fusion_attention.ops.indexer_loss import definitions as indexer_loss
from fusion_attention.ops.inference import api_definition as decode_attention
from fusion_attention.testing import Case, arguments, compare, lowered, run, sparse
from fusion_attention.testing import indexer_loss as loss
from fusion_attention.torch_ops import eager

Results = dict[str, torch.Tensor]


def training() -> Results:
    case = Case(pse="full", sink=True, dim_rope=4)
    args = arguments(case)
    return run(lowered(case, args), args["dy"], "cpu")


def decode() -> Results:
    q, k, v = torch.ones(2, 1, 4, 16), torch.ones(2, 70, 2, 16), torch.ones(2, 70, 2, 16)
    call = decode_attention.lower(bind(decode_attention.RECORD, {"q": q, "k": k, "v": v}))
    return eager.run(replace(call, names=decode_attention.RESULTS), "cpu")


def selected() -> Results:
    case = sparse.SparseCase(sink=True, dim_rope=4)
    args = sparse.arguments(case)
    return sparse.compute(case, sparse.lowered(args), args["dy"], "cpu")


def chosen() -> Results:
    case = sparse.IndexerCase(exact=True)
    args = sparse.indexer_arguments(case)
    call = sparse.lowered_indexer(args)
    indices, values = sparse.chosen(call, "cpu")
    gradients = sparse.indexer_gradients(call, torch.ones_like(values), indices, "cpu")
    return {"indices": indices, "values": values, **gradients}


def statistics() -> Results:
    args = sparse.indexer_arguments(sparse.IndexerCase())
    given = {"query_index": args["query"], "key_index": args["key"], "weights": args["weights"]}
    call = indexer_loss.TORCH_LSE.lower(bind(indexer_loss.TORCH_LSE, given))
    return eager.run(call, "cpu")


def losses() -> Results:
    case = loss.LossCase(count=4)
    return eager.run(loss.lowered(case, loss.arguments(case)), "cpu")


# (family, operation kind): number of results of the operation kind.
FAMILIES: dict[tuple[Callable[[], Results], str], int] = {
    (training, "attention_forward"): 3,
    (training, "attention_backward"): 7,
    (decode, "attention_forward"): 3,
    (selected, "attention_forward"): 3,
    (selected, "attention_backward"): 6,
    (chosen, "indexer_topk"): 2,
    (chosen, "indexer_backward"): 3,
    (statistics, "indexer_lse"): 2,
    (losses, "indexer_loss"): 4,
}


def written(op_kind: Callable[..., None], *given: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Runs a back end's op_kind and returns (written tensor, its previous values) for each."""
    _, _, _, *operands = given
    tensors = {tensor.data_ptr(): tensor for tensor in tensors_in(tuple(operands)) if tensor.numel()}
    before = [(tensor, tensor.clone()) for tensor in tensors.values()]
    op_kind(*given)
    return [(tensor, old) for tensor, old in before if not same(tensor, old)]


def is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == -99).all())


def judge(ours: Results, right: Results) -> None:
    """Compares results with errors of only a final rounding."""
    assert ours.keys() == right.keys()
    for name, want in right.items():
        if want.is_floating_point():
            compare(name, ours[name], Expected(want.double(), stored(want, want.dtype).sqrt()))
        else:
            same_bits(ours[name], want, name)


@pytest.mark.parametrize(("family", "op_kind"), FAMILIES, ids=lambda value: getattr(value, "__name__", value))
def test_unwritten_result_element_fails_the_comparison(
    family: Callable[[], Results], op_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restores the poison of one element of each result in turn."""
    real, right, count, at = getattr(cpu, op_kind), family(), 1, 0

    def forgetful(*given: Any) -> None:
        nonlocal count
        changed = written(real, *given)
        tensor, old = changed[at]
        count = len(changed)
        assert is_poison(old), f"result {at} contained other values than poison before"
        tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.numel() // 2).copy_(old.flatten()[:1])

    judge(family(), right)
    while at < count:
        with monkeypatch.context() as patch:
            patch.setattr(cpu, op_kind, forgetful)
            ours = family()
        with pytest.raises(AssertionError):
            judge(ours, right)
        at += 1
    assert count == FAMILIES[family, op_kind]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RECORDS)
def test_fresh_results_of_every_operator_are_poisoned(name: str) -> None:
    """Includes results that are computed after the operation kind, and memory for traced results (`op.fresh`)."""
    op = RECORDS[name]
    args = sample(op)
    assert op.lower is not None
    result = op.lower(bind(op, args)).results()
    assert result
    result |= {} if op.fresh is None else {f"traced {n}": t for n, t in op.fresh({**op.neutral, **args}).items()}
    assert [n for n, tensor in result.items() if not is_poison(tensor)] == []


def test_results_of_calls_with_prepared_plan_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third call with one signature on, a prepared plan writes the results; here a stub writes none."""
    monkeypatch.setattr(cpu, "prepare", lambda *_: lambda *given: True)
    q, k, v = torch.randn(3, 1, 5, 2, 24).unbind()
    for _ in range(2):
        assert fa.attention(q, k, v, scale=0.3125).isfinite().all()
    for stats in (False, True):
        result = fa.attention(q, k, v, scale=0.3125, return_lse=stats)
        assert all(map(is_poison, result if stats else (result,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32, torch.int8])
def test_allocated_result_memory_is_poisoned(dtype: torch.dtype) -> None:
    template = memory.template(torch.empty(0), (3, 5), dtype)
    assert is_poison(memory.another(template))
    for shape in ((3, 5), (memory.LARGE,), (memory.LARGE,)):
        assert is_poison(memory.empty(torch.empty(0), shape, dtype))
