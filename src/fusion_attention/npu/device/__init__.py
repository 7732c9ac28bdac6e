"""torch's device "npu": a device that is registered with torch, or another name of the CPU or CUDA device."""
