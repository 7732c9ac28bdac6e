#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace fusion_npu {

// Returns a device of npu with a number; the current device of this thread if none is given. Raises an error for a
// number that no device has.
c10::Device checked_device(c10::Device device);

// Sets the number of devices; 0 deactivates npu. On a host all devices share one memory; otherwise they are CUDA's.
void set_count(int64_t devices);

// Registers the profiler's clock of npu: the host's, or CUDA's.
void register_profiler();

// Registers the fallback as the kernel of npu's operators; returns their number.
int64_t register_operators();

}  // namespace fusion_npu
