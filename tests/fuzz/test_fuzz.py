"""Random calls of every family, compared with formulas; the slow test draws new calls in every run."""

import sys
import time
from collections.abc import Iterable

import pytest

from .core import FAMILIES, description, drawn, judge

EVERYDAY = 30


def run(family: str, numbers: Iterable[int], describe: bool = False) -> None:
    """Judges calls by number; the error of the first wrong call has the command that replays it."""
    for number in numbers:
        call = drawn(family, number)
        if describe:
            sys.stdout.write(f"\n{family} {number}\n{description(call.about)}\n")
        try:
            judge(call)
        except Exception as error:
            again = f"{sys.executable} -m tests.fuzz {family} {number}"
            text = f"{type(error).__name__}: {error}\n{description(call.about)}\nagain: {again}"
            raise AssertionError(f"call {number} of {family}: {text}") from error


@pytest.mark.parametrize("family", FAMILIES)
def test_few_random_calls_match_formulas(family: str) -> None:
    run(family, range(EVERYDAY))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_random_calls_match_formulas(
    family: str, calls: range, noted: list[str], pytestconfig: pytest.Config
) -> None:
    start = time.perf_counter()
    noted.append(f"hostile: {family}: {len(calls)} calls from --seed {calls.start}")
    run(family, calls, bool(pytestconfig.getoption("--describe", False)))
    noted[-1] += f", {time.perf_counter() - start:.0f} s"
