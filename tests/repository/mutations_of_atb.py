"""The mutations of functions by ATB's names, of the loss, and of sparse attention over int8; part of mutations.py's."""

from mutant import package

ATB = [
    package("a mask's line is read that is another row's", "npu/auxiliary/atb.py",
          "(ends - rows)[:, None]", "ends[:, None]",
          "npu/test_atb.py::test_rows_over_pages"),
    package("1 in a mask leaves a key", "ops/auxiliary/atb.py",
          "return (mask > 0) | (mask <= HIDDEN)", "return mask <= HIDDEN",
          "npu/test_atb.py::test_packed_rows"),
    package("rows behind the last sequence are written", "npu/auxiliary/atb_call.py",
          'given["out"][:rows].copy_(result)', 'given["out"].zero_()[:rows].copy_(result)',
          "npu/test_atb.py::test_rows_behind_the_last_sequence_stay"),
    package("a smoothed loss leaves out the weights of classes", "npu/auxiliary/losses.py",
          "spread = log_prob if weight is None else log_prob * weight", "spread = log_prob",
          "npu/test_cross_entropy.py::test_a_loss_and_its_gradient_are_torchs"),
    package("a negative scale is lost before the rectifier", "npu/auxiliary/quantised_sparse.py",
          '"key": key.float() * key_scale.float().unsqueeze(-1)',
          '"key": key.float() * key_scale.float().abs().unsqueeze(-1)',
          "sparse/test_quantised_sparse.py::test_the_indexer_chooses_what_the_formula_does"),
    package("pages that are left out move the others", "npu/auxiliary/quantised_sparse.py",
          "result = torch.searchsorted(used, table.clamp(0, pages - 1))", "result = table.clamp(0, len(used) - 1)",
          "sparse/test_quantised_sparse.py::test_attention_over_packed_bytes"),
    package("an error comes under the name of what computes", "npu/auxiliary/call.py",
          "replace(f, op=op.name, ", "replace(f, ",
          "npu/test_atb.py::test_what_is_wrong_is_said_and_nothing_is_written"),
]  # fmt: skip
