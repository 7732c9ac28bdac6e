#pragma once

#include <cstdint>

namespace fusion_npu {

// Whether torch is told that there is a device.
void set_present(bool there);

// Gives npu's operators their kernels; how many there are.
int64_t register_operators();

}  // namespace fusion_npu
