"""Cases for judging attention: hostile operands, the golden answer, the measure of error, and the comparison.

    case = Case(layout="TND", q_len=(3, 8), kv_len=(5, 12), sparse_mode=3, mask="compressed")
    args = arguments(case)
    check(case.id, run(lowered(case, args), args["dy"], "cpu"), expected(case, args))

Tolerances are never tuned: errors are measured in the size that roundings give them (docs/accuracy.md).
"""

from __future__ import annotations

from fusion_attention.testing.cases import Case, arguments, hostile, in_band, part, poisoned, seen, stats_part
from fusion_attention.testing.compare import check, compare
from fusion_attention.testing.expected import expected, expected_of
from fusion_attention.testing.plain import plain
from fusion_attention.testing.python_calls import call_interface, golden, lowered, pythonic, run
from fusion_attention.testing.tiles import cut_tiles

__all__ = [
    "Case",
    "arguments",
    "call_interface",
    "check",
    "compare",
    "cut_tiles",
    "expected",
    "expected_of",
    "golden",
    "hostile",
    "in_band",
    "lowered",
    "part",
    "plain",
    "poisoned",
    "pythonic",
    "run",
    "seen",
    "stats_part",
]
