// Operand formats of a decode: rows in the format of the cache (or converted to float32), with one to eight elements
// per word.
//
// Scores: a vector has P words (phases) of each of `lanes / P` query rows; it is multiplied by P contiguous words of a
// key, repeated for all query rows. So one load serves all rows, and sums over the P phases are formed once per `lanes`
// keys. Three or four rows of bfloat16, or short rows of floats, are multiplied as pairs in vectors of half the size,
// those of integers in two vectors with twice the words: the same number of products, but half as many repeating loads.
// Three or four long rows of float32 have a vector each. Formats with `separate` always have separate vectors
// (scores_row_vectors.h). Values: elements of two keys and 2 * lanes columns form two vectors of words, in an order of
// columns that is reverted once per unit.

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

// Transforms sum[key] with lanes [query row][phase] to sum[query row] with lanes [key], summing over phases.
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

// A vector with P words from memory, repeated.
template <int P> FUSION_INLINE Words repeat(const char *from) {
    if constexpr (P == lanes) {
        return load<Words>(from);
#if defined(__AVX512F__)
    } else if constexpr (P == 8) {
        return (Words)_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
    } else if constexpr (P == 4) {
        return (Words)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
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
// Vectors of half the size: loads repeat four words in them without a shuffle, which costs a third of a product on CPUs
// that compute products 256 bits at a time.
typedef float NarrowFloats __attribute__((vector_size(32)));
typedef std::uint32_t NarrowWords __attribute__((vector_size(32)));
#endif

// Undoes the order of unpacked columns: from alternating groups of Count columns of x and y to all of x, or all of y.
template <int Count, int First, int... I>
FUSION_INLINE Floats turn(Floats x, Floats y, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(
        x, y, ((First + I) / Count % 2 * lanes + (First + I) / Count / 2 * Count + (First + I) % Count)...);
}
template <int Count> FUSION_INLINE void order_turns(Floats &x, Floats &y) {
    using Lanes = std::make_integer_sequence<int, lanes>;
    const Floats a = x, b = y;
    x = turn<Count, 0>(a, b, Lanes{});
    y = turn<Count, lanes>(a, b, Lanes{});
}

// The format with one float per word.
struct Floating {
    using Sum = Floats;
    using Weight = float;
    static constexpr int depth = 1;     // keys per word of weights
    static constexpr int elements = 1;  // elements of a row per word
    static constexpr int parts = 1, digits = 1;
    static constexpr bool integer = false, separate = lanes == 8;
    static constexpr Storage stored = Storage::float32;
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns * 4; }

    static FUSION_INLINE Floats dot(Floats sum, Words a, Words b) { return sum + floats_of(a) * floats_of(b); }
#if defined(__AVX512F__)
    static FUSION_INLINE NarrowFloats dot(NarrowFloats sum, NarrowWords a, NarrowWords b) {
        return sum + (NarrowFloats)a * (NarrowFloats)b;
    }
#endif
    static FUSION_INLINE Floats weigh(Floats sum, float a, Words b) { return sum + all(a) * floats_of(b); }
    static FUSION_INLINE void columns(const char *const *rows, std::int64_t from, Words &x, Words &y) {
        x = load<Words>(rows[0] + from);
        y = load<Words>(rows[0] + from + lanes * 4);
    }
    static FUSION_INLINE void store_elements(Weight *row, std::int64_t at, Floats low, Floats high) {
        store(row + at, low);
        store(row + at + lanes, high);
    }
    static FUSION_INLINE void order(Floats &, Floats &) {}
    // If separate: the vectors as which a vector of words is multiplied, and the position of element i.
    static FUSION_INLINE void read(const char *from, Words (&slice)[1]) { slice[0] = load<Words>(from); }
    static std::int64_t place(std::int64_t i) { return i; }
};

// Elements of 16 bits that are multiplied as floats, with vectors of eight lanes or more: one vector of words becomes
// two when it is loaded.
template <class T, Storage Stored> struct Widened : Floating {
    static constexpr bool separate = true;
    static constexpr int elements = 2, parts = 2;
    static constexpr bool turns = std::is_same_v<T, Brain>;  // separates even and odd elements with two instructions
    static constexpr Storage stored = Stored;
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns * 2; }

    static FUSION_INLINE void columns(const char *const *rows, std::int64_t from, Words &x, Words &y) {
        if constexpr (turns) {
            const Words both = load<Words>(rows[0] + from);
            x = both << 16, y = both & 0xffff0000u;
        } else {
            const T *row = reinterpret_cast<const T *>(rows[0] + from);
            x = bits_of(load_floats(row, lanes));
            y = bits_of(load_floats(row + lanes, lanes));
        }
    }
    static FUSION_INLINE void read(const char *from, Words (&slice)[2]) { columns(&from, 0, slice[0], slice[1]); }
    static std::int64_t place(std::int64_t i) { return turns ? i % 2 * lanes + i / 2 : i; }
    static FUSION_INLINE void order(Floats &x, Floats &y) {
        if constexpr (turns) order_turns<1>(x, y);
    }
};

#if defined(FUSION_BRAIN_PRODUCTS)
// The format with two contiguous bfloat16 per word.
struct Paired {
    using Sum = Floats;
    using Weight = std::uint32_t;
    static constexpr int depth = 2, elements = 2, parts = 1, digits = 1;
    static constexpr bool integer = false, separate = false;
    static constexpr Storage stored = Storage::bfloat16;
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns * 2; }

    static FUSION_INLINE Floats dot(Floats sum, Words a, Words b) { return dot_brains(sum, a, b); }
#if defined(__AVX512F__)
    static FUSION_INLINE NarrowFloats dot(NarrowFloats sum, NarrowWords a, NarrowWords b) {
        return (NarrowFloats)_mm256_dpbf16_ps((__m256)sum, (__m256bh)b, (__m256bh)a);
    }
#endif
    static FUSION_INLINE Floats weigh(Floats sum, Weight a, Words b) { return dot(sum, all(a), b); }
    static FUSION_INLINE void columns(const char *const *rows, std::int64_t from, Words &x, Words &y) {
        const Words a = load<Words>(rows[0] + from), b = load<Words>(rows[1] + from);
        x = unpack_halves<false>(a, b);
        y = unpack_halves<true>(a, b);
    }
    static FUSION_INLINE void store_elements(Weight *row, std::int64_t at, Floats low, Floats high) {
        store(row + at / 2, brains_of(low, high));
    }
    static FUSION_INLINE void order(Floats &x, Floats &y) { order_turns<4>(x, y); }
};
#endif

// True if units with many rows are multiplied in tile registers (tiles.h).
#if defined(FUSION_TILES)
template <class F> constexpr bool uses_tiles = std::is_same_v<F, Paired>;
#else
template <class F> constexpr bool uses_tiles = false;
#endif

}  // namespace decode
}  // namespace
}  // namespace fusion

#if defined(__AVX512VNNI__)
#include "decode/integers_avx512.h"  // IWYU pragma: export
#elif defined(FUSION_BYTE_PRODUCTS)
#include "decode/integers_neon.h"  // IWYU pragma: export
#elif defined(__AVX2__)
#include "decode/integers_madd.h"  // IWYU pragma: export
#endif
