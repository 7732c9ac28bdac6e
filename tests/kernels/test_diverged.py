"""What a run costs in which all is NaN: some loads more for each row, not for each pair of a row and a key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from triton.runtime import interpreter

from fusion_attention.testing import Case, arguments, check, golden, lowered, plain, run

ALL = ("query", "key", "value", "dy")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many loads the kernels have issued so far."""
    count = 0
    real = interpreter.InterpreterBuilder.create_masked_load

    def counting(*given: Any) -> Any:
        nonlocal count
        count += 1
        return real(*given)

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
def test_what_nan_costs_grows_with_the_rows_alone(
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


def test_a_diverged_run_is_goldens() -> None:
    case = case_of(20, dropout="philox", keep_prob=0.5)
    args = arguments(case)
    measure = plain(case, args)
    for name in ALL:
        args[name].fill_(math.nan)
    check(case, run(lowered(case, args), args["dy"], "triton"), golden(case, args), measure)
