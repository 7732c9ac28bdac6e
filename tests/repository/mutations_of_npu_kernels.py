"""The mutations of device npu's own kernels; part of mutations.py's."""

from mutant import package

NPU_KERNELS = [
    package("weights that layers share part when a module moves to npu", "npu/device/cpp/kernels.cpp",
          "(dense(self.key_set()) && dense(from.key_set()))", "false",
          "npu/test_npu_kernels.py::test_a_module_that_moves_keeps_its_parameters",
          "integrations/test_npu_models.py::test_a_model_is_the_same_there"),
    package("npu counts integers as floats", "npu/device/cpp/kernels.cpp",
          "alias.to(at::kDouble)", "alias.to(at::kFloat)",
          "npu/test_npu_kernels.py::test_integers_are_counted"),
]  # fmt: skip
