"""The mutations fit the sources that they change, and name tests that exist."""

import ast
import re

import pytest
from mutant import Mutant
from mutants import CORE_TEST, MUTANTS, ROOT, misfit


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_matches_its_source_and_names_existing_tests(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert misfit(mutant, source) is None
    assert mutant.old != mutant.new
    if mutant.file.endswith(".py"):
        ast.parse(source.replace(mutant.old, mutant.new))
    assert mutant.tests
    for name in mutant.tests:
        if name != CORE_TEST:
            file, function = name.split("::")
            assert re.search(rf"^def {function}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name


def test_mutant_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 30
