"""Faults of backward kernels are named, with their parameters; mistakes whose results overflow are not."""

from dataclasses import replace

import pytest
from support.planted_gradients import FAULTS, planted

from fusion_attention.judging.judge import judged

SEEDS = 5


@pytest.mark.sampled(80)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, seed: int) -> None:
    call, names, words = planted(fault, seed)
    result = judged(call, search=True, backends=False)
    assert result.verdict == "wrong"
    confirmed = [m for m in result.mistakes if m.confirmed]
    assert {m.name for m in confirmed[:1]} & {*names}, result
    assert any(m.name in names and all(word in m.detail for word in words) for m in confirmed), result


def test_different_faults_of_two_gradients_are_both_named() -> None:
    call, *_ = planted("dv of another head", 0)
    grads = {**call.outputs, "dq": 2 * call.outputs["dq"]}
    result = judged(replace(call, outputs=grads), search=True, backends=False)
    assert {(m.name, m.outputs) for m in result.mistakes} == {("output-factor", ("dq",)), ("rows-moved", ("dv",))}
    assert "dq: output-factor" in str(result)
    assert "dv: rows-moved" in str(result)
