// Arm with BF16: the same functions as brain_avx512.h.
//
// BFDOT adds the two products to each other first, then to the sum, and rounds both to odd (a processor with EBF16 may
// be set otherwise; it is not here). So a sum's last bit is not that of AVX512_BF16, which rounds to nearest after
// each of two products; what both round off is far below what bfloat16 leaves.

#pragma once

#include "simd/vec_portable.h"

namespace fusion {
namespace {

FUSION_INLINE Floats dot_brains(Floats sum, Words a, Words b) {
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)b, (bfloat16x8_t)a);
}

FUSION_INLINE Words brains_of(Floats low, Floats high) {
    return (Words)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
}

FUSION_INLINE Halves from_floats(Brain, Floats x) { return (Halves)vcvt_bf16_f32((float32x4_t)x); }

template <bool High> FUSION_INLINE Words unpack_halves(Words low, Words high) {
    return (Words)(High ? vzip2q_u16((uint16x8_t)low, (uint16x8_t)high)
                        : vzip1q_u16((uint16x8_t)low, (uint16x8_t)high));
}

FUSION_INLINE Floats fused_difference(Floats a, Floats b, Floats product) {
    return (Floats)vfmaq_f32((float32x4_t)-product, (float32x4_t)a, (float32x4_t)b);
}

FUSION_INLINE Floats mantissa_of(Floats x, Floats &exponent) {
    const Ints bits = (Ints)x, above = bits - 0x3f400000;  // 0.75
    const Ints whole = above >> 23;
    const Floats m = (Floats)(bits - (whole << 23));
    const auto normal = (x > Floats{}) & (x < all(infinity));  // of others the exponent alone is the logarithm
    exponent = normal ? __builtin_convertvector(whole, Floats) : x == Floats{} ? all(-infinity) : x;
    return normal ? m : all(1.0f);
}

FUSION_INLINE Floats fraction_of(Floats x) { return x - (Floats)vrndmq_f32((float32x4_t)x); }

FUSION_INLINE Floats scaled_by_power(Floats p, Floats x) {
    const Floats whole = (Floats)vrndmq_f32((float32x4_t)larger(all(-127.0f), x));
    const Ints n = __builtin_convertvector(whole, Ints);
    return x < all(least_power) ? Floats{} : p * (Floats)((n + 127) << 23);
}

}  // namespace
}  // namespace fusion
