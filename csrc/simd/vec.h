// The vector layer: vector_types.h, the functions of each instruction set, and functions built from both.

#pragma once

#include "simd/vector_types.h"  // IWYU pragma: export
#if defined(__AVX512F__)
#include "simd/vec_avx512.h"  // IWYU pragma: export
#else
#include "simd/vec_portable.h"  // IWYU pragma: export
#endif
#if defined(__AVX512BF16__)
#include "simd/brain_avx512.h"  // IWYU pragma: export
#elif defined(FUSION_TILES_MODEL)
#include "simd/brain_model.h"  // IWYU pragma: export
#elif defined(FUSION_BRAIN_PRODUCTS)
#include "simd/brain_neon.h"  // IWYU pragma: export
#endif

namespace fusion {
namespace {

// One step of sums over vectors: combines those lanes of a and b whose number has the bit `half` (Upper) or not.
template <int half, bool Upper, int... I>
FUSION_INLINE Floats folded(Floats a, Floats b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, ((I & half ? lanes : 0) + (I & ~half) + (Upper ? half : 0))...);
}

template <int half, class Join> FUSION_INLINE void fold(Floats *x, Join join) {
    using Lanes = std::make_integer_sequence<int, lanes>;
    FUSION_UNROLL for (int i = 0; i < half; ++i) {
        x[i] = join(folded<half, false>(x[i], x[i + half], Lanes{}), folded<half, true>(x[i], x[i + half], Lanes{}));
    }
    if constexpr (half > 1) fold<half / 2>(x, join);
}

// Lane i is sum_of(x[i]), with the same bits.
FUSION_INLINE Floats sums_of(Floats (&x)[lanes]) {
    fold<lanes / 2>(x, [](Floats a, Floats b) __attribute__((always_inline)) { return a + b; });
    return x[0];
}

// Lane i is the maximum of the lanes of x[i]; with NaN among them, either NaN or one of the numbers.
FUSION_INLINE Floats maxima_of(Floats (&x)[lanes]) {
    fold<lanes / 2>(x, [](Floats a, Floats b) __attribute__((always_inline)) { return larger(a, b); });
    return x[0];
}

// `lanes` bits of a row of bits from bit `at` on, a multiple of lanes.
FUSION_INLINE std::uint32_t lane_bits(const std::uint8_t *row, std::int64_t at) {
    if constexpr (lanes == 16) {
        std::uint16_t bits;
        std::memcpy(&bits, row + at / 8, 2);  // only x86 has 16 lanes, and it is little endian
        return bits;
    }
    return row[at / 8] >> (at % 8);
}

// ------------------------------------------------------------------------------------------------------- conversions

FUSION_INLINE Floats to_floats(Brain, Halves x) { return floats_of(widen(x) << 16); }

#if !defined(FUSION_BRAIN_PRODUCTS)
FUSION_INLINE Halves from_floats(Brain, Floats x) { return upper_halves(x); }
#endif

// The first n elements of a row as floats, padded with zeros; n may exceed lanes or be negative.
FUSION_INLINE Floats load_floats(const float *from, std::int64_t n) {
    if (n >= lanes) return load<Floats>(from);
    Floats out = {};
    if (n > 0) std::memcpy(&out, from, n * 4);
    return out;
}
template <class T> FUSION_INLINE Halves load_halves(const T *from, std::int64_t n) {
    if (n >= lanes) return load<Halves>(from);
    Halves out = {};
    if (n > 0) std::memcpy(&out, from, n * 2);
    return out;
}
template <class T> FUSION_INLINE Floats load_floats(const T *from, std::int64_t n) {
    return to_floats(T{}, load_halves(from, n));
}

FUSION_INLINE void store_floats(float *to, Floats x, std::int64_t n) {
    if (n >= lanes) return store(to, x);
    std::memcpy(to, &x, n * 4);
}
template <class T> FUSION_INLINE void store_floats(T *to, Floats x, std::int64_t n) {
    const Halves out = from_floats(T{}, x);
    if (n >= lanes) return store(to, out);
    std::memcpy(to, &out, n * 2);
}

// Stores two vectors one after the other.
template <class T> FUSION_INLINE void store_both(T *to, Floats low, Floats high) {
    store_floats(to, low, lanes);
    store_floats(to + lanes, high, lanes);
}
#if defined(FUSION_BRAIN_PRODUCTS)
FUSION_INLINE void store_both(Brain *to, Floats low, Floats high) { store(to, brains_of(low, high)); }
#endif

// Stores n elements multiplied by a factor; `from` is padded to complete vectors.
template <class T> FUSION_INLINE void store_scaled(T *to, const float *from, std::int64_t n, float factor) {
    std::int64_t d = 0;
    for (; d + 2 * lanes <= n; d += 2 * lanes) {
        store_both(to + d, load<Floats>(from + d) * factor, load<Floats>(from + d + lanes) * factor);
    }
    for (; d < n; d += lanes) store_floats(to + d, load<Floats>(from + d) * factor, n - d);
}

}  // namespace
}  // namespace fusion
