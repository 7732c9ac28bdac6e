"""The modules of torch_npu (torch_npu.npu, profiler, testing, ...), and of other packages for the chip."""
