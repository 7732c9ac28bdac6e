"""The mutations of windows pooled to compressed keys, and of attention to them; part of mutations.py's."""

from __future__ import annotations

from mutant import core, package

KERNEL, LAUNCH = "backends/triton/windows/kernel.py", "backends/triton/windows/launch.py"
CASES = "kernels/test_pooling.py::test_results_and_gradients"
UNBOUNDED = "kernels/test_pooling.py::test_what_is_not_finite_reaches_what_it_reaches_in_float64"
PLANTED = "judging/test_planted_compressed.py::test_mistakes_of_the_compressor"
RIGHT = "judging/test_planted_compressed.py::test_every_call_of_the_example_is_right"
CHIP, LISTED = "npu/test_shared_keys.py", "npu/test_listed_keys.py"
STATE = "sparse/test_pooling.py::test_several_calls_of_the_compressor_go_on_from_its_state"
POOLING = [
    package("Triton: halves of a window are exchanged", KERNEL,
          "half * DIM + d, ((position", "(HALVES - 1 - half) * DIM + d, ((position", CASES),
    package("Triton: the first row of a sequence is not pooled", KERNEL,
          "((position < RATIO) & (row >= 0))", "((position < RATIO) & (row > 0))", CASES),
    package("Triton: a window's sum keeps its first maximum", KERNEL, "total * tl.exp(top - base)", "total", CASES),
    package("Triton: an infinite value times a weight of 0", KERNEL,
          "tl.where(lasting, x, weights * x)", "weights * x", UNBOUNDED),
    package("Triton: the gradient of a bias forgets a range", KERNEL,
          "tl.minimum(per, results - split * per)", "tl.minimum(per, results - split * per - 1)", CASES),
    package("Triton: rows of no window keep their gradients", LAUNCH, "view.keep[0].zero_()", "view.keep[0]", CASES),
    package("the judge pools rows before a sequence", "judging/pooling.py",
          "and first == 0 and not self.wrapped", "and first == 0 and self.wrapped", RIGHT, PLANTED),
    package("the judge sums a bias's gradient over one head", "judging/pooling.py",
          "t.double().sum(0))", "t.double()[0])",
          "judging/test_planted_compressed.py::test_the_gradient_of_a_bias_is_a_sum_over_heads"),
    package("any wrong result of pooling is explained", "judging/pooling.py",
          "if result.passes and all(", "if all(",
          "judging/test_planted_compressed.py::test_a_mistake_that_does_not_explain_all_errors_is_not_named"),
    package("compressed keys are visible a token late", "ops/compressed/lower.py",
          "tokens - q_len + 1", "tokens - q_len", "sparse/test_compressed.py::test_golden_against_autograd"),
    package("positions count from the keys that are left", "ops/compressed/lower.py",
          'kv_len if n["residual"] is None else n["c_len"] * n["ratio"] + n["residual"]', "kv_len",
          "sparse/test_compressed.py::test_positions_count_from_the_compressed_keys"),
    package("a row without keys keeps the sink", "ops/compressed/call.py",
          "self.call._clear_rows_without_keys(lse)", "lse.abs()", f"{CHIP}::test_rows_without_keys"),
    package("softmax_lse lacks the sum", "ops/compressed/call.py",
          "lse = top + total.log()", "lse = top + 0 * total.log()", f"{CHIP}::test_padded_rows_and_gradients"),
    package("padding rows are taken for the next sequence", "ops/compressed/definitions.py",
          "np.cumsum(room) - room if ends is None else np.asarray(ends[:-1], np.int64)",
          "np.cumsum(room) - room if ends is None else np.cumsum(room if used is None else used) - used",
          f"{CHIP}::test_packed_sequences_with_padding_rows"),
    package("probabilities of later entries are returned", "ops/compressed/probabilities.py",
          "& (entry >= 0).cumprod(-1).bool() & (entry < visible)", "& (entry >= 0).cumprod(-1).bool()",
          f"{CHIP}::test_the_norm_as_an_operator"),
    package("entries behind a count are read", "ops/compressed/call.py",
          "slots < counts[..., None]", "slots <= counts[..., None]",
          f"{LISTED}::test_lists_of_keys_and_their_gradients"),
    package("rows of an empty list see their sequence", "ops/compressed/call.py",
          "(end > first) & (self.second is not None)", "end > first",
          f"{LISTED}::test_lists_of_keys_and_their_gradients"),
    package("saved rows of windows do not alternate", "ops/auxiliary/compressed_rows.py",
          ".transpose(1, 2).flatten(1, 2)", ".flatten(1, 2)", "acl/test_compressor.py::test_saved_rows_alternate"),
    package("a call begins with its own window", "ops/auxiliary/compressed_rows.py",
          "begin = max(start // ratio - (coff - 1), 0) * ratio", "begin = start // ratio * ratio", STATE),
    package("a ring keeps nothing of the last window", "ops/auxiliary/compressed_rows.py",
          "max(start, last - (coff - 1) * ratio)", "max(start, last)", STATE),
    core("core: both halves have the bias of the first", "sparse/pool.h",
         "problem.overlap ? size - previous * stride : 0", "problem.overlap ? -previous * stride : 0"),
    core("core: the second window has none before it", "sparse/pool.h",
         "problem.overlap && number > 0 ?", "problem.overlap && number > 1 ?"),
    core("core: an infinite row meets a weight of 0", "sparse/pool.h", "if (out[i] - out[i] != 0.0f) out[i] =",
         "if (out[i] - out[i] == 0.0f) out[i] ="),
    core("core: a bias has one position", "sparse/pool.h",
         "return {all_rows, stride, previous,", "return {all_rows, 0, previous,"),
    core("core: the last channels are not pooled", "sparse/pool.h",
         "if (d < window.problem.dim) body", "if (d < 0) body"),
    core("core: channels of no window keep their gradients", "plan/pool.cpp",
         "clear(rows, p.dtype, b, h, end - p.ratio, end, 0, p.dim);", ""),
    core("core: a sum over items skips the first", "plan/pool.cpp",
         "for (std::int64_t i = 0; i < items; ++i) {\n                const float *const from",
         "for (std::int64_t i = 1; i < items; ++i) {\n                const float *const from"),
]  # fmt: skip
