// Random generators of device npu, which draw from the computing device's generators.
#pragma once

#include <ATen/core/Generator.h>

#include "storage_aliases.h"

namespace fusion_npu {

// Returns the computing device's generator that a generator of npu uses; a generator of another device is returned.
at::Generator behind(const at::Generator &generator);

// Returns the default generator of npu:index (on a host, all indices share one), and a new generator.
const at::Generator &default_generator(DeviceIndex index);
at::Generator new_generator(DeviceIndex index);

}  // namespace fusion_npu
