// AVX512_BF16: products and conversions of bfloat16, and 2^x and log2 with the accuracy that bfloat16 needs.

#pragma once

#include "simd/vector_types.h"

namespace fusion {
namespace {

// sum + a.low * b.low + a.high * b.high per word. Subnormal operands and results are zero.
FUSION_INLINE Floats dot_brains(Floats sum, Words a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)a);
}

// Rounds two vectors to bfloat16 (nearest, ties to even), two per word, `low` in the lower half.
FUSION_INLINE Words brains_of(Floats low, Floats high) { return (Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

FUSION_INLINE Halves from_floats(Brain, Floats x) { return (Halves)_mm512_cvtneps_pbh((__m512)x); }

// Interleaves halves of low and high, one word per pair: words 4 i ... 4 i + 3 have the halves from 8 i on, or, with
// High, from 8 i + 4 on.
template <bool High> FUSION_INLINE Words unpack_halves(Words low, Words high) {
    return (Words)(High ? _mm512_unpackhi_epi16((__m512i)low, (__m512i)high)
                        : _mm512_unpacklo_epi16((__m512i)low, (__m512i)high));
}

// a * b - product, rounded once.
FUSION_INLINE Floats fused_difference(Floats a, Floats b, Floats product) {
    return (Floats)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)product);
}

// Mantissa in [0.75, 1.5) and exponent of x >= 0, with x = mantissa * 2^exponent; the exponent of 0 is -inf.
FUSION_INLINE Floats mantissa_of(Floats x, Floats &exponent) {
    const __m512 m = _mm512_getmant_ps((__m512)x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_nan);
    const __m512 floored = _mm512_getexp_ps((__m512)x);
    const __mmask16 below = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1.0f), _CMP_LT_OQ);
    exponent = (Floats)_mm512_mask_add_ps(floored, below, floored, _mm512_set1_ps(1.0f));
    return (Floats)m;
}

// x - floor(x)
FUSION_INLINE Floats fraction_of(Floats x) {
    return (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

}  // namespace
}  // namespace fusion
