// The functions of brain_avx512.h for Arm with BF16.
//
// BFDOT adds the two products to each other first, then to the sum, and rounds both additions to odd (EBF16 could
// change this; it is not used here). The last bit of a sum thus differs from AVX512_BF16, which rounds to nearest after
// each product; both errors are far below the precision of bfloat16.

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

FUSION_INLINE Floats floor_of(Floats x) { return (Floats)vrndmq_f32((float32x4_t)x); }

}  // namespace
}  // namespace fusion

#include "simd/exponent_portable.h"  // IWYU pragma: export
