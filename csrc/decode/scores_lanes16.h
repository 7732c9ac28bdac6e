// Scores with vectors of sixteen lanes for three or four rows, which would need four phases, and for two blocks of rows
// at once.

#pragma once

#include "decode/scores_repeated.h"

namespace fusion {
namespace {
namespace decode {

FUSION_INLINE NarrowWords repeat_narrow(const char *from) {
    return (NarrowWords)_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

// Sums over groups of four lanes: of the first half of each vector, then of the second.
FUSION_INLINE NarrowFloats add_quads(const NarrowFloats *x) {
    const auto pair = [](NarrowFloats a, NarrowFloats b) __attribute__((always_inline)) {
        return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
               __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    };
    const NarrowFloats a = pair(x[0], x[1]), b = pair(x[2], x[3]);
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}

// Stores four lanes to each of four rows.
FUSION_INLINE void store_quads(float *to, std::int64_t stride, Floats x) {
    store(to, __builtin_shufflevector(x, x, 0, 1, 2, 3));
    store(to + stride, __builtin_shufflevector(x, x, 4, 5, 6, 7));
    store(to + 2 * stride, __builtin_shufflevector(x, x, 8, 9, 10, 11));
    store(to + 3 * stride, __builtin_shufflevector(x, x, 12, 13, 14, 15));
}

constexpr int narrow_keys = 8;  // keys per step

// Adds products of three or four rows, with a pair of rows per vector: each key has a sum for either pair.
template <class F>
FUSION_INLINE void add_narrow(NarrowFloats (&sum)[2][narrow_keys], const Words *q, const char *const *rows,
                              std::int64_t steps, LinePrefetch &ahead, const RepeatPrefetch &again, std::int64_t row) {
    for (std::int64_t line = 0; line < steps; line += 4) {
        ahead.fetch<narrow_keys>();
        again.fetch<narrow_keys>(row, line * 16);
        for (std::int64_t step = line; step < least(line + 4, steps); ++step) {
            const char *const query = reinterpret_cast<const char *>(q + step);
            const NarrowWords low = load<NarrowWords>(query), high = load<NarrowWords>(query + 32);
            FUSION_UNROLL for (int k = 0; k < narrow_keys; ++k) {
                const NarrowWords words = repeat_narrow(rows[k] + step * 16);
                sum[0][k] = F::dot(sum[0][k], low, words);
                sum[1][k] = F::dot(sum[1][k], high, words);
            }
        }
    }
}

template <class F>
__attribute__((noinline)) void score_narrow(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                            const LinePrefetch &ahead) {
    const Words *q = w.query(b.row);
    const std::int64_t steps = w.sizes.key_words / 4, rope_steps = w.sizes.rope_words / 4;
    LinePrefetch next = ahead, none;
    for (std::int64_t from = 0; from < t.count; from += lanes) {
        const RepeatPrefetch again = repeat_for(w, b, t, ahead, from);
        for (std::int64_t key = from; key < from + lanes; key += narrow_keys) {
            NarrowFloats sum[2][narrow_keys] = {};
            add_narrow<F>(sum, q, w.s.key_rows + key, steps, next, again, key - from);
            if (rope_steps) add_narrow<F>(sum, q + steps, w.s.rope_rows + key, rope_steps, none, {}, 0);
            FUSION_UNROLL for (int pair = 0; pair < 2; ++pair) {
                FUSION_UNROLL for (int k = 0; k < narrow_keys; k += 4) {
                    const NarrowFloats x = add_quads(sum[pair] + k);
                    float *const to = w.s.scores + 2 * pair * decode_tile + key + k;
                    store(to, __builtin_shufflevector(x, x, 0, 1, 2, 3));
                    store(to + decode_tile, __builtin_shufflevector(x, x, 4, 5, 6, 7));
                }
            }
        }
    }
}

constexpr int wide_keys = 4;  // keys whose sums are gathered together

// Adds products of three or four rows of floats, each in separate vectors, so that no word is repeated. Keys are read
// one after the other with prefetches in between, because that is the fastest order of memory. Steps: number of steps
// if known, else 0.
template <class F, int Steps>
FUSION_INLINE void add_wide(Floats (&sum)[lanes], const Words *q, const char *const *rows, std::int64_t steps,
                            LinePrefetch &ahead, const RepeatPrefetch &again, std::int64_t row) {
    FUSION_UNROLL for (int k = 0; k < wide_keys; ++k) {
        const char *key = rows[k], *next = ahead.any() ? ahead.take(steps) : key;
        const char *const soon = again.rows ? again.rows[row + k] : next;
        __asm__("" : "+r"(key), "+r"(q));  // else gcc computes all addresses in advance and spills them
        const auto add = [&](std::int64_t step) __attribute__((always_inline)) {
            fetch_line(next, step * 64), fetch_line(soon, step * 64);
            const Words words = load<Words>(key + step * 64);
            FUSION_UNROLL for (int i = 0; i < 4; ++i) {
                sum[4 * i + k] = F::dot(sum[4 * i + k], load<Words>(q + 4 * step + i), words);
            }
        };
        if constexpr (Steps > 0) {
            FUSION_UNROLL for (int step = 0; step < Steps; ++step) add(step);
        } else {
            for (std::int64_t step = 0; step < steps; ++step) add(step);
        }
    }
}

template <class F, int Steps>
__attribute__((noinline)) void score_long_rows(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                               const LinePrefetch &ahead) {
    const Words *const q = w.query(b.row);
    const std::int64_t steps = w.sizes.key_words / lanes, rope_steps = w.sizes.rope_words / lanes;
    LinePrefetch next = ahead, none;
    for (std::int64_t from = 0; from < t.count; from += lanes) {
        const RepeatPrefetch again = repeat_for(w, b, t, ahead, from);
        for (std::int64_t key = from; key < from + lanes; key += wide_keys) {
            Floats sum[lanes] = {};  // [row][key]
            add_wide<F, Steps>(sum, q, w.s.key_rows + key, Steps ? Steps : steps, next, again, key - from);
            if (rope_steps) add_wide<F, 0>(sum, q + 4 * steps, w.s.rope_rows + key, rope_steps, none, {}, 0);
            store_quads(w.s.scores + key, decode_tile, sums_of(sum));
        }
    }
}

FUSION_INLINE void fetch_four(const char *const *rows, std::int64_t byte) {
    FUSION_UNROLL for (int i = 0; i < 4; ++i) fetch_line(rows[i], byte);
}

// Adds products of 32 bytes of four keys.
template <class F>
FUSION_INLINE void add_pairs(Ints (&sum)[2][F::digits][4], const char *const (&row)[4], std::int64_t byte,
                             const Words *&digits) {
    constexpr int keys = F::digits == 2 ? 1 : 4;  // keys per load of a vector of digits
    FUSION_UNROLL for (int from = 0; from < 4; from += keys) {
        Words slice[keys][F::parts];
        FUSION_UNROLL for (int k = 0; k < keys; ++k) F::read(row[from + k] + byte, slice[k]);
        FUSION_UNROLL for (int at = 0; at < 2 * F::parts * F::digits; ++at) {
            const Words digit = load<Words>(digits + at);
            Ints *const to = sum[at / (F::parts * F::digits)][at % F::digits] + from;
            FUSION_UNROLL for (int k = 0; k < keys; ++k) {
                to[k] = F::added(to[k], slice[k][at / F::digits % F::parts], digit);
            }
        }
    }
    digits += 2 * F::parts * F::digits;
}

// Sums of adjacent lanes of x and y, interleaved. Shuffled as floats, because gcc uses a slower shuffle for integers.
FUSION_INLINE Ints fold_pairs(Ints x, Ints y) {
    const Floats a = (Floats)x, b = (Floats)y;
    return (Ints)__builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           (Ints)__builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

// Sums over groups of eight lanes for two pairs of rows and four keys: lane 4 * i + j is that of row i and key j.
FUSION_INLINE Ints gather_pairs(const Ints (&sum)[2][4]) {
    Ints row[2];
    FUSION_UNROLL for (int i = 0; i < 2; ++i) {
        row[i] = fold_pairs(fold_pairs(sum[i][0], sum[i][1]), fold_pairs(sum[i][2], sum[i][3]));
    }
    return __builtin_shufflevector(row[0], row[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(row[0], row[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// Scores of three or four rows of integers, with a pair of rows per vector. Sums of four keys are gathered between the
// products of the next four, whose latency they hide.
template <class F, bool Fetches>
__attribute__((noinline)) void score_pairs(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                           const LinePrefetch &ahead) {
    const std::int64_t bytes = w.sizes.key_words * 4, slot = w.slot(b.row), count = t.count;
    const char *const *rows = w.s.key_rows, *const *upcoming = rows + again_keys<F>;
    LinePrefetch next = ahead;
    const Words *const q = w.query(b.row);
    const Ints *const start = w.start(b.row);
    float *const scores = w.s.scores, *to_scores = scores;
    Floats scale, plus;
    FUSION_UNROLL for (int lane = 0; lane < lanes; ++lane) {
        scale[lane] = w.s.row_scale[slot + lane / 4], plus[lane] = w.s.row_offset[slot + lane / 4];
    }
    Ints sum[2][4] = {};  // of the previous four keys
    for (std::int64_t key = 0; key < count; key += 4, rows += 4) {
        if (Fetches && key == count - again_keys<F>) upcoming = w.s.value_rows;
        const char *const row[4] = {rows[0], rows[1], rows[2], rows[3]};
        const Words *digits = q;
        Ints digit[2][F::digits][4];
        FUSION_UNROLL for (int at = 0; at < 2 * F::digits; ++at) {
            FUSION_UNROLL for (int k = 0; k < 4; ++k) digit[at / F::digits][at % F::digits][k] = load<Ints>(start + at);
        }
        if (Fetches) next.fetch<4>(), fetch_four(upcoming, 0);
        add_pairs<F>(digit, row, 0, digits);
        store_quads(to_scores, decode_tile, __builtin_convertvector(gather_pairs(sum), Floats) * scale + plus);
        to_scores = scores + key;
        std::int64_t byte = 32;
        for (; byte + 32 < bytes; byte += 64) {
            add_pairs<F>(digit, row, byte, digits);
            if (Fetches) next.fetch<4>(), fetch_four(upcoming, byte + 32);
            add_pairs<F>(digit, row, byte + 32, digits);
        }
        if (byte < bytes) add_pairs<F>(digit, row, byte, digits);
        FUSION_UNROLL for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = F::joined(&digit[i / 4][0][i % 4], 4);
        if (Fetches) upcoming += 4;
    }
    store_quads(to_scores, decode_tile, __builtin_convertvector(gather_pairs(sum), Floats) * scale + plus);
}

// Scores of three or four rows in the loop selected by block().
template <class F>
void score_four(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t, const LinePrefetch &ahead) {
    if constexpr (F::integer) {
        return ahead.any() ? score_pairs<F, true>(w, b, t, ahead) : score_pairs<F, false>(w, b, t, ahead);
    } else if constexpr (F::depth == 1) {
        if (b.loop == Loop::long_rows) {
            return w.sizes.key_words == 8 * lanes   ? score_long_rows<F, 8>(w, b, t, ahead)
                   : w.sizes.key_words == 4 * lanes ? score_long_rows<F, 4>(w, b, t, ahead)
                                                    : score_long_rows<F, 0>(w, b, t, ahead);
        }
    }
    if constexpr (!F::integer) score_narrow(w, b, t, ahead);
}

// Scores of two blocks with one phase, so that a word of a key is repeated once for both. Sums have the order of
// score_rows(). Scores of the second block follow those of the first.
template <class F>
__attribute__((noinline)) void score_both(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                          const LinePrefetch &ahead) {
    constexpr int half = lanes / 2;
    const Words *const first = w.query(b.row), *const second = w.query(b.row + lanes);
    const std::int64_t ends[2] = {w.sizes.key_words, w.sizes.key_words + w.sizes.rope_words};
    LinePrefetch next = ahead;
    for (std::int64_t key = 0; key < t.count; key += lanes) {
        RepeatPrefetch again = repeat_for(w, b, t, ahead, key);
        Floats sums[2][lanes];
        for (int from = 0; from < lanes; from += half) {
            Floats sum[2][half] = {};
            std::int64_t word = 0;
            for (int rope = 0; rope < 2; ++rope) {
                const char *const *rows = (rope ? w.s.rope_rows : w.s.key_rows) + key + from;
                const std::int64_t begin = word;
                for (; word < ends[rope]; ++word) {
                    const Words one = load<Words>(first + word), other = load<Words>(second + word);
                    if (!rope) follow<1, half>(next, word), again.follow<1>(word);
                    FUSION_UNROLL for (int i = 0; i < half; ++i) {
                        const Words repeated = repeat<1>(rows[i] + (word - begin) * 4);
                        sum[0][i] = F::dot(sum[0][i], one, repeated);
                        sum[1][i] = F::dot(sum[1][i], other, repeated);
                    }
                }
            }
            again = {};
            FUSION_UNROLL for (int i = 0; i < half; ++i) sums[0][from + i] = sum[0][i], sums[1][from + i] = sum[1][i];
        }
        for (int block = 0; block < 2; ++block) {
            Floats sum[lanes];
            FUSION_UNROLL for (int i = 0; i < lanes; ++i) sum[i] = sums[block][i];
            gather_keys<1, lanes>(sum);
            float *const to = w.s.scores + block * lanes * decode_tile + key;
            FUSION_UNROLL for (int i = 0; i < lanes; ++i) store(to + i * decode_tile, sum[i]);
        }
    }
}

}  // namespace decode
}  // namespace
}  // namespace fusion
