// The forward kernel of blocks of rows whose visible keys are in one panel, for many packed sequences of few tokens.
//
// Scores stay in registers between the two products, and the softmax of a row is computed at once. Every sum is that of
// dense/forward.h, with the same bits, so blocks that need more go there; so do products with tile registers, whose
// sums are not in vector registers. Start reading at attend_short().

#pragma once

#include "dense/forward_scratch.h"

namespace fusion {
namespace {

template <class Format> FUSION_INLINE bool is_plain(const Work<Format> &w) {
    return !w.bias_pass && !w.p.has_blocked && !w.p.has_blocked_tiles && w.p.dropout == Dropout::none;
}

// True if all visible keys of the block's rows are in one panel.
template <class Format> FUSION_INLINE bool is_short(const Work<Format> &w, const Block &b) {
    return Format::step == 1 && b.count == panel && w.tile.end <= w.tile.begin / panel * panel + step_keys(w.sizes);
}

// The number of prefetching steps of a block.
template <class Format> FUSION_INLINE std::int64_t steps_of(const Work<Format> &w, const Block &b) {
    return is_short(w, b) && is_plain(w) ? 1 + (w.sizes.value_columns + panel - 1) / panel : b.count / panel;
}

// Sets scores of hidden keys to -inf, for M rows and N vectors from the panel's vector `from` on.
template <class Format, int M, int N>
FUSION_INLINE void hide_in_registers(const Work<Format> &w, const Block &b, std::int64_t from, Floats (&scores)[M][N]) {
    std::uint64_t visible[M];
#pragma GCC unroll 1
    for (int i = 0; i < M; ++i) {
        const std::int64_t row = w.tile.row0 + b.row + least<std::int64_t>(i, b.rows - 1);
        const std::int64_t begin = first_key(w.seq, row) - b.first, end = end_key(w.seq, row) - b.first;
        visible[i] = (low_bits(end) & ~low_bits(begin)) >> (from * lanes);
    }
    FUSION_UNROLL for (int i = 0; i < M; ++i) {
        FUSION_UNROLL for (int j = 0; j < N; ++j) {
            const auto bits = static_cast<std::uint32_t>(visible[i] >> (j * lanes));
            scores[i][j] = pick(bits, scores[i][j], all(-infinity));
        }
    }
}

// Computes peaks and shifts of M rows; false without any change if one is not finite.
template <class Format, int M, int N>
FUSION_INLINE bool find_peaks(const Work<Format> &w, const Block &b, const Floats (&scores)[M][N]) {
    bool finite = true;
    FUSION_UNROLL for (int first = 0; first < M; first += lanes) {
        Floats best[lanes];
        FUSION_UNROLL for (int i = 0; i < lanes; ++i) {
            best[i] = all(-infinity);  // rows behind these are computed later
            if (first + i >= M) continue;
            FUSION_UNROLL for (int j = 0; j < N; ++j) best[i] = larger(best[i], scores[first + i][j]);
        }
        const Floats peak = maxima_of(best), shift = shift_of<Format>(peak, w.factor);
        const auto rows = static_cast<std::uint32_t>(low_bits(least(M - first, lanes)));
        finite &= (mask_of((all(-infinity) < shift) & (shift < all(infinity))) & rows) == rows;
        store(w.s.peak + b.row + first, peak);
        store(w.s.shift + b.row + first, shift);
    }
    for (int i = 0; !finite && i < M; ++i) w.s.peak[b.row + i] = w.s.shift[b.row + i] = -infinity;
    return finite;
}

// Computes M rows at a time, whose visible keys are in vectors [from, from + N) of the panel.
template <class Format, int M, int N>
__attribute__((noinline)) bool attend_in_registers(const Work<Format> &w, const Block &b, std::int64_t from,
                                                   PrefetchQueue &queue) {
    constexpr std::int64_t pitch = panel / Format::depth;  // words per row of weights
    const std::int64_t words = w.sizes.words, columns = w.sizes.value_columns;
    const auto *q = w.s.q + b.row * words;
    const auto *k = w.packed.k + (b.first - w.packed.first_key) * words + from * lanes;
    {
        RegisterTile<Format, M, N> scores;
        queue.step();
        scores.add(0, words, RowMajor<typename Format::Word>{q, words}, k, panel);
        if (b.full_begin > from * lanes || b.full_end < (from + N) * lanes) hide_in_registers(w, b, from, scores.sum);
        if (!find_peaks(w, b, scores.sum)) return false;
        FUSION_UNROLL for (int i = 0; i < M; ++i) {
            const float shift = w.s.shift[b.row + i];
            Floats sums[2] = {};
            for (int j = 0; j < N; j += 2) {
                const Floats low = weight_of<Format>(scores.sum[i][j], w.factor, shift);
                const Floats high = N > 1 ? weight_of<Format>(scores.sum[i][j + (N > 1)], w.factor, shift) : Floats{};
                sums[0] += low;
                sums[1] += high;
                Format::store_elements(w.s.weights + i * pitch, j * lanes, low, high);
            }
            store(w.s.sum + (b.row + i) * lanes, sums[0] + sums[1]);
        }
    }
    const std::int64_t first = from * lanes / Format::depth, begin = b.some_begin / Format::depth,
                       end = (b.some_end + Format::depth - 1) / Format::depth;
    for_panels(columns, [&](auto vectors, std::int64_t d) __attribute__((always_inline)) {
        constexpr int width = vectors();
        queue.step();
        const auto *v = w.packed.values(d, b.first - w.packed.first_key, width * lanes) + begin * width * lanes;
        multiply<Format, M, width, width, true>(w.s.weights + begin - first, pitch, v, end - begin,
                                                w.s.out + b.row * columns + d, columns, nullptr);
    });
    return true;
}

// Computes a block; false without any change if the block needs attend_block().
template <class Format> bool attend_short(const Work<Format> &w, const Block &b, PrefetchQueue &queue) {
    if constexpr (Format::step > 1) return false;
    if (!is_short(w, b) || !is_plain(w)) return false;
    constexpr int half = panel_vectors / 2;
    bool done = false;
    with_height(b.rows, [&](auto height) {
        constexpr int rows = height();
        if (b.some_end <= half * lanes) done = attend_in_registers<Format, rows, half>(w, b, 0, queue);
        else if (b.some_begin >= half * lanes) done = attend_in_registers<Format, rows, half>(w, b, half, queue);
        else done = attend_in_registers<Format, rows, panel_vectors>(w, b, 0, queue);
    });
    return done;
}

}  // namespace
}  // namespace fusion
