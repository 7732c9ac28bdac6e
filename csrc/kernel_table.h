// Tables of kernels that are written once for every format; for the two files that are compiled once per variant.

#pragma once

#include "data/problem.h"
#include "simd/types.h"

namespace fusion {
namespace {

// body(T{}) with what elements of a dtype are stored as. Where there are kernels of Pair, bfloat16 never comes to
// Single, and no kernel is compiled for it.
template <class Format, class Body> FUSION_INLINE auto with_stored(Dtype dtype, Body body) {
    if constexpr (Format::depth == 2) {
        return body(Brain{});
    } else {
#if !defined(__AVX512BF16__)
        if (dtype == Dtype::bfloat16) return body(Brain{});
#endif
        return dtype == Dtype::float16 ? body(Half{}) : body(float{});
    }
}

}  // namespace
}  // namespace fusion

// A function that calls name<Format, T> of its arguments, of which the first is a job.
#define FUSION_KERNEL(name)                                                                                         \
    [](const auto &job, auto... arguments) {                                                                        \
        return with_stored<Format>(job.problem->dtype,                                                              \
                                   [&](auto stored) { return name<Format, decltype(stored)>(job, arguments...); }); \
    }
