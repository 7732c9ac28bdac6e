"""The cost of a run with NaN everywhere: a few more loads for each row, not for each pair of a row and a key."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

import fusion_attention as fa
from fusion_attention.testing import Case, arguments, check, expected, lowered, run

ALL = ("query", "key", "value", "dy")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the loads that kernels issue; returns a function that returns the count so far."""
    count = 0
    real = interpreter.InterpreterBuilder.create_masked_load

    def counting(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return real(*given, **named)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counting)
    return lambda: count


def case_of(length: int, **more: Any) -> Case:
    shape = {"q_len": (length,), "kv_len": (length,), "heads_q": 1, "heads_kv": 1, "dim_qk": 4}
    return Case(**(shape | {"sparse_mode": 3, "mask": "compressed"} | more))


FULL = {"sparse_mode": 0, "mask": "none", "dim_rope": 4}


@pytest.mark.parametrize(
    ("names", "more"),
    [(ALL, {}), *(pytest.param((name,), more, marks=pytest.mark.slow) for name, more in (("value", {}), ("dy", FULL)))],
)
def test_extra_loads_for_nan_inputs_grow_at_most_linearly_with_length(
    names: tuple[str, ...], more: dict[str, Any], loads: Callable[[], int]
) -> None:
    extra = []
    for length in (32, 48):
        case = case_of(length, **more)
        args, spent = arguments(case), []
        for fill in (False, True):
            if fill:
                for name in names:
                    args[name].fill_(math.nan)
            before = loads()
            run(lowered(case, args), args["dy"], "triton")
            spent.append(loads() - before)
        extra.append(spent[1] - spent[0])
    assert extra[1] <= 1.7 * max(extra[0], 1)


def test_triton_attention_of_all_nan_inputs_matches_reference() -> None:
    case = case_of(20, dropout="philox", keep_prob=0.5)
    args = arguments(case)
    for name in ALL:
        args[name].fill_(math.nan)
    check(case.id, run(lowered(case, args), args["dy"], "triton"), expected(case, args))


@pytest.mark.parametrize("fill", [math.inf, -math.inf])
def test_infinite_value_does_not_cause_extra_loads(fill: float, loads: Callable[[], int]) -> None:
    """The rows that see the value become infinite in the normal pass, so no row is recomputed."""
    q, k, v = (torch.randn(1, 32, 1, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    spent = []
    for value in (0.0, fill):
        v[0, 5, 0, 3] = value
        before = loads()
        out = fa.attention(q, k, v, backend="triton")
        spent.append(loads() - before)
    assert (out[0, :, 0, 3] == fill).all()
    assert out[0, :, 0, :3].isfinite().all()
    assert spent[0] == spent[1]


def test_finite_elements_of_output_row_with_nan_keep_same_bits() -> None:
    """A search for NaN that ends early has not read all keys: it must not change other elements."""
    q, k, v = (torch.randn(1, 40, 1, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    good = fa.attention(q, k, v, backend="triton")
    v[0, 5, 0, 3] = math.nan
    out = fa.attention(q, k, v, backend="triton")
    assert out[0, :, 0, 3].isnan().all()
    assert torch.equal(out[0, :, 0, 4:], good[0, :, 0, 4:])
