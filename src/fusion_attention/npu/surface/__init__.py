"""The modules of torch_npu (torch_npu.npu, profiler, testing, ...) and of other Python packages for Ascend NPUs."""
