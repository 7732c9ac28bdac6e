"""Cases for judging attention: hostile operands, the golden answer, the measure of error, and the comparison.

    case = Case(layout="TND", q_len=(3, 8), kv_len=(5, 12), sparse_mode=3, mask="compressed")
    args = arguments(case)
    check(case, run(lowered(case, args), args["dy"], "cpu"), golden(case, args), plain(case, args))

Tolerances are never tuned: an error may be as large as a straightforward program's, times a fixed factor.
"""

from __future__ import annotations

from fusion_attention.testing.cases import Case, arguments, hostile, in_band, part, poisoned, seen, stats_part
from fusion_attention.testing.compare import check, compare, epsilon
from fusion_attention.testing.faces import call_face, golden, lowered, pythonic, run
from fusion_attention.testing.plain import plain
from fusion_attention.testing.tiles import cut_tiles

__all__ = [
    "Case",
    "arguments",
    "call_face",
    "check",
    "compare",
    "cut_tiles",
    "epsilon",
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
