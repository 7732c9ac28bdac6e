"""`python -m tests.judging`, which measures the fractions of named faults and of rejected right results."""

import re
import runpy
import sys

import pytest
import torch
from support.drawn_faults import LOW, Roundings
from support.sources import ROOT


def test_simulated_rounding_errors_have_the_requested_size() -> None:
    x = torch.rand(1 << 17) + 1
    with Roundings(1.5, 0):
        rounded = x.to(torch.float16)
    assert rounded.dtype == LOW
    of_one = torch.finfo(LOW).eps / 12**0.5
    size = float((rounded.double() - x).square().mean().sqrt()) / of_one
    assert abs(size - 1.5) < 6 * 1.5 / (2 * len(x)) ** 0.5  # six standard deviations of the mean


@pytest.mark.parametrize("noise", ["1", "1.5"])
def test_program_prints_counts_of_named_faults_and_accused_results(
    noise: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--faults", "2", "--right", "2", "--noise", noise])
    runpy.run_path(str(ROOT / "tests" / "judging" / "__main__.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"2 faults: \d named first, \d of \d with their parameters, 0 named wrongly", lines[-2])
    assert lines[-1] == "2 right results: 0 accused"
