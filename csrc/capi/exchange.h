// Converts a call's arguments to Python objects for fusion_attention.capi.entry; requires Python's lock.
#pragma once

#include <cstddef>
#include <string>

#include "capi/handles.h"
#include "capi/python.h"

namespace fusion::capi {

// The bytes that a tensor's elements span, from its address on; end is 0 without elements, and where the type has no
// whole bytes. Throws a Refusal that names the parameter where no memory could be as large.
struct Span {
    std::size_t begin, end;
};
Span span_of(const Tensor &tensor, const char *param);

// A tensor at `data` (its first element's place) as (DLPack capsule), or as (capsule or None, data type, format) where
// one of the latter is unusual.
PyObject *exchanged(const Python &py, const Tensor &tensor, void *data, const std::string &device);

}  // namespace fusion::capi
