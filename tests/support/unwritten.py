"""Simulates a back end that leaves one element of one result unwritten."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bits import same, same_bits

from fusion_attention.ir.call import tensors_in
from fusion_attention.judging.error_bound import Expected
from fusion_attention.judging.expected_error import stored
from fusion_attention.testing import compare

Results = dict[str, torch.Tensor]


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
