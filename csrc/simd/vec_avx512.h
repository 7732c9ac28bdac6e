// Functions of vec_portable.h with instructions of AVX-512.

#pragma once

#include "simd/vector_types.h"

namespace fusion {
namespace {

// x rounded to float32: prevents the compiler from fusing the product with a following addition.
FUSION_INLINE Floats rounded(Floats x) {
    __asm__("" : "+v"(x));
    return x;
}

FUSION_INLINE float sum_of(Floats x) { return _mm512_reduce_add_ps((__m512)x); }

FUSION_INLINE float largest_of(Floats x) { return _mm512_reduce_max_ps((__m512)x); }

FUSION_INLINE bool any(Words x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0; }

// Lane i is yes[i] if bit i is set, else no[i].
FUSION_INLINE Floats pick(std::uint32_t bits, Floats yes, Floats no) {
    return (Floats)_mm512_mask_blend_ps((__mmask16)bits, (__m512)no, (__m512)yes);
}

// Bit i is set if lane i of a comparison is true.
FUSION_INLINE std::uint32_t mask_of(Ints condition) {
    return _mm512_test_epi32_mask((__m512i)condition, (__m512i)condition);
}

// Stores the lanes whose bits are set contiguously; may write a complete vector.
FUSION_INLINE void compress(std::int32_t *to, Ints x, std::uint32_t bits) {
    store(to, (Ints)_mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), (__m512i)x));
}

FUSION_INLINE Floats root(Floats x) { return (Floats)_mm512_sqrt_ps((__m512)x); }

// p * 2^floor(x) for x <= 127; 0 if x < least_power, NaN for NaN.
FUSION_INLINE Floats scaled_by_power(Floats p, Floats x) {
    const __mmask16 some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least_power), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(some, (__m512)p, (__m512)x);
}

// 2^x for x <= 127 to a relative error of 2e-7, or 8e-8 with degree 6; 0 if x < least_power, NaN for NaN.
template <int degree = 5> FUSION_INLINE Floats exp2(Floats x) {
    // Minimax polynomials of the relative error that are exact at 0, the first also just below 1, because the weight of
    // the only key of a row is 1. The instructions for x - floor(x) and p * 2^floor(x) are also correct for -inf.
    const Floats r = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    constexpr float c[][7] = {
        {1.0f, 6.931517124e-1f, 2.401592880e-1f, 5.581867695e-2f, 8.990994655e-3f, 1.879318617e-3f},
        {1.0f, 6.931470e-1f, 2.4022952e-1f, 5.5484153e-2f, 9.678064e-3f, 1.2440877e-3f, 2.1715024e-4f}};
    Floats p = all(c[degree - 5][degree]);
    FUSION_UNROLL for (int i = degree - 1; i >= 0; --i) p = p * r + all(c[degree - 5][i]);
    return scaled_by_power(p, x);
}

FUSION_INLINE Words widen(Halves x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x); }

FUSION_INLINE Floats to_floats(Half, Halves x) { return (Floats)_mm512_cvtph_ps((__m256i)x); }

FUSION_INLINE Halves from_floats(Half, Floats x) {
    return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

FUSION_INLINE void transpose(Words (&r)[lanes]) {
    // Half of the steps interleave within 128 bits, which more ports can do than permutations of complete registers.
    // Four rows at a time, so that all live values fit into registers.
    __m512i t[lanes];
    FUSION_UNROLL for (int i = 0; i < lanes; i += 4) {
        const __m512i low = _mm512_unpacklo_epi32((__m512i)r[i], (__m512i)r[i + 1]);
        const __m512i high = _mm512_unpackhi_epi32((__m512i)r[i], (__m512i)r[i + 1]);
        const __m512i low_after = _mm512_unpacklo_epi32((__m512i)r[i + 2], (__m512i)r[i + 3]);
        const __m512i high_after = _mm512_unpackhi_epi32((__m512i)r[i + 2], (__m512i)r[i + 3]);
        t[i] = _mm512_unpacklo_epi64(low, low_after);
        t[i + 1] = _mm512_unpackhi_epi64(low, low_after);
        t[i + 2] = _mm512_unpacklo_epi64(high, high_after);
        t[i + 3] = _mm512_unpackhi_epi64(high, high_after);
    }
    FUSION_UNROLL for (int i = 0; i < 4; ++i) {  // 128 bits of four rows per step
        const __m512i even = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88),
                      odd = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        const __m512i even_low = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
        r[i] = (Words)_mm512_shuffle_i32x4(even, even_low, 0x88);
        r[i + 4] = (Words)_mm512_shuffle_i32x4(odd, odd_low, 0x88);
        r[i + 8] = (Words)_mm512_shuffle_i32x4(even, even_low, 0xdd);
        r[i + 12] = (Words)_mm512_shuffle_i32x4(odd, odd_low, 0xdd);
    }
}

}  // namespace
}  // namespace fusion
