// Declarations for the functions of tensors and executors in libnnopbase.
#pragma once

#include "capi/handles.h"

namespace fusion::capi {

// Sets a tensor's address; throws and changes nothing if the memory there is too small.
void move(Handle tensor, void *data, const Call &call, const char *param = "tensor");

}  // namespace fusion::capi
