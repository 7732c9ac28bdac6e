"""Faults of tiled kernels, of caches and of lists are named, with their parameters; right results are not accused."""

from __future__ import annotations

from types import ModuleType

import pytest
from support import planted_decodes, planted_lists, planted_tiles

from fusion_attention.judging.judge import diagnose

SEEDS = 5
MODULES = (planted_tiles, planted_decodes, planted_lists)
FAULTS = [(module, fault) for module in MODULES for fault in module.FAULTS]


@pytest.mark.sampled(40)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize(("module", "fault"), [pytest.param(*f, id=f[1]) for f in FAULTS])
def test_a_fault_is_named(module: ModuleType, fault: str, seed: int) -> None:
    capture, names, words = module.planted(fault, seed)
    result = diagnose(capture.operator, capture.inputs, capture.outputs)
    assert result.verdict == "wrong"
    confirmed = [m for m in result.mistakes if m.confirmed]
    assert {m.name for m in confirmed[:1]} & {*names}, result
    assert any(m.name in names and all(word in m.detail for word in words) for m in confirmed), result


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("module", MODULES, ids=["tiles", "caches", "lists"])
def test_a_right_result_is_not_accused(module: ModuleType, seed: int) -> None:
    capture = module.right(seed)
    result = diagnose(capture.operator, capture.inputs, capture.outputs)
    assert result.verdict == "right", result
