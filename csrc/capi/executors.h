// What libnnopbase's functions for tensors and those for executors share.
#pragma once

#include "capi/handles.h"

namespace fusion::capi {

// Lays a tensor over other memory; refused, and nothing changed, where that does not hold it.
void move(Handle tensor, void *data, const Call &call, const char *param = "tensor");

}  // namespace fusion::capi
