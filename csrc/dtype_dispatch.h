// Macros and templates for tables of kernels with one entry per operand format, and for the names of entry points; for
// the files that are compiled once per variant.

#pragma once

#include "data/problem.h"
#include "simd/vector_types.h"

namespace fusion {
namespace {

// Calls body(T{}) with the storage type of a dtype. If the variant has kernels of Pair, no kernel of Single is compiled
// for bfloat16, which never uses it.
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

// The only exported function of a file: FUSION_VARIANT_ENTRY with the suffix of its part.
#define FUSION_JOIN(entry, suffix) entry##suffix
#define FUSION_SUFFIX(entry, suffix) FUSION_JOIN(entry, suffix)
#define FUSION_ENTRY(suffix) FUSION_SUFFIX(FUSION_VARIANT_ENTRY, suffix)
