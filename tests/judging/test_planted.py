"""Kernels with well-known mistakes, correct ones and noisy ones: what the judge says of each.

The kernels are plain torch (tests/support/planted.py). A share drawn by seed runs every day, all of them when slow
tests do.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from support.planted import UNNAMED, made_unnamed
from support.planted_cache import planted_caches
from support.planted_cases import CAUSAL, Make, correct, noisy, planted

from fusion_attention.judging.judge import diagnose
from fusion_attention.judging.verdict import Judgement

PLANTED = [*planted(), *planted_caches()]
CORRECT = [*correct(), *planted_caches(False)]
NOISY = [*noisy()]


def judged(make: Make) -> tuple[str, Judgement]:
    capture = make()
    return capture.mistake, diagnose(capture.operator, capture.inputs, capture.outputs)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in PLANTED])
def test_the_mistake_is_named_first(make: Make) -> None:
    mistake, result = judged(make)
    assert result.verdict == "wrong"
    assert [m.name for m in result.mistakes][:1] == [mistake], result
    assert result.mistakes[0].confirmed


@pytest.mark.sampled(20)
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in CORRECT])
def test_nobody_is_accused(make: Make) -> None:
    _, result = judged(make)
    assert result.verdict == "right", result
    assert not result.mistakes


@pytest.mark.sampled(10)
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in NOISY])
def test_noise_is_called_noise(make: Make) -> None:
    _, result = judged(make)
    exact = result.grade in ("as exact as a program in bfloat16", "as exact as a program in float16")  # of few sums
    assert result.verdict == ("right" if exact else "noisy"), result
    assert not result.mistakes


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", UNNAMED)
def test_what_has_no_name_is_given_none(what: str, dtype: str) -> None:
    _, result = judged(partial(made_unnamed, replace(CAUSAL, dtype=dtype), what))
    assert result.verdict == "wrong", result
    assert not result.mistakes, result


def test_the_corpus_is_as_large_as_it_is_said_to_be() -> None:
    mistakes = Counter(name.rpartition("-")[0] for name, _ in PLANTED)
    assert len(PLANTED) >= 150
    assert len(CORRECT) == len(PLANTED)
    assert len(NOISY) == 20
    assert len(mistakes) >= 40
