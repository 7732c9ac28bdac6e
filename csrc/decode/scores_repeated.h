// Scores with vectors of four or sixteen lanes: words of a key are repeated for all rows of a block.

#pragma once

#include "decode/prefetch.h"

namespace fusion {
namespace {
namespace decode {

template <class F, int P>
FUSION_INLINE void add_products(Floats (&sum)[lanes], const Words *q, const char *const *rows, std::int64_t steps,
                                LinePrefetch &ahead, const RepeatPrefetch &again) {
    for (std::int64_t step = 0; step < steps; ++step) {
        const Words query = load<Words>(q + step);
        follow<P, lanes>(ahead, step);
        again.follow<P>(step);
        FUSION_UNROLL for (int i = 0; i < lanes; ++i) sum[i] = F::dot(sum[i], query, repeat<P>(rows[i] + step * P * 4));
    }
}

template <class F, int P>
FUSION_INLINE void add_digits(Ints (&sum)[lanes], const Words *q, const Ints *start, const char *const *rows,
                              std::int64_t steps, LinePrefetch &ahead, const RepeatPrefetch &again) {
    constexpr int half = least(lanes, 8);  // the number of sums of all digits that fit into registers
    FUSION_UNROLL for (int from = 0; from < lanes; from += half) {
        Ints digit[F::digits][half];
        FUSION_UNROLL for (int n = 0; n < F::digits; ++n) {
            FUSION_UNROLL for (int i = 0; i < half; ++i) digit[n][i] = load<Ints>(start + n);
        }
        for (std::int64_t step = 0; step < steps; ++step) {
            const Words *query = q + step * F::parts * F::digits;
            follow<P, half>(ahead, step);
            if (from == 0) again.follow<P>(step);
            FUSION_UNROLL for (int i = 0; i < half; ++i) {
                Words slice[F::parts];
                F::split(repeat<P>(rows[from + i] + step * P * 4), slice);
                FUSION_UNROLL for (int j = 0; j < F::parts * F::digits; ++j) {
                    Ints &to = digit[j % F::digits][i];
                    to = F::dot(to, slice[j / F::digits], load<Words>(query + j));
                }
            }
        }
        FUSION_UNROLL for (int i = 0; i < half; ++i) sum[from + i] = F::joined(&digit[0][i], half);
    }
}

template <class F, int P>
__attribute__((noinline)) void score_rows(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                          const LinePrefetch &ahead) {
    constexpr int rows = lanes / P;
    const Words *q = w.query(b.row);
    const std::int64_t steps = w.sizes.key_words / P, rope_steps = w.sizes.rope_words / P;
    LinePrefetch next = ahead, none;
    for (std::int64_t key = 0; key < t.count; key += lanes) {
        const RepeatPrefetch again = repeat_for(w, b, t, ahead, key);
        if constexpr (F::integer) {
            Ints sum[lanes];
            add_digits<F, P>(sum, q, w.start(b.row), w.s.key_rows + key, steps, next, again);
            gather_keys<P, rows>(sum);
            FUSION_UNROLL for (int i = 0; i < rows; ++i) {  // converts sums of integers to products
                const std::int64_t slot = w.slot(b.row + i);
                const Floats scale = all(w.s.row_scale[slot]), plus = all(w.s.row_offset[slot]);
                store(w.s.scores + i * decode_tile + key, __builtin_convertvector(sum[i], Floats) * scale + plus);
            }
        } else {
            Floats sum[lanes] = {};
            add_products<F, P>(sum, q, w.s.key_rows + key, steps, next, again);
            if (rope_steps) add_products<F, P>(sum, q + steps, w.s.rope_rows + key, rope_steps, none, {});
            gather_keys<P, rows>(sum);
            FUSION_UNROLL for (int i = 0; i < rows; ++i) store(w.s.scores + i * decode_tile + key, sum[i]);
        }
    }
}

}  // namespace decode
}  // namespace
}  // namespace fusion
