// Random numbers on device npu are those of the device that computes.
#pragma once

#include <ATen/core/Generator.h>

#include "memory.h"

namespace fusion_npu {

// The generator of the device that computes behind one of npu; another stays as it is.
at::Generator behind(const at::Generator &generator);

// The default generator of npu, which is that of the device that computes (on a host one for all numbers), and a new
// one.
const at::Generator &default_generator(DeviceIndex index);
at::Generator new_generator(DeviceIndex index);

}  // namespace fusion_npu
