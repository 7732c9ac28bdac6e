// Formats of quantised integers for AVX512_VNNI. A query row times its scales is rounded to 16-bit numbers, each of two
// signed bytes (digits), for scores; so are the weights of a tile for values. Sums are exact.
//
// `largest` is the largest magnitude of an element; `raised` is added to elements before they are multiplied by digits
// of a query row, because one operand of the instruction is unsigned.

#pragma once

#include "decode/operand_formats.h"

namespace fusion {
namespace {
namespace decode {

struct Integer {
    using Sum = Ints;
    using Weight = std::uint32_t;
    using Digit = std::int8_t;
    static constexpr int depth = 2, digits = 2;
    static constexpr float most_weight = 32767.0f;
    static constexpr bool integer = true, separate = false, signed_weights = true;

    static FUSION_INLINE Ints weigh(Ints sum, Weight a, Words b) {
        return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)b, (__m512i)all(a));
    }
    static FUSION_INLINE Ints dot(Ints sum, Words positive, Words digits) {
        return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)positive, (__m512i)digits);
    }
    // The same as inline assembly, because gcc would copy sums between registers.
    static FUSION_INLINE Ints added(Ints sum, Words positive, Words digits) {
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(positive), "v"(digits));
        return sum;
    }
    // Combines the sums of a row's digits, `apart` vectors from each other, to that of its numbers, in units of `unit`.
    static constexpr float unit = 1.0f;
    static constexpr std::int32_t rounding = 0;  // added to the lowest sum
    static FUSION_INLINE Ints joined(const Ints *digits, int apart) { return (digits[0] << 8) + digits[apart]; }
    static FUSION_INLINE Floats total(Ints sum) { return __builtin_convertvector(sum, Floats); }
    static FUSION_INLINE Ints rounded(Floats x) { return (Ints)_mm512_cvtps_epi32((__m512)x); }
    static FUSION_INLINE void store_elements(Weight *row, std::int64_t at, Floats low, Floats high) {
        char *to = reinterpret_cast<char *>(row) + at * 2;
        store(to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)low)));
        store(to + 32, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)high)));
    }
};

struct Byte : Integer {
    static constexpr int elements = 4, parts = 1;  // parts: vectors into which a vector of a row is split
    static constexpr Storage stored = Storage::int8;
    static constexpr int largest = 128, raised = 128;
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns; }

    static FUSION_INLINE void split(Words x, Words (&slice)[parts]) { slice[0] = x ^ 0x80808080u; }
    static FUSION_INLINE void read(const char *from, Words (&slice)[parts]) {  // eight words, twice
        slice[0] = (Words)_mm512_broadcast_i64x4(_mm256_xor_si256(load<__m256i>(from), _mm256_set1_epi8(-128)));
    }
    static FUSION_INLINE void columns(const char *const *rows, std::int64_t from, Words &x, Words &y) {
        const __m256i a = load<__m256i>(rows[0] + from), b = load<__m256i>(rows[1] + from);
        x = (Words)_mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(a, b));
        y = (Words)_mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(a, b));
    }
    static FUSION_INLINE void order(Floats &x, Floats &y) { order_turns<8>(x, y); }
};

struct Nibble : Integer {
    static constexpr int elements = 8, parts = 2;  // even elements, odd elements
    static constexpr Storage stored = Storage::int4;
    static constexpr int largest = 8, raised = 8;
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns / 2; }

    static FUSION_INLINE void split(Words x, Words (&slice)[parts]) {
        const Words positive = x ^ 0x88888888u;
        slice[0] = positive & 0x0f0f0f0fu;
        slice[1] = positive >> 4 & 0x0f0f0f0fu;
    }
    static FUSION_INLINE void read(const char *from, Words (&slice)[parts]) { split(repeat<8>(from), slice); }
    static FUSION_INLINE void columns(const char *const *rows, std::int64_t from, Words &x, Words &y) {
        const __m128i a = load<__m128i>(rows[0] + from), b = load<__m128i>(rows[1] + from);
        const __m512i widened =
            _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
        x = (Words)_mm512_srai_epi16(_mm512_slli_epi16(widened, 12), 12);
        y = (Words)_mm512_srai_epi16(widened, 4);
    }
    static FUSION_INLINE void order(Floats &x, Floats &y) { order_turns<1>(x, y); }
};

// Queries and weights with the precision of float32: 24-bit numbers of three digits. Weights are unsigned, because
// values are signed; a word has the same digit of the weights of four keys.
struct FineSum {
    Ints high, rest[2];
};
struct FineWeight {
    std::uint32_t low, middle, high, none;
};

template <class Coarse> struct Fine : Coarse {
    using Sum = FineSum;
    using Weight = FineWeight;
    static constexpr int depth = 4, digits = 3;
    static constexpr float most_weight = 16776960.0f;  // below 2^24 by more than rounding adds
    static constexpr bool signed_weights = false;

    // Sums are stored in 32 bits without as many lowest bits as an element has.
    static constexpr float unit = Coarse::largest;
    static constexpr std::int32_t rounding = Coarse::largest / 2;
    static FUSION_INLINE Ints joined(const Ints *digits, int apart) {
        constexpr int bits = __builtin_ctz(Coarse::largest);
        return (digits[0] << (16 - bits)) + (digits[apart] << (8 - bits)) + (digits[2 * apart] >> bits);
    }
    static FUSION_INLINE FineSum weigh(const FineSum &sum, const FineWeight &a, Words b) {
        return {Coarse::added(sum.high, all(a.high), b),
                {Coarse::added(sum.rest[0], all(a.middle), b), Coarse::added(sum.rest[1], all(a.low), b)}};
    }
    static FUSION_INLINE Floats total(const FineSum &sum) {
        return __builtin_convertvector(sum.high, Floats) * 65536.0f +
               __builtin_convertvector((sum.rest[0] << 8) + sum.rest[1], Floats);
    }
    static FUSION_INLINE void store_elements(FineWeight *row, std::int64_t at, Floats low, Floats high) {
        store_numbers(row + at / 4, low);
        store_numbers(row + at / 4 + 4, high);
    }
    static FUSION_INLINE void columns(const char *const *rows, std::int64_t from, Words &x, Words &y) {
        columns(static_cast<Coarse *>(nullptr), rows, from, x, y);
    }
    static FUSION_INLINE void order(Floats &x, Floats &y) { order(static_cast<Coarse *>(nullptr), x, y); }

private:
    // Stores the digits of four keys contiguously.
    static FUSION_INLINE void store_numbers(FineWeight *to, Floats x) {
        const __m128i turns = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        store(to, _mm512_shuffle_epi8((__m512i)Coarse::rounded(x), _mm512_broadcast_i32x4(turns)));
    }
    // Words with bytes of four keys: x for the first and third four columns of a vector, y for the second and fourth.
    static FUSION_INLINE void columns(Byte *, const char *const *rows, std::int64_t from, Words &x, Words &y) {
        const __m256i a = load<__m256i>(rows[0] + from), b = load<__m256i>(rows[1] + from);
        const __m256i c = load<__m256i>(rows[2] + from), d = load<__m256i>(rows[3] + from);
        const __m256i low[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpacklo_epi8(c, d)};
        const __m256i high[2] = {_mm256_unpackhi_epi8(a, b), _mm256_unpackhi_epi8(c, d)};
        x = both(_mm256_unpacklo_epi16(low[0], low[1]), _mm256_unpackhi_epi16(low[0], low[1]));
        y = both(_mm256_unpacklo_epi16(high[0], high[1]), _mm256_unpackhi_epi16(high[0], high[1]));
    }
    static FUSION_INLINE void columns(Nibble *, const char *const *rows, std::int64_t from, Words &x, Words &y) {
        const __m128i a = load<__m128i>(rows[0] + from), b = load<__m128i>(rows[1] + from);
        const __m128i c = load<__m128i>(rows[2] + from), d = load<__m128i>(rows[3] + from);
        const __m256i ab = _mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b));
        const __m256i cd = _mm256_set_m128i(_mm_unpackhi_epi8(c, d), _mm_unpacklo_epi8(c, d));
        const Words pairs = both(_mm256_unpacklo_epi16(ab, cd), _mm256_unpackhi_epi16(ab, cd));
        x = sign(pairs);
        y = sign(pairs >> 4);
    }
    static FUSION_INLINE Words both(__m256i low, __m256i high) {
        return (Words)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    static FUSION_INLINE Words sign(Words nibbles) {
        const Words raised = (nibbles & 0x0f0f0f0fu) ^ 0x08080808u;
        return (Words)_mm512_sub_epi8((__m512i)raised, _mm512_set1_epi8(8));
    }
    static FUSION_INLINE void order(Byte *, Floats &x, Floats &y) {
        const Floats a = x, b = y;
        x = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        y = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    // Quarters of columns are in the order of bytes 0 to 3, 8 to 11, 4 to 7 and 12 to 15 of a row.
    static FUSION_INLINE void order(Nibble *, Floats &x, Floats &y) {
        x = middle_turned(x), y = middle_turned(y);
        order_turns<1>(x, y);
    }
    static FUSION_INLINE Floats middle_turned(Floats x) {
        return __builtin_shufflevector(x, x, 0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
    }
};

}  // namespace decode
}  // namespace
}  // namespace fusion
