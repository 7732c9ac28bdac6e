// What a decode multiplies: rows as they lie in the cache (or staged as float32), eight to two elements per word.
//
// Scores: a vector holds `lanes / P` query rows times P words of their rows; a word of a query row meets P neighbouring
// words of a key, repeated for all query rows. So one load serves all rows, whatever their number, and sums over the P
// phases are added up once per `lanes` keys. Three or four rows of floats fill vectors of half the size by pairs, those
// of integers two vectors with twice the words: as many products, but half as many loads that repeat. Values: two keys'
// elements of 2 * lanes columns make two vectors of words, in an order of columns that is undone once per chunk.

#pragma once

#include "data/decode.h"
#include "simd/vec.h"

namespace fusion {
namespace {
namespace decode {

template <class V, int... I> FUSION_INLINE V pick_even(V a, V b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (2 * I)...);
}
template <class V, int... I> FUSION_INLINE V pick_odd(V a, V b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// sum[key], whose lanes are [query row][phase], becomes sum[query row], whose lanes are keys. N sums are left.
template <int Phases, int Rows, int N = lanes, class V> FUSION_INLINE void gather_keys(V (&sum)[lanes]) {
    using Lanes = std::make_integer_sequence<int, lanes>;
    if constexpr (Phases > 1) {
        FUSION_UNROLL for (int i = 0; i < N / 2; ++i) {
            sum[i] = pick_even(sum[2 * i], sum[2 * i + 1], Lanes{}) + pick_odd(sum[2 * i], sum[2 * i + 1], Lanes{});
        }
        gather_keys<Phases / 2, Rows, N / 2>(sum);
    } else if constexpr (Rows > 1) {
        V odd[N / 2];
        FUSION_UNROLL for (int i = 0; i < N / 2; ++i) {
            odd[i] = pick_odd(sum[2 * i], sum[2 * i + 1], Lanes{});
            sum[i] = pick_even(sum[2 * i], sum[2 * i + 1], Lanes{});
        }
        FUSION_UNROLL for (int i = 0; i < N / 2; ++i) sum[N / 2 + i] = odd[i];
        gather_keys<1, Rows / 2, N>(sum);
    }
}

// P words, repeated to fill a vector.
template <int P> FUSION_INLINE Words repeat(const char *from) {
    if constexpr (P == lanes) {
        return load<Words>(from);
#if defined(__AVX512F__)
    } else if constexpr (P == 8) {
        return (Words)_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
    } else if constexpr (P == 4) {
        return (Words)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#elif defined(__AVX2__)
    } else if constexpr (P == 4) {
        return (Words)_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#endif
    } else if constexpr (P == 2) {
        typedef std::uint64_t Doubles __attribute__((vector_size(lanes * 4)));
        std::uint64_t both;
        std::memcpy(&both, from, 8);
        return (Words)(both + Doubles{});
    } else if constexpr (P == 1) {
        std::uint32_t one;
        std::memcpy(&one, from, 4);
        return all(one);
    } else {
        Words out;
        for (int i = 0; i < lanes; i += P) std::memcpy(reinterpret_cast<char *>(&out) + 4 * i, from, 4 * P);
        return out;
    }
}

#if defined(__AVX512F__)
// Vectors of half the size: loads repeat four words in them without a shuffle, which costs as much as a third of a
// product where products are computed 256 bits at a time.
typedef float NarrowFloats __attribute__((vector_size(32)));
typedef std::uint32_t NarrowWords __attribute__((vector_size(32)));

FUSION_INLINE NarrowWords repeat_narrow(const char *from) {
    return (NarrowWords)_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

// The sums of four lanes each: of the first half of each vector, then of the second.
FUSION_INLINE NarrowFloats add_quads(const NarrowFloats *x) {
    const auto pair = [](NarrowFloats a, NarrowFloats b) __attribute__((always_inline)) {
        return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
               __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    };
    const NarrowFloats a = pair(x[0], x[1]), b = pair(x[2], x[3]);
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
#endif

// A format of one float per word.
struct Floating {
    using Sum = Floats;
    using Weight = float;
    static constexpr int depth = 1;     // keys per word of weights
    static constexpr int elements = 1;  // of a row, per word of it
    static constexpr bool integer = false;
    static constexpr Storage stored = Storage::float32;
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns * 4; }

    static FUSION_INLINE Floats dot(Floats sum, Words a, Words b) { return sum + floats_of(a) * floats_of(b); }
#if defined(__AVX512F__)
    static FUSION_INLINE NarrowFloats dot(NarrowFloats sum, NarrowWords a, NarrowWords b) {
        return sum + (NarrowFloats)a * (NarrowFloats)b;
    }
#endif
    static FUSION_INLINE Floats weigh(Floats sum, float a, Words b) { return sum + all(a) * floats_of(b); }
    static FUSION_INLINE void columns(const char *row, const char *, Words &x, Words &y) {
        x = load<Words>(row);
        y = load<Words>(row + lanes * 4);
    }
    static FUSION_INLINE void store_elements(Weight *row, std::int64_t at, Floats low, Floats high) {
        store(row + at, low);
        store(row + at + lanes, high);
    }
    static FUSION_INLINE void order(Floats &, Floats &) {}
};

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

template <int... I> FUSION_INLINE Floats both(Floats a, Floats b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, I...);
}

// Two neighbouring bfloat16 per word.
struct Paired {
    using Sum = Floats;
    using Weight = std::uint32_t;
    static constexpr int depth = 2, elements = 2;
    static constexpr bool integer = false;
    static constexpr Storage stored = Storage::bfloat16;
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns * 2; }

    static FUSION_INLINE Floats dot(Floats sum, Words a, Words b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)a);
    }
    static FUSION_INLINE NarrowFloats dot(NarrowFloats sum, NarrowWords a, NarrowWords b) {
        return (NarrowFloats)_mm256_dpbf16_ps((__m256)sum, (__m256bh)b, (__m256bh)a);
    }
    static FUSION_INLINE Floats weigh(Floats sum, Weight a, Words b) { return dot(sum, all(a), b); }
    static FUSION_INLINE void columns(const char *row, const char *next, Words &x, Words &y) {
        const __m512i a = _mm512_loadu_si512(row), b = _mm512_loadu_si512(next);
        x = (Words)_mm512_unpacklo_epi16(a, b);
        y = (Words)_mm512_unpackhi_epi16(a, b);
    }
    static FUSION_INLINE void store_elements(Weight *row, std::int64_t at, Floats low, Floats high) {
        store(row + at / 2, (Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
    static FUSION_INLINE void order(Floats &x, Floats &y) {  // four columns of x, four of y, ...
        const Floats a = x, b = y;
        x = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        y = __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    }
};

// Stored integers. A query row times its scales becomes 16-bit numbers, in two signed bytes each (scores), and so do
// the weights of a tile (values); sums are exact.
struct Integer {
    using Sum = Ints;
    using Weight = std::uint32_t;
    static constexpr int depth = 2;
    static constexpr bool integer = true;

    static FUSION_INLINE Ints weigh(Ints sum, Weight a, Words b) {
        return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)b, (__m512i)all(a));
    }
    static FUSION_INLINE Ints dot(Ints sum, Words positive, Words digits) {
        return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)positive, (__m512i)digits);
    }
    // The same; left to itself gcc copies sums from register to register.
    static FUSION_INLINE Ints added(Ints sum, Words positive, Words digits) {
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(positive), "v"(digits));
        return sum;
    }
    // Sums of eight lanes each, of two rows by four keys a pair of rows: lane 4 * i + j is row i's and key j's.
    static FUSION_INLINE Ints gather_pairs(const Ints (&sum)[2][4]) {
        Ints row[2];
        FUSION_UNROLL for (int i = 0; i < 2; ++i) row[i] = fold(fold(sum[i][0], sum[i][1]), fold(sum[i][2], sum[i][3]));
        return __builtin_shufflevector(row[0], row[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(row[0], row[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    // Four lanes to each of four rows.
    static FUSION_INLINE void store_quads(float *to, std::int64_t stride, Floats x) {
        store(to, __builtin_shufflevector(x, x, 0, 1, 2, 3));
        store(to + stride, __builtin_shufflevector(x, x, 4, 5, 6, 7));
        store(to + 2 * stride, __builtin_shufflevector(x, x, 8, 9, 10, 11));
        store(to + 3 * stride, __builtin_shufflevector(x, x, 12, 13, 14, 15));
    }
    static FUSION_INLINE Ints whole(Floats x) { return (Ints)_mm512_cvtps_epi32((__m512)x); }
    static FUSION_INLINE void store_elements(Weight *row, std::int64_t at, Floats low, Floats high) {
        char *to = reinterpret_cast<char *>(row) + at * 2;
        store(to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)low)));
        store(to + 32, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)high)));
    }

private:
    // Neighbouring lanes added, of a and b in turns. As floats: for integers gcc takes a slower shuffle.
    static FUSION_INLINE Ints fold(Ints x, Ints y) {
        const Floats a = (Floats)x, b = (Floats)y;
        return (Ints)__builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
               (Ints)__builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    }
};

struct Byte : Integer {
    static constexpr int elements = 4, parts = 1;  // parts: what a vector of a row is split into
    static constexpr Storage stored = Storage::int8;
    static constexpr int bias = 128;  // what makes an element positive
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns; }

    static FUSION_INLINE void split(Words x, Words (&part)[parts]) { part[0] = x ^ 0x80808080u; }
    static FUSION_INLINE void split_repeated(const char *from, Words (&part)[parts]) {  // eight words, twice
        part[0] = (Words)_mm512_broadcast_i64x4(_mm256_xor_si256(load<__m256i>(from), _mm256_set1_epi8(-128)));
    }
    static FUSION_INLINE void columns(const char *row, const char *next, Words &x, Words &y) {
        const __m256i a = load<__m256i>(row), b = load<__m256i>(next);
        x = (Words)_mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(a, b));
        y = (Words)_mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(a, b));
    }
    static FUSION_INLINE void order(Floats &x, Floats &y) {  // eight columns of x, eight of y, ...
        const Floats a = x, b = y;
        x = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        y = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
};

struct Nibble : Integer {
    static constexpr int elements = 8, parts = 2;  // even elements, odd elements
    static constexpr Storage stored = Storage::int4;
    static constexpr int bias = 8;
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns / 2; }

    static FUSION_INLINE void split(Words x, Words (&part)[parts]) {
        const Words positive = x ^ 0x88888888u;
        part[0] = positive & 0x0f0f0f0fu;
        part[1] = positive >> 4 & 0x0f0f0f0fu;
    }
    static FUSION_INLINE void split_repeated(const char *from, Words (&part)[parts]) { split(repeat<8>(from), part); }
    static FUSION_INLINE void columns(const char *row, const char *next, Words &x, Words &y) {
        const __m128i a = load<__m128i>(row), b = load<__m128i>(next);
        const __m512i wide = _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
        x = (Words)_mm512_srai_epi16(_mm512_slli_epi16(wide, 12), 12);
        y = (Words)_mm512_srai_epi16(wide, 4);
    }
    static FUSION_INLINE void order(Floats &x, Floats &y) {  // one column of x, one of y, ...
        const Floats a = x, b = y;
        x = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        y = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
};

#endif

}  // namespace decode
}  // namespace
}  // namespace fusion
