"""Tests detect elements that a kernel does not write, in results and in the memory between two kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.launches import watch
from support.simulate_unwritten import FAMILIES, Results, forgets, is_poison

import fusion_attention as fa
from fusion_attention.backends.triton.decode import launch as launch_decode
from fusion_attention.backends.triton.dense import launch as launch_dense
from fusion_attention.testing import Case, arguments, lowered, run


def training() -> Results:
    case = Case(q_len=(5,), kv_len=(7,), pse="full", sink=True, dim_rope=4)
    args = arguments(case)
    return run(lowered(case, args), args["dy"], "triton")


@pytest.mark.parametrize(("op_kind", "results"), [("attention_forward", 3), ("attention_backward", 7)])
def test_triton_unwritten_result_element_fails_the_comparison(
    op_kind: str, results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forgets(monkeypatch, "triton", op_kind, training) == results


@pytest.mark.parametrize("module", [launch_dense, launch_decode])
def test_triton_scratch_memory_is_poisoned(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch passes data to the next kernel: partial results of decode, row data of the backward."""
    given: list[torch.Tensor] = []

    def see(kernel: Any, named: dict[str, Any]) -> None:
        if not given:
            scratch = [named.get("flat"), named.get("partials")]
            given.extend(t for t in scratch if t is not None)
            assert all(map(is_poison, given))

    q = torch.randn(1, 3, 2, 16, requires_grad=module is launch_dense)
    k = torch.randn(1, 600 if module is launch_decode else 5, 2, 16)
    out = fa.attention(q, k, k, sink=torch.zeros(2), backend="triton")
    watch(monkeypatch, see)
    if module is launch_dense:
        torch.autograd.grad(out.sum(), q)
    else:
        fa.attention(q, k, k, sink=torch.zeros(2), backend="triton")
    assert len(given) == (2 if module is launch_dense else 1)


SLOW = ("attention_backward", "indexer_topk", "indexer_backward")
OF_LISTS = [
    pytest.param(family, op_kind, marks=[pytest.mark.slow] if op_kind in SLOW else [])
    for family, op_kind in FAMILIES
    if family.__name__ not in ("training", "decode")
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("family", "op_kind"), OF_LISTS, ids=lambda value: getattr(value, "__name__", value))
def test_triton_unwritten_sparse_result_element_fails_the_comparison(
    family: Callable[[str], Results], op_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forgets(monkeypatch, "triton", op_kind, lambda: family("triton")) == FAMILIES[family, op_kind]
