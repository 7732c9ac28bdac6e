"""Simulates a back end that leaves one element of one result unwritten, in calls of every family of operations."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bits import same, same_bits

from fusion_attention.contract import bind
from fusion_attention.ir.call import tensors_in
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.judging.expected_error import stored
from fusion_attention.ops.indexer_loss import definitions as indexer_loss
from fusion_attention.ops.inference import api_definition as decode_attention
from fusion_attention.testing import Case, arguments, compare, lowered, run, sparse
from fusion_attention.testing import indexer_loss as loss
from fusion_attention.torch_ops import eager

Results = dict[str, torch.Tensor]


def training(backend: str) -> Results:
    case = Case(pse="full", sink=True, dim_rope=4)
    args = arguments(case)
    return run(lowered(case, args), args["dy"], backend)


def decode(backend: str) -> Results:
    q, k, v = torch.ones(2, 1, 4, 16), torch.ones(2, 70, 2, 16), torch.ones(2, 70, 2, 16)
    call = decode_attention.lower(bind(decode_attention.RECORD, {"q": q, "k": k, "v": v}))
    return eager.run(replace(call, names=decode_attention.RESULTS), backend)


def selected(backend: str) -> Results:
    case = sparse.SparseCase(sink=True, dim_rope=4)
    args = sparse.arguments(case)
    return sparse.compute(case, sparse.lowered(args), args["dy"], backend)


def chosen(backend: str) -> Results:
    case = sparse.IndexerCase(exact=True)
    args = sparse.indexer_arguments(case)
    call = sparse.lowered_indexer(args)
    indices, values = sparse.chosen(call, backend)
    gradients = sparse.indexer_gradients(call, torch.ones_like(values), sparse.chosen(call, "cpu")[0], backend)
    return {"indices": indices, "values": values, **gradients}


def statistics(backend: str) -> Results:
    args = sparse.indexer_arguments(sparse.IndexerCase())
    given = {"query_index": args["query"], "key_index": args["key"], "weights": args["weights"]}
    call = indexer_loss.TORCH_LSE.lower(bind(indexer_loss.TORCH_LSE, given))
    return eager.run(call, backend)


def losses(backend: str) -> Results:
    case = loss.LossCase(count=4)
    return eager.run(loss.lowered(case, loss.arguments(case)), backend)


# (family, operation kind): number of results of the operation kind.
FAMILIES: dict[tuple[Callable[[str], Results], str], int] = {
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


def forgets(patch: pytest.MonkeyPatch, backend: str, op_kind: str, run: Callable[[], Results]) -> int:
    """Restores the poison of one element of each result in turn, and asserts that the comparison fails each time.

    Args:
        patch: restores the operation kind after the test.
        backend: name of the back end.
        op_kind: operation kind whose results are poisoned.
        run: makes a call that uses the operation kind, and returns all results.

    Returns:
        The number of results.
    """
    module = importlib.import_module(f"fusion_attention.backends.{backend}")
    real, right, result, at = getattr(module, op_kind), run(), 1, 0

    def forgetful(*given: Any) -> None:
        nonlocal result
        changed = written(real, *given)
        tensor, old = changed[at]
        result = len(changed)
        assert is_poison(old), f"{op_kind}: result {at} contained other values than poison before"
        tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.numel() // 2).copy_(old.flatten()[:1])

    judge(run(), right)
    while at < result:
        with patch.context() as poisoned:
            poisoned.setattr(module, op_kind, forgetful)
            ours = run()
        with pytest.raises(AssertionError):
            judge(ours, right)
        at += 1
    return result
