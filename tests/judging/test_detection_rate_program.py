"""`python -m tests.judging`, which measures the fractions of named faults and of rejected right results."""

import re
import runpy
import sys

import pytest
from support.sources import ROOT


def test_program_prints_counts_of_named_faults_and_accused_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--faults", "2", "--right", "2", "--noise", "1.5"])
    runpy.run_path(str(ROOT / "tests" / "judging" / "__main__.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"2 faults: \d named first, \d of \d with their parameters, 0 named wrongly", lines[-2])
    assert lines[-1] == "2 right results: 0 accused"
