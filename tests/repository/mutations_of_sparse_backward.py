"""The mutations of Triton's backward over selected keys and of its sums per key; part of mutations.py's."""

from mutant import package

KERNELS, LAUNCH = "backends/triton/selected/backward.py", "backends/triton/selected/launch_backward.py"
FINITE, HIDDEN = "kernels/test_lists_not_finite.py", "test_what_a_weight_of_zero_hides_stays_hidden"
CASES = "kernels/test_sparse_backward.py::test_cases"
SPARSE_BACKWARD = [
    package("Triton: a key's sum begins anew with each chunk", "backends/triton/selected/key_sum.py",
          "acc = tl.load(at, mask=there, other=0.0)", "acc = tl.zeros([W], tl.float32)",
          "kernels/test_key_sum.py::test_rows_are_added_in_their_order_for_any_number_of_chunks",
          "kernels/test_sparse_backward.py::test_chunks_of_one_token_have_the_bits_of_one_chunk"),
    package("Triton: a key's sum serves the next key head too", "backends/triton/selected/selection.py",
          "id0 + j * step", "id0 + j", CASES),
    package("Triton: the last slot of a list is not met", "backends/triton/selected/selection.py",
          "tl.where((j >= 0) & there, FIRST + n + 1, 0)", "tl.where((j >= 0) & there, FIRST + n // 16 * 16, 0)", CASES),
    package("Triton: gradients of values are added to those of keys", LAUNCH,
          '"AT": starts[name] + first', '"AT": first', CASES),
    package("Triton: nobody notes scores that are not finite", KERNELS,
          'wild[:, None] | ~(tl.abs(s) < float("inf"))', "wild[:, None] & (s == s)", f"{FINITE}::{HIDDEN}"),
    package("Triton: a weight of 0 selects an infinity", "backends/triton/selected/recompute_gradients.py",
          "tl.where(weight != 0.0, weight.to(tl.float32) * x.to(tl.float32), 0.0)",
          "weight.to(tl.float32) * x.to(tl.float32)", f"{FINITE}::{HIDDEN}"),
    package("Triton: a weight that float16 does not hold meets no infinity", KERNELS,
          "tl.where(wild[:, None] & (weight < LEAST), LEAST, weight)", "weight",
          f"{FINITE}::test_an_infinity_outlasts_a_weight_that_no_number_holds"),
]  # fmt: skip
