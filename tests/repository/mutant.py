"""What a mutation is, and the kinds of sources that they change."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old`, found exactly once in `file`, becomes `new`; every one of `tests` must then fail.

    Args:
        name: a line of what breaks, as --table prints it.
        file: below the root.
        tests: "tests/test_x.py::test_y"; of a kernel's file "tests/kernels/..."; of csrc "make test-core".
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def package(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """A mutation of the package."""
    return Mutant(name, f"src/fusion_attention/{file}", old, new, tuple(f"tests/{test}" for test in tests))


def capi(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """A mutation of the C API's libraries, which are built anew for it."""
    return Mutant(name, f"csrc/capi/{file}", old, new, tuple(f"tests/capi/{test}" for test in tests))


def core(name: str, file: str, old: str, new: str) -> Mutant:
    """A mutation of the native core, which its own test without Python judges."""
    return Mutant(name, f"csrc/{file}", old, new, ("make test-core",))
