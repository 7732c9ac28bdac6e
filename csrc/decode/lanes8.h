// Scores of a tile's keys and the sum of its values for vectors of eight lanes, with prefetches of later rows.
//
// Every query row has separate vectors, and R of them are multiplied by 8 / R keys at a time: eight sums, which form a
// vector. A vector of stored words is split when it is loaded (F::read) into vectors in whose order query rows are
// packed, so that no converted key is stored. The order of a row's sum does not depend on the number of rows.

#pragma once

#include "decode/queries.h"

namespace fusion {
namespace {
namespace decode {

// Rows are prefetched half a tile ahead, and again this many rows ahead.
constexpr std::int64_t again_rows = 16;

template <class F> constexpr bool feeds = false;  // no prefetches while weights are computed

// Prefetches into the second-level cache.
FUSION_INLINE void fetch_line(const char *row, std::int64_t byte) {
    __asm__ volatile("prefetcht1 (%0,%1)" : : "r"(row), "r"(byte));  // gcc would add both with a separate instruction
}

// Prefetches of bytes [from, to) of the rows half a tile ahead, row by row while the current rows are multiplied.
class LinePrefetch {
public:
    LinePrefetch() = default;
    LinePrefetch(const char *const *rows, std::int64_t, std::int64_t, std::int64_t from, std::int64_t to, std::int64_t)
        : rows_(from < to ? rows : nullptr), from_(from) {}

    void fetch(std::int64_t) {}
    bool any() const { return rows_ != nullptr; }
    const char *const *rows() const { return rows_; }
    std::int64_t from() const { return from_; }

private:
    const char *const *rows_ = nullptr;  // null: none
    std::int64_t from_ = 0;
};

// -------------------------------------------------------------------------------------------------------------- scores

template <class F> using Score = std::conditional_t<F::integer, Ints, Floats>;

// The first product of a sum, which needs no zero.
template <class F> FUSION_INLINE Score<F> product_of(Words elements, Words query) {
    if constexpr (F::integer) return F::product(elements, query);
    else return floats_of(elements) * floats_of(query);
}

// Adds products of R rows and 8 / R keys of `bytes` bytes; with First, the sums begin with them. For each step, the
// vectors of one row are followed by those of the next.
template <class F, int R, bool First>
FUSION_INLINE void add_products(Score<F> (&sum)[lanes], const Words *q, const char *const *rows, std::int64_t bytes,
                                const char *const *next, const char *const *soon) {
    constexpr int keys = lanes / R;
    const auto step = [&](std::int64_t byte, auto first) __attribute__((always_inline)) {
        Words part[keys][F::parts];
        FUSION_UNROLL for (int k = 0; k < keys; ++k) F::read(rows[k] + byte, part[k]);
        FUSION_UNROLL for (int i = 0; i < R * F::parts; ++i) {
            const Words query = load<Words>(q + i);
            FUSION_UNROLL for (int k = 0; k < keys; ++k) {
                Score<F> &to = sum[i / F::parts * keys + k];
                const Words elements = part[k][i % F::parts];
                to = first && i % F::parts == 0 ? product_of<F>(elements, query) : F::dot(to, elements, query);
            }
        }
        q += R * F::parts;
    };
    const auto line = [&](std::int64_t byte, auto first) __attribute__((always_inline)) {
        FUSION_UNROLL for (int k = 0; k < keys; ++k) fetch_line(next[k], byte), fetch_line(soon[k], byte);
        step(byte, first);
        step(byte + 32, std::false_type{});
    };
    std::int64_t byte = 0;
    if constexpr (First) {
        if (bytes <= 32) return step(0, std::true_type{});
        line(0, std::true_type{});
        byte = 64;
    }
    for (; byte + 32 < bytes; byte += 64) line(byte, std::false_type{});
    if (byte < bytes) step(byte, std::false_type{});
}

template <int N> FUSION_INLINE void copy_lanes(float *to, const Floats &x, int from) {
    std::memcpy(to, reinterpret_cast<const float *>(&x) + from, N * 4);
}

// Lane i is the sum of the lanes of x[i]. Adjacent lanes are added first, because crossing 128 bits takes longer.
template <class V> FUSION_INLINE V sums_of_lanes(const V (&x)[lanes]) {
    const auto pairs =
        [](V a,
           V b) __attribute__((always_inline)) {  // as floats, because gcc uses slower shuffles for integers
            const Floats even = __builtin_shufflevector((Floats)a, (Floats)b, 0, 2, 8, 10, 4, 6, 12, 14);
            return (V)even + (V)__builtin_shufflevector((Floats)a, (Floats)b, 1, 3, 9, 11, 5, 7, 13, 15);
        };
    const auto fours = [&](const V *x) __attribute__((always_inline)) {
        return (Floats)pairs(pairs(x[0], x[1]), pairs(x[2], x[3]));
    };
    const Floats low = fours(x), high = fours(x + 4);
    return (V)__builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
           (V)__builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

// Scores of the rows of a block, at most R at a time, for the keys of a tile.
template <class F, int R>
__attribute__((noinline)) void score_rows(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                          const LinePrefetch &ahead) {
    constexpr int keys = lanes / R;
    const std::int64_t words = w.sizes.key_words, rope_words = w.sizes.rope_words;
    const Words *const q = w.query(b.row);
    const std::int64_t count = t.count, turn = most<std::int64_t>(count - again_rows, 0);
    const char *const *const rows = w.s.key_rows, *const *const ropes = w.s.rope_rows;
    // Without rows to prefetch, addresses that are in the cache.
    const bool repeats = w.sizes.direct_keys && ahead.any();
    const char *const *const next_rows = ahead.any() ? ahead.rows() : rows, *const *again = rows;
    const std::int64_t from = ahead.any() ? ahead.from() : 0;
    if (repeats) again += again_rows;
    float *const to = w.s.scores;
    [[maybe_unused]] Floats scale = {}, plus = {};
    for (int lane = 0; F::integer && lane < lanes; ++lane) {
        const std::int64_t slot = w.slot(b.row + lane / keys);
        scale[lane] = w.s.row_scale[slot], plus[lane] = w.s.row_offset[slot];
    }
    for (std::int64_t key = 0; key < count; key += keys) {
        if (repeats && key >= turn) again = next_rows - turn;
        const char *next[keys], *soon[keys];
        FUSION_UNROLL for (int k = 0; k < keys; ++k) next[k] = next_rows[key + k] + from, soon[k] = again[key + k];
        Score<F> sum[lanes];
        // Three and six rows leave two sums, which sums_of_lanes() reads.
        FUSION_UNROLL for (int i = R * keys; i < lanes; ++i) sum[i] = Score<F>{};
        add_products<F, R, true>(sum, q, rows + key, words * 4, next, soon);
        Floats scores;
        if constexpr (F::integer) {  // converts sums of integers to products
            scores = __builtin_convertvector(sums_of_lanes(sum), Floats) * scale + plus;
        } else {
            const char *const *const rope = ropes + key;
            if (rope_words) {
                const Words *const rest = q + words / lanes * R * F::parts;
                add_products<F, R, false>(sum, rest, rope, rope_words * 4, rope, rope);
            }
            scores = sums_of_lanes(sum);
        }
        FUSION_UNROLL for (int i = 0; i < R; ++i) copy_lanes<keys>(to + i * decode_tile + key, scores, i * keys);
    }
}

// Scores of a block of rows. Returns false: scores of the next block are not included.
template <class F>
bool score_blocks(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t, const LinePrefetch &ahead) {
    switch (b.vectors) {
        case 1: score_rows<F, 1>(w, b, t, ahead); break;
        case 2: score_rows<F, 2>(w, b, t, ahead); break;
        case 3: score_rows<F, 3>(w, b, t, ahead); break;
        case 4: score_rows<F, 4>(w, b, t, ahead); break;
        case 6: score_rows<F, 6>(w, b, t, ahead); break;
        default: score_rows<F, 8>(w, b, t, ahead);
    }
    return false;
}

// -------------------------------------------------------------------------------------------------------------- values

// Adds the values of a tile's keys, N vectors of columns from byte `at` on, times the weights of M rows.
template <class F, int M, int N>
FUSION_INLINE void add_columns(const DecodeWork<F> &w, std::int64_t, const DecodeTile &t,
                               const typename F::Weight *weights, std::int64_t at, LinePrefetch &ahead,
                               typename F::Sum (&sum)[M][N]) {
    constexpr std::int64_t keys = 4 * F::depth;  // keys per step, a divisor of `lanes`
    constexpr int lines = (F::bytes(N * lanes) + 63) / 64;
    const bool fetches = at % 64 == 0 && ahead.any();
    const std::int64_t turn = w.sizes.direct_values ? most<std::int64_t>(t.count - again_rows, 0) : t.count;
    const char *const *rows = w.s.value_rows, *const *soon = rows + (w.sizes.direct_values ? again_rows : 0);
    for (std::int64_t key = 0, end = least(turn, t.real);; end = t.real, soon = w.s.next_rows - turn) {
        for (; key < end; key += keys, weights += keys / F::depth) {  // weights of keys behind `real` are 0
            if (fetches) {
                FUSION_UNROLL for (int k = 0; k < keys; ++k) {
                    for (int line = 0; line < lines; ++line) {
                        fetch_line(ahead.rows()[key + k] + line * 64, at);
                        fetch_line(soon[key + k] + line * 64, at);
                    }
                }
            }
            const char *const *met = rows + key;
            __asm__("" : "+r"(met));  // else gcc computes the address of every pointer
            FUSION_UNROLL for (int k = 0; k < keys; k += F::depth) {
                Words value[N];
                FUSION_UNROLL for (int j = 0; j < N; j += 2) {
                    F::columns(met + k, at + F::bytes(j * lanes), value[j], value[j + 1]);
                }
                FUSION_UNROLL for (int m = 0; m < M; ++m) {
                    const typename F::Weight weight = weights[(m * decode_tile + k) / F::depth];
                    FUSION_UNROLL for (int n = 0; n < N; ++n) sum[m][n] = F::weigh(sum[m][n], weight, value[n]);
                }
            }
        }
        if (end == t.real) break;
    }
}

}  // namespace decode
}  // namespace
}  // namespace fusion
