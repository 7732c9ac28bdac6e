// The two products of a decode in tile registers, for units of a multiple of 16 query rows (MLA: all heads share each
// key).
//
// Scores are computed as keys times query rows, [key][row], because rows of a cache are operands as they are stored and
// query rows are packed as [word][row]; they are transposed afterwards. Values of a tile of keys are interleaved once
// for all rows: for one block of rows panel by panel, in the first-level cache. Sums of values continue from those in
// memory.

#pragma once

#include "simd/tile.h"
#if defined(FUSION_TILES)
#include "decode/prefetch.h"
#endif

namespace fusion {
namespace {
namespace decode {

// The state that the products of a unit need.
#if !defined(FUSION_TILES)
template <class F> using UnitRegion = NoRegion;
#else
template <class F> using UnitRegion = std::conditional_t<uses_tiles<F>, TileRegion, NoRegion>;

constexpr std::int64_t pair_rows = decode_tile / 2;  // words of a tile's weights, rows of its interleaved values

// The address of the first of M rows of keys and their stride in words. Rows without a constant stride are copied.
template <int M>
RowMajor<Pair::Word> even_rows(const char *const *rows, std::int64_t words, char *copies) {
    const std::int64_t stride = rows[1] - rows[0];
    bool even = stride % 4 == 0;
    for (int i = 2; i < M; ++i) even &= rows[i] - rows[i - 1] == stride;
    if (even) return {reinterpret_cast<const Pair::Word *>(rows[0]), stride / 4};
    for (int i = 0; i < M; ++i) std::memcpy(copies + i * words * 4, rows[i], words * 4);
    return {reinterpret_cast<const Pair::Word *>(copies), words};
}

// Scores of M keys from `key` on for R rows from `row` on.
template <int M, int R>
__attribute__((noinline)) void score_tiles(const DecodeWork<Paired> &w, std::int64_t row, std::int64_t key) {
    const std::int64_t words = w.sizes.key_words, rope_words = w.sizes.rope_words;
    const auto *const q = reinterpret_cast<const Pair::Word *>(w.query(row));
    const InPanels<1> place{reinterpret_cast<const Pair::Word *>(w.query(row + lanes)) - q};
    auto *const copies = reinterpret_cast<char *>(w.s.copies);
    float *const sums = w.s.weights;  // [key][row]; weights are written later
    {
        SumBlock<Pair, M, R / lanes, R / lanes, false> block({sums, R});
        const auto *next = block.add(0, words, even_rows<M>(w.s.key_rows + key, words, copies), q, lanes, place);
        if (rope_words)
            block.add(0, rope_words, even_rows<M>(w.s.rope_rows + key, rope_words, copies), next, lanes, place);
        block.finish();
    }
    for (int from = 0; from < M; from += lanes) {
        for (int i = 0; i < R; i += lanes) {
            Words square[lanes];
            FUSION_UNROLL for (int k = 0; k < lanes; ++k) square[k] = load<Words>(sums + (from + k) * R + i);
            transpose(square);
            FUSION_UNROLL for (int r = 0; r < lanes; ++r) {
                store(w.s.scores + (i + r) * decode_tile + key + from, square[r]);
            }
        }
    }
}

template <int R>
void score_tiles(const DecodeWork<Paired> &w, std::int64_t row, const DecodeTile &t, LinePrefetch &ahead,
                 std::int64_t lines) {
    constexpr int most_keys = 2 * tiles::side;
    for (std::int64_t key = 0; key < t.count; key += most_keys) {  // count is a multiple of `lanes`
        if (ahead.any()) ahead.fetch(lines);
        if (key + most_keys <= t.count) score_tiles<most_keys, R>(w, row, key);
        else score_tiles<tiles::side, R>(w, row, key);
    }
}

// Interleaves two vectors of columns, from column d on, of the values of a tile's keys: [key / 2][column], padded with
// zeros. Prefetches so many lines for each pair of keys.
inline void interleave_columns(const DecodeWork<Paired> &w, const DecodeTile &t, std::int64_t d, std::uint32_t *to,
                               LinePrefetch &ahead, std::int64_t lines) {
    for (std::int64_t key = 0; key < t.count; key += 2) {
        ahead.fetch(lines);
        Words value[2];
        Paired::columns(w.s.value_rows + key, Paired::bytes(d), value[0], value[1]);
        store(to + key * lanes, value[0]);
        store(to + key * lanes + lanes, value[1]);
    }
    std::memset(to + t.count * lanes, 0, (decode_tile - t.count) * lanes * sizeof *to);
}

// True if a unit's rows are one block, so that a panel of interleaved values is read once, directly after it is
// written.
inline bool one_block(const DecodeWork<Paired> &w) { return w.rows() <= tiled_rows; }

constexpr std::int64_t panel_words = pair_rows * 2 * lanes;  // interleaved values of two vectors of columns

// Interleaves the values of a tile's keys for several blocks of rows.
inline void interleave_values(const DecodeWork<Paired> &w, const DecodeTile &t) {
    LinePrefetch none;
    auto *to = w.s.interleaved;
    for (std::int64_t d = 0; d < w.sizes.columns; d += 2 * lanes, to += panel_words) {
        interleave_columns(w, t, d, to, none, 0);
    }
}

// Adds weighted values to R rows from `row` on; prefetches about so many lines for each panel.
template <int R>
__attribute__((noinline)) void value_tiles(const DecodeWork<Paired> &w, std::int64_t row, const DecodeTile &t,
                                           LinePrefetch &ahead, std::int64_t lines) {
    const RowMajor<Pair::Word> weights = {reinterpret_cast<const Pair::Word *>(w.s.weights), pair_rows};
    const std::int64_t words = round_up<std::int64_t>(t.count, 2 * lanes) / 2;
    auto *values = w.s.interleaved;
    for (std::int64_t d = 0; d < w.sizes.columns; d += 2 * lanes) {
        if (one_block(w)) interleave_columns(w, t, d, values, ahead, (lines + pair_rows - 1) / pair_rows);
        else ahead.fetch(lines);
        SumBlock<Pair, R, 2, 2, true> block({w.out(row) + d, w.stride, 2 * lanes, true, w.s.fade});
        block.add(0, words, weights, values, 2 * lanes);
        block.finish();
        if (!one_block(w)) values += panel_words;
    }
}
#endif

}  // namespace decode
}  // namespace
}  // namespace fusion
