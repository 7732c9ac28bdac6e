// AVX512_BF16: bfloat16 as products and conversions have them, and 2^x and log2 as exact as they need.

#pragma once

#include "simd/types.h"

namespace fusion {
namespace {

// sum + a's low half times b's + the same of the high halves. Subnormal numbers are zero, also as results.
FUSION_INLINE Floats dot_brains(Floats sum, Words a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)a);
}

// To nearest, ties to even; two halves to a word, low first.
FUSION_INLINE Words brains_of(Floats low, Floats high) { return (Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

FUSION_INLINE Halves from_floats(Brain, Floats x) { return (Halves)_mm512_cvtneps_pbh((__m512)x); }

// Halves of low and high in turns, one word for each: words 4 i ... 4 i + 3 are of halves from 8 i on, or (High) 8 i
// + 4.
template <bool High> FUSION_INLINE Words unpack_halves(Words low, Words high) {
    return (Words)(High ? _mm512_unpackhi_epi16((__m512i)low, (__m512i)high)
                        : _mm512_unpacklo_epi16((__m512i)low, (__m512i)high));
}

// a * b - product, rounded once.
FUSION_INLINE Floats fused_difference(Floats a, Floats b, Floats product) {
    return (Floats)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)product);
}

// x >= 0 is 2^exponent times a mantissa from 0.75 on and below 1.5; of 0 the exponent is -inf.
FUSION_INLINE Floats mantissa_of(Floats x, Floats &exponent) {
    const __m512 m = _mm512_getmant_ps((__m512)x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_nan);
    const __m512 whole = _mm512_getexp_ps((__m512)x);
    const __mmask16 below = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1.0f), _CMP_LT_OQ);
    exponent = (Floats)_mm512_mask_add_ps(whole, below, whole, _mm512_set1_ps(1.0f));
    return (Floats)m;
}

// x - floor(x)
FUSION_INLINE Floats fraction_of(Floats x) {
    return (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

}  // namespace
}  // namespace fusion
