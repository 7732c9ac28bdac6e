#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace fusion_npu {

// A device of npu, if there is one of that number; otherwise an error that says which there are. Without a number the
// current one of this thread.
c10::Device known(c10::Device asked);

// How many devices torch is told of; with 0 there is none. On a host they are numbers: all have the same memory. Where
// CUDA computes, they are CUDA's.
void set_count(int64_t devices);

// The profiler's clock of npu: the host's, or CUDA's.
void register_profiler();

// Gives npu's operators their kernels; how many there are.
int64_t register_operators();

}  // namespace fusion_npu
