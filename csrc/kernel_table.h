// Tables of kernels that are written once for every format; for the files that are compiled once per variant,
// and the names of what these show.

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
#if !defined(FUSION_BRAIN_PRODUCTS)
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

// The one function that a file shows: FUSION_VARIANT_ENTRY with the part's suffix.
#define FUSION_JOIN(entry, suffix) entry##suffix
#define FUSION_SUFFIX(entry, suffix) FUSION_JOIN(entry, suffix)
#define FUSION_ENTRY(suffix) FUSION_SUFFIX(FUSION_VARIANT_ENTRY, suffix)
