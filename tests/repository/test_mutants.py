"""That the mutations still fit what they mutate, and that only a failing test counts as having caught one."""

import ast
import re

import pytest
from mutants import CORE_TEST, MUTANTS, ROOT, Run, misfit
from mutations import Mutant


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutation_fits_its_source_and_its_tests_exist(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert misfit(mutant, source) is None
    assert mutant.old != mutant.new
    mutated = source.replace(mutant.old, mutant.new)
    if mutant.file.endswith(".py"):
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)), "the same program"
    assert mutant.tests
    for name in mutant.tests:
        if name != CORE_TEST:
            file, function = name.split("::")
            assert re.search(rf"^def {function}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name


def test_every_mutation_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 30


@pytest.mark.parametrize(
    ("code", "text", "caught"),
    [
        (1, "FAILED tests/test_x.py::test_y - assert 1 == 2\n1 failed in 0.5s", True),
        (1, "1 variants, 37 failures", True),
        (0, "12 passed in 0.5s", False),
        (0, "1 variants, 0 failures", False),
        (2, "ERROR tests/test_x.py - ImportError\n!!! Interrupted: 1 error during collection !!!", False),
        (1, "ERROR tests/test_x.py::test_y - NameError\n1 passed, 1 error in 0.5s", False),
        (4, "ERROR: not found: tests/test_x.py::test_z", False),
        (5, "no tests ran in 0.1s", False),
        (-11, "Fatal Python error: Segmentation fault", False),
        (-9, "1 failed", False),
        (1001, "forward.h:3: error: expected ';'", False),
    ],
)
def test_only_a_failing_test_catches(code: int, text: str, caught: bool) -> None:
    assert Run(code, text, 0.0).failed is caught


def test_a_text_that_is_not_there_once_is_said() -> None:
    mutant = Mutant("name", "file.py", "a", "b", ("tests/test_x.py::test_y",))
    assert misfit(mutant, "b a b") is None
    assert misfit(mutant, "b") == "name: file.py has its text 0 times, not once: 'a'"
    assert misfit(mutant, "a a") == "name: file.py has its text 2 times, not once: 'a'"
