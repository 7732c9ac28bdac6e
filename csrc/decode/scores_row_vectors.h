// Scores of a tile's keys where every query row has separate vectors.
//
// R rows are multiplied by a few keys at a time, at most `lanes` sums, which form a vector. A vector of stored words is
// split when it is loaded (F::read) into vectors in whose order query rows are packed, so that no converted key is
// stored. The order of a row's sum does not depend on the number of rows.

#pragma once

#include "decode/prefetch.h"

namespace fusion {
namespace {
namespace decode {

template <class F> using Score = std::conditional_t<F::integer, Ints, Floats>;

// Keys that are multiplied by R rows at a time, a power of two.
constexpr int keys_beside(int rows) {
    int keys = 8;
    while (keys * rows > lanes) keys /= 2;
    return keys;
}

// The first product of a sum, which needs no zero.
template <class F> FUSION_INLINE Score<F> product_of(Words elements, Words query) {
    if constexpr (F::integer) return F::product(elements, query);
    else return floats_of(elements) * floats_of(query);
}

// Adds products of R rows and a few keys of `bytes` bytes; with First, the sums begin with them. For each step, the
// vectors of one row are followed by those of the next. With First, prefetches the rows `next` and, for float32,
// `again`.
template <class F, int R, bool First>
FUSION_INLINE void add_separate(Score<F> (&sum)[lanes], const Words *q, const char *const *rows, std::int64_t bytes,
                                const char *const *next = nullptr, const char *const *again = nullptr) {
    constexpr int keys = keys_beside(R);
    constexpr std::int64_t size = sizeof(Words);
    const auto step = [&](std::int64_t byte, auto first) __attribute__((always_inline)) {
        Words slice[keys][F::parts];
        FUSION_UNROLL for (int k = 0; k < keys; ++k) F::read(rows[k] + byte, slice[k]);
        FUSION_UNROLL for (int i = 0; i < R * F::parts; ++i) {
            Words query = load<Words>(q + i);
#if defined(__AVX2__)
            // Else gcc loads it once for each key, and many processors load only two vectors per cycle. Integers, which
            // need more instructions, would take longer.
            if constexpr (!F::integer) __asm__("" : "+v"(query));
#endif
            FUSION_UNROLL for (int k = 0; k < keys; ++k) {
                Score<F> &to = sum[i / F::parts * keys + k];
                const Words elements = slice[k][i % F::parts];
                to = first && i % F::parts == 0 ? product_of<F>(elements, query) : F::dot(to, elements, query);
            }
        }
        q += R * F::parts;
    };
    const auto line = [&](std::int64_t byte, auto first, bool full) __attribute__((always_inline)) {
        if constexpr (First) {
            FUSION_UNROLL for (int k = 0; k < keys; ++k) fetch_line(next[k], byte);
        }
        if constexpr (First && slower_in_memory<F>) {
            FUSION_UNROLL for (int k = 0; k < keys; ++k) fetch_line(again[k], byte);
        }
        step(byte, first);
        if (size < 64 && full) step(byte + size, std::false_type{});
    };
    std::int64_t byte = 0;
    if constexpr (First) {
        if (bytes < 64) return line(0, std::true_type{}, false);
        line(0, std::true_type{}, true);
        byte = 64;
    }
    for (; byte + 64 <= bytes; byte += 64) line(byte, std::false_type{}, true);
    if (byte < bytes) line(byte, std::false_type{}, false);
}

template <int N> FUSION_INLINE void copy_lanes(float *to, const Floats &x, int from) {
    std::memcpy(to, reinterpret_cast<const float *>(&x) + from, N * 4);
}

// Sums of adjacent lanes of a and b, within 128 bits: two of a, then two of b. As floats, because gcc uses slower
// shuffles for integers.
template <class V, int... I> FUSION_INLINE V sums_of_pairs(V a, V b, std::integer_sequence<int, I...>) {
    const auto from = [](int i) { return i / 4 * 4 + i % 2 * 2 + (i & 2 ? lanes : 0); };
    return (V)__builtin_shufflevector((Floats)a, (Floats)b, from(I)...) +
           (V)__builtin_shufflevector((Floats)a, (Floats)b, (from(I) + 1)...);
}

// Sums of adjacent groups of four lanes: those of a, then those of b.
template <class V, int... I> FUSION_INLINE V sums_of_fours(V a, V b, std::integer_sequence<int, I...>) {
    return (V)__builtin_shufflevector((Floats)a, (Floats)b, (I / 4 * 8 + I % 4)...) +
           (V)__builtin_shufflevector((Floats)a, (Floats)b, (I / 4 * 8 + 4 + I % 4)...);
}

// Lane i is the sum of the lanes of x[i]. Adjacent lanes are added first, because crossing 128 bits takes longer.
template <class V> FUSION_INLINE V sums_of_lanes(const V (&x)[lanes]) {
    using Lanes = std::make_integer_sequence<int, lanes>;
    V fours[lanes / 4];
    FUSION_UNROLL for (int i = 0; i < lanes; i += 4) {
        fours[i / 4] =
            sums_of_pairs(sums_of_pairs(x[i], x[i + 1], Lanes{}), sums_of_pairs(x[i + 2], x[i + 3], Lanes{}), Lanes{});
    }
    FUSION_UNROLL for (int i = 0; i < lanes / 8; ++i) {
        fours[i] = sums_of_fours(fours[2 * i], fours[2 * i + 1], Lanes{});
    }
    return lanes == 16 ? sums_of_fours(fours[0], fours[1], Lanes{}) : fours[0];
}

// Scores of the rows of a block, at most R, for the keys of a tile.
template <class F, int R>
__attribute__((noinline)) void score_separate_rows(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                                   const LinePrefetch &ahead) {
    constexpr int keys = keys_beside(R);
    const std::int64_t words = w.sizes.key_words, rope_words = w.sizes.rope_words;
    const Words *const q = w.query(b.row);
    const char *const *const rows = w.s.key_rows, *const *const ropes = w.s.rope_rows;
    float *const to = w.s.scores;
    const std::int64_t further = b.row == 0 && w.sizes.direct_keys ? again_keys<F> : 0;
    [[maybe_unused]] Floats scale = {}, plus = {};
    for (int lane = 0; F::integer && lane < lanes; ++lane) {
        const std::int64_t slot = w.slot(b.row + lane / keys);
        scale[lane] = w.s.row_scale[slot], plus[lane] = w.s.row_offset[slot];
    }
    for (std::int64_t key = 0, count = t.count; key < count; key += keys) {
        Score<F> sum[lanes];
        // Some numbers of rows leave sums that sums_of_lanes() reads.
        FUSION_UNROLL for (int i = R * keys; i < lanes; ++i) sum[i] = Score<F>{};
        const char *next[keys];
        FUSION_UNROLL for (int k = 0; k < keys; ++k) next[k] = ahead.any() ? ahead.row(key + k) : rows[key + k];
        add_separate<F, R, true>(sum, q, rows + key, words * 4, next, rows + least(key + further, t.count - keys));
        Floats scores;
        if constexpr (F::integer) {  // converts sums of integers to products
            scores = __builtin_convertvector(sums_of_lanes(sum), Floats) * scale + plus;
        } else {
            if (rope_words) {
                const Words *const rest = q + words / lanes * R * F::parts;
                add_separate<F, R, false>(sum, rest, ropes + key, rope_words * 4);
            }
            scores = sums_of_lanes(sum);
        }
        FUSION_UNROLL for (int i = 0; i < R; ++i) copy_lanes<keys>(to + i * decode_tile + key, scores, i * keys);
    }
}

// Scores of a block of rows.
template <class F, int R = lanes>
void score_separate(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t, const LinePrefetch &ahead) {
    constexpr int fewer = R > 8 ? R - 4 : R > 4 ? R - 2 : R - 1;
    if constexpr (fewer > 0) {
        if (b.vectors <= fewer) return score_separate<F, fewer>(w, b, t, ahead);
    }
    score_separate_rows<F, R>(w, b, t, ahead);
}

}  // namespace decode
}  // namespace
}  // namespace fusion
