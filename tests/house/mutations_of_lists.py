"""The mutations of attention to lists on GPUs; part of mutations.py's."""

from __future__ import annotations

from mutant import house

FORWARD = "kernels/test_sparse_forward.py"
LISTS = [
    house("Triton: an entry behind the last block wraps around", "backends/triton/selection.py",
          "tl.minimum(entry, (end + (BLOCK - 1)) // BLOCK) * BLOCK", "entry * BLOCK",
          f"{FORWARD}::test_no_list_makes_a_row_read_outside"),
    house("Triton: a list goes on behind its end", "backends/triton/selection.py",
          "tl.where(entry < 0, n, SELECT)", "tl.where(entry < -1, n, SELECT)",
          f"{FORWARD}::test_cases"),
    house("Triton: slots behind the end of a list weigh as zeros do", "backends/triton/sparse_forward.py",
          "s = tl.where(there[None, :], s, -float(\"inf\"))", "s = tl.where(there[None, :], s, 0.0)",
          f"{FORWARD}::test_cases"),
    house("Triton: the page of the turn before, of a list", "backends/triton/sparse_forward.py",
          "key, page = key_next, page_next", "key, page = key_next, page", f"{FORWARD}::test_cases"),
    house("Triton: what no float holds weighs nothing in a list", "backends/triton/mend_lists.py",
          "p, outlasting(p), counted", "p, p, counted",
          f"{FORWARD}::test_infinite_values_outlast_weights_that_no_float_can_hold"),
]  # fmt: skip
