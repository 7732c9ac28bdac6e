"""The mutations of the backward on GPUs; part of mutations.py's."""

from mutant import package

TESTS = "kernels/test_backward.py"
BACKWARD = [
    package("Triton: a tile that ends behind the last key is whole", "backends/triton/dense/backward.py",
          "(end < j0 + BN)", "(end < j0)", f"{TESTS}::test_rows_by_descriptors"),
    package("Triton: float16's dS overflows", "backends/triton/dense/backward.py",
          "tl.where(tl.load(large + b * heads + hk) > 0, SHRINK, 1.0)", "1.0 + 0.0 * b",
          f"{TESTS}::test_a_scaled_loss_overflows_no_gradient_of_a_score"),
    package("Triton: notes of rows start anywhere", "backends/triton/dense/launch.py",
          "return -(-extents.q_len // _NOTES) * _NOTES", "return extents.q_len",
          f"{TESTS}::test_rows_by_descriptors"),
    package("Triton: a descriptor steps over no head", "backends/triton/common/layout_table.py",
          "bool((view.stride_head >= view.dim).all())", "True",
          f"{TESTS}::test_gradients_that_no_descriptor_describes"),
    package("Triton: edges wrap around", "backends/triton/common/kernels.py",
          "tl.minimum(tl.maximum(lo, -q_len), kv_len), tl.minimum(tl.maximum(hi, -q_len), kv_len)", "lo, hi",
          f"{TESTS}::test_edges_as_far_away_as_they_may_be"),
    package("Triton: lse's gradient of the other sign", "backends/triton/dense/backward.py",
          "delta -= tl.load(dlse", "delta += tl.load(dlse", f"{TESTS}::test_gradients_through_lse"),
    package("golden: lse's gradient of the other sign", "backends/golden/attention.py",
          "delta = delta - grads.dlse", "delta = delta + grads.dlse",
          "training/test_lse_gradient.py::test_gradients_through_lse"),
    package("lse's gradient of lists is left out", "ops/sparse/lowered_call.py",
          "dlse=None if self.dlse is None else self._ungrouped(self.dlse),", "dlse=None,",
          "training/test_lse_gradient.py::test_of_lists"),
]  # fmt: skip
