"""Faults of tiled kernels are named; right kernels with other orders of tiles are not accused."""

from __future__ import annotations

import pytest
from support.planted_tiles import FAULTS, drawn, reordered

from fusion_attention.judging.judge import diagnose

SEEDS = 6


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, seed: int) -> None:
    x = drawn(1000 * seed + [*FAULTS].index(fault))
    program, names = FAULTS[fault]
    result = diagnose("attention", x.inputs, {"out": program(x)})
    assert result.verdict == "wrong"
    assert {m.name for m in result.mistakes if m.confirmed} & {*names}, result


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(40))
def test_a_right_kernel_is_not_accused(seed: int) -> None:
    x = drawn(seed)
    result = diagnose("attention", x.inputs, {"out": reordered(x)})
    assert result.verdict == "right", result
