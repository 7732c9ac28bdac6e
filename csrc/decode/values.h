// The sum of a tile's values times their weights, with prefetches of later rows.

#pragma once

#include "decode/prefetch.h"

namespace fusion {
namespace {
namespace decode {

// Adds the values of a tile's keys, N vectors of columns from byte `at` on, times the weights of M rows from `row` on.
template <class F, int M, int N>
FUSION_INLINE void add_columns(const DecodeWork<F> &w, std::int64_t row, const DecodeTile &t,
                               const typename F::Weight *weights, std::int64_t at, LinePrefetch &ahead,
                               typename F::Sum (&sum)[M][N]) {
    constexpr std::int64_t fetched = F::bytes(N * lanes);
    const char *const *rows = w.s.value_rows;
    constexpr int lines = F::bytes(F::depth * N * lanes) / 64;
    LinePrefetch next = ahead;
    const bool follows = next.any() && at % 64 == 0 && at < row_bytes(w.p.storage, w.p.dim_qk);
    const std::int64_t again = w.sizes.direct_values && row == 0 ? t.real - again_values<F> : 0;
    for (std::int64_t key = 0; key < t.real; key += F::depth, ++weights) {
        Words value[N];
        FUSION_UNROLL for (int j = 0; j < N; j += 2) {
            const std::int64_t from = at + F::bytes(j * lanes);
            F::columns(rows + key, from, value[j], value[j + 1]);
        }
        // The repeated prefetches of the rows that are read next; after the last one, the first rows ahead.
        const char *const *const upcoming = key < again ? rows + key + again_values<F>
                                            : follows   ? w.s.next_keys + key - again
                                                        : nullptr;
        if (upcoming) {
            FUSION_UNROLL for (std::int64_t byte = 0; byte < fetched; byte += 64) {
                FUSION_UNROLL for (int k = 0; k < F::depth; ++k) fetch_line(upcoming[k], at + byte);
            }
        }
        if (key / F::depth % 4) next.fetch<lines>();
        FUSION_UNROLL for (int m = 0; m < M; ++m) {
            const typename F::Weight weight = weights[m * (decode_tile / F::depth)];
            FUSION_UNROLL for (int n = 0; n < N; ++n) sum[m][n] = F::weigh(sum[m][n], weight, value[n]);
        }
    }
    ahead = next;
}

}  // namespace decode
}  // namespace
}  // namespace fusion
