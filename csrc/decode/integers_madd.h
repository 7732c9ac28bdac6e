// Formats of quantised integers for AVX2, and AVX-512 without VNNI, with products of 16-bit numbers. A query row times
// its scales is rounded to 16-bit numbers, and so are the weights of a tile; sums are exact and have the bits of
// integers_avx512.h.
//
// Elements of a key are widened to 16 bits by shifts and by products with 1 and 0, which more ports can do than
// permutations of bytes.

#pragma once

#include "decode/operand_formats.h"

namespace fusion {
namespace {
namespace decode {

// Operations on 16-bit numbers: shifts, sums of products of adjacent pairs, conversions from all bytes or the even
// ones.
#if defined(__AVX512F__)
typedef __m256i HalfVector;
FUSION_INLINE Words shift_left(Words x, int bits) { return (Words)_mm512_slli_epi16((__m512i)x, bits); }
FUSION_INLINE Words shift_right(Words x, int bits) { return (Words)_mm512_srai_epi16((__m512i)x, bits); }
FUSION_INLINE Ints multiply_pairs(Words a, Words b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
FUSION_INLINE Words widen_bytes(HalfVector x) { return (Words)_mm512_cvtepi8_epi16(x); }
FUSION_INLINE Words even_bytes(Words x) { return (Words)_mm512_maddubs_epi16(_mm512_set1_epi16(1), (__m512i)x); }
#else
typedef __m128i HalfVector;
FUSION_INLINE Words shift_left(Words x, int bits) { return (Words)_mm256_slli_epi16((__m256i)x, bits); }
FUSION_INLINE Words shift_right(Words x, int bits) { return (Words)_mm256_srai_epi16((__m256i)x, bits); }
FUSION_INLINE Ints multiply_pairs(Words a, Words b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
FUSION_INLINE Words widen_bytes(HalfVector x) { return (Words)_mm256_cvtepi8_epi16(x); }
FUSION_INLINE Words even_bytes(Words x) { return (Words)_mm256_maddubs_epi16(_mm256_set1_epi16(1), (__m256i)x); }
#endif

struct Integer {
    using Sum = Ints;
    using Weight = std::uint32_t;
    using Digit = std::int16_t;  // numbers of query rows have one digit
    static constexpr int depth = 2, digits = 1, raised = 0;
    static constexpr float most_weight = 32767.0f;
    static constexpr bool integer = true, separate = lanes == 8, signed_weights = true;

    static FUSION_INLINE Ints dot(Ints sum, Words elements, Words numbers) {
        sum += multiply_pairs(elements, numbers);
        __asm__("" : "+v"(sum));  // else gcc adds products to each other first and spills them
        return sum;
    }
    static FUSION_INLINE Ints product(Words elements, Words numbers) { return multiply_pairs(elements, numbers); }
    static FUSION_INLINE Ints added(Ints sum, Words elements, Words numbers) { return dot(sum, elements, numbers); }
    static FUSION_INLINE Ints weigh(Ints sum, Weight a, Words b) { return dot(sum, b, all(a)); }
    static constexpr float unit = 1.0f;
    static constexpr std::int32_t rounding = 0;
    static FUSION_INLINE Ints joined(const Ints *digits, int) { return digits[0]; }
    static FUSION_INLINE Floats total(Ints sum) { return __builtin_convertvector(sum, Floats); }
#if defined(__AVX512F__)
    static FUSION_INLINE Ints rounded(Floats x) { return (Ints)_mm512_cvtps_epi32((__m512)x); }
    static FUSION_INLINE void store_elements(Weight *row, std::int64_t at, Floats low, Floats high) {
        store(row + at / 2, _mm512_cvtepi32_epi16((__m512i)rounded(low)));
        store(row + at / 2 + lanes / 2, _mm512_cvtepi32_epi16((__m512i)rounded(high)));
    }
#else
    static FUSION_INLINE Ints rounded(Floats x) { return (Ints)_mm256_cvtps_epi32((__m256)x); }
    static FUSION_INLINE void store_elements(Weight *row, std::int64_t at, Floats low, Floats high) {
        const __m256i turned = _mm256_packs_epi32((__m256i)rounded(low), (__m256i)rounded(high));
        store(row + at / 2, _mm256_permute4x64_epi64(turned, 0xd8));
    }
#endif
};

struct Byte : Integer {
    static constexpr int elements = 4, parts = 2;  // even elements, odd elements
    static constexpr Storage stored = Storage::int8;
    static constexpr int largest = 128;
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns; }

    static FUSION_INLINE void split(Words x, Words (&slice)[parts]) {
        slice[0] = even_bytes(x);
        slice[1] = shift_right(x, 8);
    }
    static FUSION_INLINE void read(const char *from, Words (&slice)[parts]) { split(repeat<8>(from), slice); }
    static FUSION_INLINE void columns(const char *const *rows, std::int64_t from, Words &x, Words &y) {
        const Words a = widen_bytes(load<HalfVector>(rows[0] + from)),
                    b = widen_bytes(load<HalfVector>(rows[1] + from));
#if defined(__AVX512F__)
        x = (Words)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
        y = (Words)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#else
        x = (Words)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
        y = (Words)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
#endif
    }
    static FUSION_INLINE void order(Floats &x, Floats &y) { order_turns<4>(x, y); }
};

struct Nibble : Integer {
    static constexpr int elements = 8, parts = 4;  // parts of 16 bits, lowest elements first
    static constexpr Storage stored = Storage::int4;
    static constexpr int largest = 8;
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns / 2; }

    static FUSION_INLINE void split(Words x, Words (&slice)[parts]) {
        FUSION_UNROLL for (int i = 0; i < parts; ++i) slice[i] = shift_right(shift_left(x, 12 - 4 * i), 12);
    }
    static FUSION_INLINE void read(const char *from, Words (&slice)[parts]) { split(repeat<8>(from), slice); }
    static FUSION_INLINE void columns(const char *const *rows, std::int64_t from, Words &x, Words &y) {
#if defined(__AVX512F__)
        const __m128i a = load<__m128i>(rows[0] + from), b = load<__m128i>(rows[1] + from);
        const Words widened = widen_bytes(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
#else
        const __m128i a = _mm_loadu_si64(rows[0] + from), b = _mm_loadu_si64(rows[1] + from);
        const Words widened = widen_bytes(_mm_unpacklo_epi8(a, b));
#endif
        x = shift_right(shift_left(widened, 12), 12);
        y = shift_right(widened, 4);
    }
    static FUSION_INLINE void order(Floats &x, Floats &y) { order_turns<1>(x, y); }
};

}  // namespace decode
}  // namespace
}  // namespace fusion
