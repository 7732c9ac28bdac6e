"""Tests detect elements that a back end does not write: result memory is poisoned, comparisons reject poison."""

from collections.abc import Callable

import pytest
import torch
from support.simulate_unwritten import FAMILIES, Results, forgets, is_poison

import fusion_attention as fa
from fusion_attention import memory
from fusion_attention.backends import cpu
from fusion_attention.contract import bind
from fusion_attention.contract.sampling import sample
from fusion_attention.ops import RECORDS

BACKENDS = ("cpu", "golden")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("family", "op_kind"), FAMILIES, ids=lambda value: getattr(value, "__name__", value))
def test_unwritten_result_element_fails_the_comparison(
    family: Callable[[str], Results], op_kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forgets(monkeypatch, backend, op_kind, lambda: family(backend)) == FAMILIES[family, op_kind]


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
