// Contributions of rows to gradients of keys, stored until they are added to the sums of keys.
//
// Rows can thus be computed in any order, and their contributions to a range of keys are added later, row after row.
// This file has the functions that attention and the indexer share.

#pragma once

#include "sparse/gather.h"

namespace fusion {
namespace {

// Writes the position of the first key of each strip of `kv_len` keys in a list with ascending keys.
inline void find_strips(const Contributions &stored, const std::int32_t *keys, std::int64_t count,
                        std::int64_t kv_len) {
    std::int64_t strip = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        for (; strip * stored.strip_keys <= keys[i]; ++strip) stored.starts[strip] = static_cast<std::int32_t>(i);
    }
    for (; (strip - 1) * stored.strip_keys < kv_len; ++strip) stored.starts[strip] = static_cast<std::int32_t>(count);
}

struct KeysInRange {  // keys of a list, from its `first` on, that are in a range
    std::int64_t first, stop;

    KeysInRange(const Contributions &stored, const KeyRange &range)
        : first(stored.starts[range.first]), stop(stored.starts[range.end]) {}

    std::int64_t count() const { return stop - first; }
    std::int64_t blocks() const { return most<std::int64_t>(count() / block_rows, 1); }  // approximate
};

// Calls body(height, first key of a block in the list, its rows of sums, those of the next block) for the contributions
// of a row in a range. The blocks of a list do not depend on ranges of keys, because a key that occurs twice is added
// block by block.
template <class Body>
FUSION_INLINE void by_key_blocks(const std::int32_t *keys, const KeysInRange &in_range, const KeySums &table,
                                 std::int64_t pitch, float *nowhere, Body body) {
    float *rows[block_rows], *next[block_rows];
    const auto point = [&](std::int64_t at, std::int64_t end) {
        for (std::int64_t i = 0; i < block_rows; ++i) {
            next[i] = at + i < end ? table.memory + keys[at + i] * pitch : nowhere;
        }
    };
    const auto end_of = [&](std::int64_t at) { return least(in_range.stop, (at / block_rows + 1) * block_rows); };
    std::int64_t at = in_range.first, end = end_of(at);
    for (point(at, end); at < in_range.stop; at = end, end = end_of(at)) {
        std::memcpy(rows, next, sizeof rows);
        point(end, end_of(end));
        with_height(end - at, [&](auto height) __attribute__((always_inline)) { body(height, at, rows, next); });
    }
}

// Adds factor * A[M][depth] * B to rows of sums at arbitrary addresses; prefetches those of the next block.
template <class Format, int M, class Meanwhile>
__attribute__((noinline)) void add_block_to_sums(const typename Format::Word *a, std::int64_t a_stride,
                                                 const typename Format::Word *b, std::int64_t depth, float *const *sums,
                                                 float *const *next, std::int64_t first, std::int64_t columns,
                                                 float factor, Meanwhile &meanwhile) {
    for_panels(columns, [&](auto vectors, std::int64_t d) __attribute__((always_inline)) {
        constexpr int N = vectors();
        StagedBlock<Format, M, N> tile;
        const auto *rows = b + d * depth;
        meanwhile(M * depth * panel);
        for (int third = 0; third < 3;
             ++third) {  // in three portions, because a core stalls with too many outstanding prefetches
            for (int i = third * M / 3; i < (third + 1) * M / 3; ++i) {
                for (int j = 0; j < N * lanes; j += 16) __builtin_prefetch(next[i] + first + d + j, 1);
            }
            constexpr std::int64_t step = Format::step;
            rows = tile.add(depth * third / 3 / step * step, depth * (third + 1) / 3 / step * step,
                            RowMajor<typename Format::Word>{a, a_stride}, rows, N * lanes);
        }
        tile.each([&](int i, int j, Floats sum) __attribute__((always_inline)) {
            float *const to = sums[i] + first + d + j * lanes;
            store(to, load<Floats>(to) + sum * factor);
        });
    });
}

inline std::int64_t panels_of(std::int64_t columns) { return (columns + panel - 1) / panel; }

}  // namespace
}  // namespace fusion
