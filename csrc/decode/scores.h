// Scores of a tile's keys, with prefetches of later rows.

#pragma once

#include "decode/scores_repeated.h"
#include "decode/scores_row_vectors.h"
#if defined(__AVX512F__)
#include "decode/scores_lanes16.h"
#endif

namespace fusion {
namespace {
namespace decode {

// Scores of a block with at most P phases.
template <class F, int P = lanes>
void score_repeated(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t, const LinePrefetch &ahead) {
    constexpr bool elsewhere = has_four_row_loops && P == 4 && !F::integer;  // Loop::narrow or Loop::long_rows
    if constexpr (P > 1) {
        if (b.phases < P) return score_repeated<F, P / 2>(w, b, t, ahead);
    }
    if constexpr (!elsewhere) score_rows<F, P>(w, b, t, ahead);
}

// Scores of a block of rows; returns true if they are followed by those of the next block.
template <class F>
bool score_blocks(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t, const LinePrefetch &ahead) {
    if constexpr (F::separate) {
        score_separate(w, b, t, ahead);
        return false;
    } else {
#if defined(__AVX512F__)
        if (b.loop != Loop::repeated) return score_four<F>(w, b, t, ahead), false;
        if constexpr (!F::integer) {
            if (b.phases == 1 && b.row + lanes < w.rows() && w.block(b.row + lanes).phases == 1) {
                score_both(w, b, t, ahead);
                return true;
            }
        }
#endif
        score_repeated(w, b, t, ahead);
        return false;
    }
}

}  // namespace decode
}  // namespace
}  // namespace fusion
