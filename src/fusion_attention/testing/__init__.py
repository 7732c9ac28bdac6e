"""Test cases for attention kernels: tensors in memory filled with NaN, float64 results, and the comparison with them.

    case = Case(layout="TND", q_len=(3, 8), kv_len=(5, 12), sparse_mode=3, mask="compressed")
    args = arguments(case)
    check(case.id, run(lowered(case, args), args["dy"], "cpu"), expected(case, args))

There are no tolerances: errors are compared with the expected size of rounding errors (docs/accuracy.md).
"""

from fusion_attention.testing.cases import Case, arguments, hostile, in_band, part, poisoned, seen, stats_part
from fusion_attention.testing.compare import check, compare
from fusion_attention.testing.expected import expected, expected_of
from fusion_attention.testing.mask_to_tiles import cut_tiles
from fusion_attention.testing.plain import plain
from fusion_attention.testing.run_case import call_interface, golden, lowered, pythonic, run

__all__ = [
    "Case", "arguments", "call_interface", "check", "compare", "cut_tiles", "expected", "expected_of", "golden",
    "hostile", "in_band", "lowered", "part", "plain", "poisoned", "pythonic", "run", "seen", "stats_part",
]  # fmt: skip
