"""The mutations fit the sources that they change, and name tests that exist."""

import ast
import re
from functools import cache

from mutants import CORE_TEST, MUTANTS, ROOT, misfit


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def is_test(name: str) -> bool:
    file, _, function = name.partition("::")
    return name == CORE_TEST or re.search(rf"^def {function}\(", text_of(file), re.MULTILINE) is not None


def test_mutants_match_their_sources_and_name_existing_tests() -> None:
    for mutant in MUTANTS:
        source = text_of(mutant.file)
        assert misfit(mutant, source) is None, mutant.name
        assert mutant.old != mutant.new, mutant.name
        if mutant.file.endswith(".py"):
            ast.parse(source.replace(mutant.old, mutant.new), mutant.name)
        assert mutant.tests, mutant.name
        assert [name for name in mutant.tests if not is_test(name)] == [], mutant.name


def test_mutant_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 30
