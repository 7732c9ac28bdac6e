// The sum of a tile's values times their weights for vectors of eight lanes, with prefetches of later rows.

#pragma once

#include "decode/prefetch.h"

namespace fusion {
namespace {
namespace decode {

// Adds the values of a tile's keys, N vectors of columns from byte `at` on, times the weights of M rows.
template <class F, int M, int N>
FUSION_INLINE void add_columns(const DecodeWork<F> &w, [[maybe_unused]] std::int64_t row, const DecodeTile &t,
                               const typename F::Weight *weights, std::int64_t at, LinePrefetch &ahead,
                               typename F::Sum (&sum)[M][N]) {
    constexpr std::int64_t keys = lanes;                             // per step
    constexpr std::int64_t lines = F::bytes(N * lanes) * keys / 64;  // as many as a step multiplies
    const char *const *rows = w.s.value_rows;
    for (std::int64_t key = 0; key < t.real; key += keys, weights += keys / F::depth) {  // weights behind `real` are 0
        if (ahead.any() && key / keys % 4) {  // weigh_rows() has prefetched a quarter
            const char *const line = ahead.take(lines);
            FUSION_UNROLL for (std::int64_t i = 0; i < lines; ++i) fetch_line(line + 64 * i);
        }
        if constexpr (slower_in_memory<F>) {
            const std::int64_t further = row == 0 && w.sizes.direct_values ? again_values<F> : 0;
            const char *const *const again = rows + least(key + further, t.count - keys);
            FUSION_UNROLL for (int i = 0; i < lines; ++i) fetch_line(again[i % keys], at + i / keys * 64);
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
}

}  // namespace decode
}  // namespace
}  // namespace fusion
