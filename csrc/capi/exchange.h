// Converts a call's arguments to Python objects for fusion_attention.capi.entry; requires Python's lock.
#pragma once

#include <string>

#include "capi/handles.h"
#include "capi/python.h"

namespace fusion::capi {

// True if Python reads tensors of a type; else it gets their data type and format alone.
bool is_exchanged(int dtype);

// A tensor at `data` (its first element's place) as (DLPack capsule), or as (capsule or None, data type, format) where
// one of the latter is unusual.
PyObject *exchanged(const Python &py, const Tensor &tensor, void *data, const std::string &device);

}  // namespace fusion::capi
