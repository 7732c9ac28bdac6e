"""Defines a mutation, and the kinds of sources that mutations change."""

import re
from dataclasses import dataclass

_MARK = re.compile(r"\[-(.*?)-\]|\{\+(.*?)\+\}", re.DOTALL)


@dataclass(frozen=True)
class Mutant:
    """`old`, found exactly once in `file`, becomes `new`; each of `tests` must then fail.

    Args:
        name: the fault in one line, as --list prints it.
        file: path below the root.
        tests: "tests/test_x.py::test_y"; for a kernel's file "tests/kernels/..."; for csrc "make test-core".
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def tree(name: str, file: str, edit: str, *tests: str) -> Mutant:
    """A mutation of a file below the root; edit: a text of it, marked like git's word diff: [-removed-]{+added+}."""
    return Mutant(name, file, _MARK.sub(r"\1", edit), _MARK.sub(r"\2", edit), tests)


def package(name: str, file: str, edit: str, *tests: str) -> Mutant:
    return tree(name, f"src/fusion_attention/{file}", edit, *(f"tests/{test}" for test in tests))


def capi(name: str, file: str, edit: str, *tests: str) -> Mutant:
    """A mutation of the C API's libraries, which are built anew for it."""
    return tree(name, f"csrc/capi/{file}", edit, *(f"tests/capi/{test}" for test in tests))


def core(name: str, file: str, edit: str) -> Mutant:
    """A mutation of the native core, tested by `make test-core` without Python."""
    return tree(name, f"csrc/{file}", edit, "make test-core")
