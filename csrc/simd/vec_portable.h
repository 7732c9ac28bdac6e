// The functions of vec_avx512.h for SSE, AVX2 and NEON, mostly in portable vector types; AVX2 uses vec_avx2.h for many.

#pragma once

#include "simd/vector_types.h"
#if defined(__AVX2__) && defined(__F16C__)
#define FUSION_AVX2
#include "simd/vec_avx2.h"  // IWYU pragma: export
#endif

namespace fusion {
namespace {

// x rounded to float32: prevents the compiler from fusing the product with a following addition.
FUSION_INLINE Floats rounded(Floats x) {
#if defined(FUSION_TILES_MODEL)
    __asm__("" : "+m"(x));  // wider than a register
#elif defined(__x86_64__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

// Lane i is yes[i] if bit i is set, else no[i].
FUSION_INLINE Floats pick(std::uint32_t bits, Floats yes, Floats no) {
    const Words bit = all(std::uint32_t{1}) << (Words)lane_numbers();
    return (all(bits) & bit) != 0 ? yes : no;
}

// Stores the lanes whose bits are set contiguously; may write a complete vector.
FUSION_INLINE void compress(std::int32_t *to, Ints x, std::uint32_t bits) {
    for (; bits; bits &= bits - 1) *to++ = x[__builtin_ctz(bits)];
}

// 2^x for x <= 127 to a relative error of 2e-7, or 8e-8 with degree 6; 0 if x < least_power, NaN for NaN.
template <int degree = 5> FUSION_INLINE Floats exp2(Floats x) {
    // Adding `magic`, 1.5 * 2^23 + 126, rounds x to the nearest integer n, because the spacing of float32 is 1 there;
    // the lowest bits are n + 126, the exponent of 2^(n - 1).
    const Floats magic = all(12583038.0f), shifted = x + magic;
    const Floats r = x - (shifted - magic);
    // Twice minimax polynomials of the relative error that are exact at 0.
    constexpr float c[][7] = {
        {2.0f, 2 * 6.931470037e-1f, 2 * 2.402224243e-1f, 2 * 5.550733581e-2f, 2 * 9.671512991e-3f, 2 * 1.326472731e-3f},
        {2.0f, 2 * 6.931472e-1f, 2 * 2.4022648e-1f, 2 * 5.5503324e-2f, 2 * 9.618437e-3f, 2 * 1.3398875e-3f,
         2 * 1.5353362e-4f}};
    Floats p = all(c[degree - 5][degree]);
    FUSION_UNROLL for (int i = degree - 1; i >= 0; --i) p = p * r + all(c[degree - 5][i]);
    return x < all(least_power) ? Floats{} : p * (Floats)((Ints)shifted << 23);
}

#if !defined(FUSION_AVX2)
FUSION_INLINE float sum_of(Floats x) {
    float elements[lanes];
    store(elements, x);
    for (int n = lanes / 2; n; n /= 2) {
        for (int i = 0; i < n; ++i) elements[i] += elements[i + n];
    }
    return elements[0];
}

FUSION_INLINE float largest_of(Floats x) {
    float elements[lanes];
    store(elements, x);
    for (int n = lanes / 2; n; n /= 2) {
        for (int i = 0; i < n; ++i) elements[i] = elements[i] > elements[i + n] ? elements[i] : elements[i + n];
    }
    return elements[0];
}

FUSION_INLINE bool any(Words x) {
    std::uint32_t joined = 0;
    for (int i = 0; i < lanes; ++i) joined |= x[i];
    return joined != 0;
}

// Bit i is set if lane i of a comparison is true.
FUSION_INLINE std::uint32_t mask_of(Ints condition) {
    std::uint32_t mask = 0;
    for (int i = 0; i < lanes; ++i) mask |= static_cast<std::uint32_t>(condition[i] != 0) << i;
    return mask;
}

FUSION_INLINE Floats root(Floats x) {
#if defined(__SSE__) && !defined(__AVX__) && !defined(FUSION_TILES_MODEL)
    return (Floats)_mm_sqrt_ps((__m128)x);
#elif defined(__aarch64__)
    return (Floats)vsqrtq_f32((float32x4_t)x);
#else
    for (int i = 0; i < lanes; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

FUSION_INLINE Words widen(Halves x) { return __builtin_convertvector(x, Words); }

FUSION_INLINE Floats to_floats(Half, Halves x) {
#if defined(__aarch64__)
    return (Floats)vcvt_f32_f16((float16x4_t)x);
#else
    const Words widened = widen(x);
    const Words magnitude = (widened & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
    Floats out = floats_of(magnitude + (112u << 23));
    out = exponent == 0x0f800000 ? floats_of(magnitude + (224u << 23)) : out;                      // inf, NaN
    out = exponent == 0 ? floats_of(magnitude + (113u << 23)) - floats_of(all(113u << 23)) : out;  // subnormal
    return floats_of(bits_of(out) | (widened & 0x8000) << 16);
#endif
}

#if !defined(__aarch64__)
FUSION_INLINE std::uint16_t half_of(float value) {
    std::uint32_t x, out;
    std::memcpy(&x, &value, 4);
    const std::uint32_t sign = x & 0x80000000u;
    x ^= sign;
    if (x >= 143u << 23) {
        out = x > 255u << 23 ? 0x7e00 : 0x7c00;  // NaN, or too large
    } else if (x < 113u << 23) {                 // subnormal: an addition rounds it to the last bit
        const std::uint32_t magic = 126u << 23;
        float a, b;
        std::memcpy(&a, &x, 4);
        std::memcpy(&b, &magic, 4);
        a += b;
        std::memcpy(&x, &a, 4);
        out = x - magic;
    } else {
        out = (x - (112u << 23) + 0xfff + (x >> 13 & 1)) >> 13;
    }
    return static_cast<std::uint16_t>(out | sign >> 16);
}
#endif

FUSION_INLINE Halves from_floats(Half, Floats x) {
#if defined(__aarch64__)
    return (Halves)vcvt_f16_f32((float32x4_t)x);
#else
    Halves out;
    for (int i = 0; i < lanes; ++i) out[i] = half_of(x[i]);
    return out;
#endif
}

template <int... I> FUSION_INLINE Words interleave_low(Words a, Words b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / 2 + I % 2 * lanes)...);
}
template <int... I> FUSION_INLINE Words interleave_high(Words a, Words b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / 2 + lanes / 2 + I % 2 * lanes)...);
}

FUSION_INLINE void transpose(Words (&r)[lanes]) {
    using Lanes = std::make_integer_sequence<int, lanes>;
    FUSION_UNROLL for (int stage = 1; stage < lanes; stage *= 2) {
        Words t[lanes];
        FUSION_UNROLL for (int i = 0; i < lanes / 2; ++i) {
            t[2 * i] = interleave_low(r[i], r[i + lanes / 2], Lanes{});
            t[2 * i + 1] = interleave_high(r[i], r[i + lanes / 2], Lanes{});
        }
        FUSION_UNROLL for (int i = 0; i < lanes; ++i) r[i] = t[i];
    }
}
#endif

}  // namespace
}  // namespace fusion
