"""Translation from Python to JavaScript: functions give equal results, and unsupported Python is an error."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quickjs

from fusion_attention.explorer import python_to_javascript, violations
from fusion_attention.explorer.page import page, rules
from fusion_attention.explorer.python_to_javascript import Program, Untranslatable
from fusion_attention.explorer.visible import MODES

RUNTIME = Path(python_to_javascript.__file__).parent / "runtime.js"
LIMIT = 7
TABLE = {"a": 1, "b": 2}


@dataclass(frozen=True)
class Pair:
    left: int
    right: tuple[int, ...] = (3,)

    def total(self, more: int = 0) -> int:
        return self.left + sum(self.right) + more

    @classmethod
    def doubled(cls, left: int) -> "Pair":
        return cls(right=(left, left), left=2 * left)


def numbers(a: int, b: int) -> list[Any]:
    return [a + b, a - b, a * b, a // 3, a % 5, -a // 4, -a % 4, abs(-a), min(a, b), max(a, b, LIMIT), int(a > b)]


def chains(a: int, b: int) -> list[Any]:
    truths = [0 <= a < b, a < b <= LIMIT, not a, a is None, b in (1, 2, 3), a not in [b]]
    return [*truths, a or b, a and b, a if a > b else b]


def texts(a: int, b: int) -> list[Any]:
    words = [f"{n}" for n in range(a, b)]
    return [f"{a} and {b!r}", ", ".join(words), "x" * a, str([a, b]), repr((a,)), repr("it's"), f"{None} {a == b}"]


def slices(a: int, b: int) -> list[Any]:
    results = list(range(a + b))
    results[-1] = 99
    parts = [results[1:], results[:-1], results[-2:], results[-1]]
    return [*parts, len(results), [*results, a], "text"[1:3], (a, b) == (b, a)]


def loops(a: int, b: int) -> list[Any]:
    total = 0
    for i, n in enumerate([a, b, 3]):
        if n == 2:
            continue
        total += i * n
    pairs = [x * y for x in range(a) for y in range(b) if (x + y) % 2]
    lists: list[int] = []
    lists.append(total)
    return [total, pairs, lists, sum(pairs), any(n > 3 for n in pairs), all(n < 9 for n in pairs), sorted([b, a, 2])]


def choices(a: int, b: int) -> str:
    match a:
        case 0:
            return "none"
        case 1 | 2 if b > a:
            return "few"
        case _:
            return "many"


def arrays(a: int, b: int) -> list[Any]:
    x = np.array([a, b, 4, 0])
    y = np.zeros_like(x)
    y[:] = x + 1
    y[-1] = 50
    z = np.clip(np.where(x > 2, x, -y), -3, 9)
    lists = [y.tolist(), z.tolist(), (x - y).tolist(), np.flatnonzero(x).tolist(), np.maximum(x, 2).tolist()]
    numbers = [bool((x > b).any()), int(x.max(initial=9)), int(np.argmax(x > 2)), np.ndim(x), int(x.sum())]
    return [*lists, *numbers, ((x > 1) & (x < 5)).tolist()]


def objects(a: int, b: int) -> list[Any]:
    pair = Pair(a)
    other = Pair.doubled(b)
    merged = {**TABLE, "c": a} | {"a": b}
    return [pair.total(), other.total(a), pair == Pair(a, (3,)), other.left, [merged[k] for k in merged], "b" in TABLE]


@pytest.mark.parametrize("function", [numbers, chains, texts, slices, loops, choices, arrays, objects])
def test_translated_javascript_returns_the_same_as_python(function: Any) -> None:
    program = Program()
    name = program.name(function)
    context = quickjs.Context()
    context.eval(RUNTIME.read_text(encoding="utf-8") + program.text)
    for a, b in ((0, 3), (1, 2), (2, 2), (3, 1), (5, 7), (9, 4)):
        assert json.loads(context.eval(f"JSON.stringify({name}({a}, {b}))")) == json.loads(json.dumps(function(a, b)))


def tries(a: int) -> int:
    try:
        return a
    finally:
        a += 1


def formats(a: int) -> str:
    return f"{a:>3}"


def takes_any(*a: int) -> int:
    return len(a)


def whiles(a: int) -> int:
    while a > 3:
        a -= 1
    return a


@pytest.mark.parametrize("function", [tries, formats, takes_any, whiles])
def test_untranslatable_python_raises(function: Any) -> None:
    with pytest.raises(Untranslatable):
        Program().name(function)


def test_explorer_page_is_one_file_without_external_resources() -> None:
    text = page()
    assert len(text.encode()) < 500_000
    assert not [
        word for word in ("http://", "https://", "@import", "url(") if word in text.replace("http://www.w3.org", "")
    ]
    assert "/* rules */" not in text
    assert "/* script */" not in text
    assert page() is text


def test_javascript_runtime_defines_all_functions_used_by_rules() -> None:
    context = quickjs.Context()
    context.eval(rules())
    used = set(re.findall(r"\b(?:py|np)\.\w+", rules()))
    assert [name for name in used if context.eval(f"typeof {name} === 'undefined'")] == []


def test_explorer_includes_the_mask_rules() -> None:
    """A renamed rule would disappear from the page."""
    checks = {
        interface: [rule.check for rule in violations.rules_of(two[1], interface)]
        for interface, two in violations.OPERATORS.items()
    }
    assert [any("packed_window" in check for check in result) for result in checks.values()] == [True, False, True]
    assert "prefix_fits(prefix, q_len, kv_len)" in checks["training"]
    padded = [rule.check for rule in violations.rules_of(violations.OPERATORS["training"][0], "training")]
    assert any("dense_window" in check for check in padded)
    assert "atten_mask is not None" in padded
    assert sum("mask_fits" in check for check in checks["inference"]) == 3
    assert any("meets(" in check for check in checks["inference"])
    assert any("one_token" in check for check in checks["inference"])
    assert len(MODES) == 11
