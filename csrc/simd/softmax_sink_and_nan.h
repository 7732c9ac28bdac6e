// The last steps of a row's softmax statistics (maximum and sum of weights) in every forward.

#pragma once

#include "simd/vec.h"

namespace fusion {
namespace {

// Adds the sink, a logit without a value, to a row's maximum and sum; returns the factor for earlier sums.
FUSION_INLINE float join_sink(float sink, float &peak, float &sum) {
    if (sum != sum) return 1.0f;
    const float top = sink > peak ? sink : peak, fade = peak == top ? 1.0f : __builtin_expf(peak - top);
    sum = sum * fade + (sink == top ? 1.0f : __builtin_expf(sink - top));
    if (sink == -infinity && top == -infinity) sum = 0.0f;
    peak = top;
    return fade;
}

// A score minus the saved maximum of its row, both rounded to float32, so that the difference is exact. A maximum from
// another implementation may be a few bits smaller; beyond 2^29 such a difference would overflow a weight and counts as
// 0.
FUSION_INLINE Floats below_peak(Floats score, Floats peak) {
    const Floats apart = rounded(score) - peak;
    const Floats most = peak * peak > Floats{} + 0x1p58f ? Floats{} : Floats{} + infinity;
    return apart > most ? most : apart;
}

// Sets maximum and sum to NaN if a score was NaN, and the sum to NaN if the maximum is +inf; for one row or a vector of
// rows.
template <class V> FUSION_INLINE void mark_nan(V &peak, V &sum) {
    const V nan = V{} + __builtin_nanf("");
    peak = sum == sum ? peak : nan;
    sum = peak == V{} + infinity ? nan : sum;
}

}  // namespace
}  // namespace fusion
