"""The mutations of the forward on GPUs; part of mutations.py's."""

from mutant import package

DESCRIPTORS, GLUON = "kernels/test_backward.py", "backends/test_triton_gluon.py"
FORWARD = [
    package("Triton: the second part of rows is the first again", "backends/triton/common/kernels.py",
          "x1 = rows[1].load([j0, W0])", "x1 = rows[1].load([j0, 0])", f"{DESCRIPTORS}::test_high_tiles"),
    package("Triton: a descriptor of rows that overlap", "backends/triton/common/layout_table.py",
          "view.stride_token >= view.dim", "view.stride_token >= 0",
          f"{DESCRIPTORS}::test_rows_that_no_descriptor_describes"),
    package("Triton: the caller's allocator is overwritten", "backends/triton/common/launching.py",
          "contextvars.copy_context().run(self._start_with_scratch, given)", "self._start_with_scratch(given)",
          "backends/test_triton_launch.py::test_the_callers_allocator_stays"),
    package("Gluon: wgmma on a chip that has none", "backends/triton/dense/launch_gluon.py",
          "get_device_capability(device) == _CAPABILITY", "get_device_capability(device) >= _CAPABILITY",
          f"{GLUON}::test_other_chips_have_no_wgmma"),
    package("Gluon: no product overlaps the weighing of a tile", "backends/triton/dense/gluon_forward.py",
          "s = warpgroup_mma_wait(1, [s])", "s = warpgroup_mma_wait(0, [s])", f"{GLUON}::test_ahead"),
]  # fmt: skip
