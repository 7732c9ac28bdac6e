// Functions of vec_portable.h with single instructions of AVX2 and F16C; results have the same bits.

#pragma once

#include "simd/vector_types.h"

namespace fusion {
namespace {

FUSION_INLINE __m128 low_half(Floats x) { return _mm256_castps256_ps128((__m256)x); }
FUSION_INLINE __m128 high_half(Floats x) { return _mm256_extractf128_ps((__m256)x, 1); }

FUSION_INLINE float sum_of(Floats x) {
    const __m128 four = _mm_add_ps(low_half(x), high_half(x));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

FUSION_INLINE float largest_of(Floats x) {
    const __m128 four = _mm_max_ps(low_half(x), high_half(x));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

FUSION_INLINE bool any(Words x) { return _mm256_testz_si256((__m256i)x, (__m256i)x) == 0; }

FUSION_INLINE std::uint32_t mask_of(Ints condition) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps((__m256)condition));
}

FUSION_INLINE Floats root(Floats x) { return (Floats)_mm256_sqrt_ps((__m256)x); }

// An intrinsic, because GCC 12 splits a conversion of vector types into halves.
FUSION_INLINE Words widen(Halves x) { return (Words)_mm256_cvtepu16_epi32((__m128i)x); }

FUSION_INLINE Floats to_floats(Half, Halves x) { return (Floats)_mm256_cvtph_ps((__m128i)x); }

FUSION_INLINE Halves from_floats(Half, Floats x) {
    return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}

FUSION_INLINE void transpose(Words (&r)[lanes]) {
    // Two thirds of the steps interleave within 128 bits and take one cycle; those across 128 bits take three.
    __m256i t[lanes];
    FUSION_UNROLL for (int i = 0; i < lanes; i += 4) {
        const __m256i low = _mm256_unpacklo_epi32((__m256i)r[i], (__m256i)r[i + 1]);
        const __m256i high = _mm256_unpackhi_epi32((__m256i)r[i], (__m256i)r[i + 1]);
        const __m256i low_after = _mm256_unpacklo_epi32((__m256i)r[i + 2], (__m256i)r[i + 3]);
        const __m256i high_after = _mm256_unpackhi_epi32((__m256i)r[i + 2], (__m256i)r[i + 3]);
        t[i] = _mm256_unpacklo_epi64(low, low_after);
        t[i + 1] = _mm256_unpackhi_epi64(low, low_after);
        t[i + 2] = _mm256_unpacklo_epi64(high, high_after);
        t[i + 3] = _mm256_unpackhi_epi64(high, high_after);
    }
    FUSION_UNROLL for (int i = 0; i < 4; ++i) {
        r[i] = (Words)_mm256_permute2x128_si256(t[i], t[i + 4], 0x20);
        r[i + 4] = (Words)_mm256_permute2x128_si256(t[i], t[i + 4], 0x31);
    }
}

}  // namespace
}  // namespace fusion
