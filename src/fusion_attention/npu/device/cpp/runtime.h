#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace fusion_npu {

// A device of npu, if there is one of that number; otherwise an error that says which there are.
c10::Device known(c10::Device asked);

// Whether torch is told that there is a device.
void set_present(bool there);

// Gives npu's operators their kernels; how many there are.
int64_t register_operators();

}  // namespace fusion_npu
