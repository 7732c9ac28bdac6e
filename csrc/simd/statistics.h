// What every forward does to a row's peak and sum of weights before it stores them.

#pragma once

#include "simd/vec.h"

namespace fusion {
namespace {

// One more logit in a row's denominator; returns by what all that was summed before shrinks.
FUSION_INLINE float join_sink(float sink, float &peak, float &sum) {
    if (sum != sum) return 1.0f;
    const float top = sink > peak ? sink : peak, fade = peak == top ? 1.0f : __builtin_expf(peak - top);
    sum = sum * fade + (sink == top ? 1.0f : __builtin_expf(sink - top));
    if (sink == -infinity && top == -infinity) sum = 0.0f;
    peak = top;
    return fade;
}

// A score less its row's saved maximum: rounded as that was, so that their difference is exact. A maximum that others
// computed may lie bits below: beyond 2^29 one of them is worth more than a weight can hold.
FUSION_INLINE Floats below_peak(Floats score, Floats peak) {
    const Floats apart = rounded(score) - peak;
    const Floats most = peak * peak > Floats{} + 0x1p58f ? Floats{} : Floats{} + infinity;
    return apart > most ? most : apart;
}

// A NaN among the scores makes both NaN, a peak of +inf the sum alone. Of one row, or a vector of them.
template <class V> FUSION_INLINE void mark_nan(V &peak, V &sum) {
    const V nan = V{} + __builtin_nanf("");
    peak = sum == sum ? peak : nan;
    sum = peak == V{} + infinity ? nan : sum;
}

}  // namespace
}  // namespace fusion
