"""Replays one call in pytest, with poisoned memory: python -m tests.fuzz FAMILY NUMBER [CALLS]."""

import sys
from pathlib import Path

import pytest

from .core import FAMILIES

HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3) or arguments[0] not in FAMILIES or not all(a.isdigit() for a in arguments[1:]):
        sys.stderr.write(f"usage: python -m tests.fuzz FAMILY NUMBER [CALLS]; families: {', '.join(FAMILIES)}\n")
        return 2
    family, number, count = [*arguments, "1"][:3]
    describe = ["--describe", "-s"] if count == "1" else []
    test = f"{HERE / 'test_fuzz.py'}::test_many_random_calls_match_formulas[{family}]"
    return int(pytest.main([test, "-m", "", "-q", "--tb=short", "--calls", count, "--seed", number, *describe]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
