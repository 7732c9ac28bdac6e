// What rows leave for the gradients of their keys, and how it is added to the keys' sums.
//
// Notes of a row say what it adds to which keys, so that rows can be computed in any order and what they add to a range
// of keys can be added later, row after row. Here is what notes of all kinds have in common.

#pragma once

#include "sparse/gather.h"

namespace fusion {
namespace {

// The keys of a row's list, and where ranges of them begin.
struct NotedKeys {
    std::int64_t range_keys, ranges;
    std::int32_t *keys;    // ascending
    std::int32_t *starts;  // [range + 1]

    NotedKeys() = default;
    NotedKeys(const SparseProblem &p, std::int64_t longest, std::int64_t range_keys_, Carver &carver)
        : range_keys(range_keys_), ranges((longest + range_keys - 1) / range_keys) {
        carver.take(keys, most_keys(p, longest));
        carver.take(starts, ranges + 1);
    }

    void divide(const std::int32_t *from, std::int64_t count) const {
        std::memcpy(keys, from, count * sizeof *keys);
        std::int64_t at = 0;
        for (std::int64_t range = 0; range <= ranges; ++range) {
            for (std::int64_t step = range_keys; step; step /= 2) {  // a list may name keys more often than once
                while (at + step <= count && from[at + step - 1] < range * range_keys) at += step;
            }
            starts[range] = static_cast<std::int32_t>(at);
        }
    }
};

// body(height, first key of a block in the list, its rows of sums, those of the next block) for what a row noted of a
// range. A list has the same blocks however keys are divided into ranges, since a key that it names twice is added to
// block by block.
template <class Body>
FUSION_INLINE void by_noted_blocks(const NotedKeys &listed, std::int64_t range, const KeySums &table,
                                   std::int64_t pitch, float *nowhere, Body body) {
    const std::int64_t stop = listed.starts[range + 1];
    float *rows[block_rows], *next[block_rows];
    const auto point = [&](std::int64_t at, std::int64_t end) {
        for (std::int64_t i = 0; i < block_rows; ++i) {
            next[i] = at + i < end ? table.memory + listed.keys[at + i] * pitch : nowhere;
        }
    };
    const auto end_of = [&](std::int64_t at) { return least(stop, (at / block_rows + 1) * block_rows); };
    std::int64_t at = listed.starts[range], end = end_of(at);
    for (point(at, end); at < stop; at = end, end = end_of(at)) {
        std::memcpy(rows, next, sizeof rows);
        point(end, end_of(end));
        with_height(end - at, [&](auto height) __attribute__((always_inline)) { body(height, at, rows, next); });
    }
}

// Adds factor * A[M][depth] * B to rows of sums, wherever they lie; those of the block that comes next are asked for.
template <class Format, int M, class Meanwhile>
__attribute__((noinline)) void add_block_to_sums(const typename Format::Word *a, std::int64_t a_stride,
                                                 const typename Format::Word *b, std::int64_t depth, float *const *sums,
                                                 float *const *next, std::int64_t first, std::int64_t columns,
                                                 float factor, Meanwhile &meanwhile) {
    for_panels(columns, [&](auto vectors, std::int64_t d) __attribute__((always_inline)) {
        constexpr int N = vectors();
        RegisterTile<Format, M, N> tile;
        const auto *rows = b + d * depth;
        meanwhile(M * depth * panel);
        for (int third = 0; third < 3; ++third) {  // more requests at a time than a core can follow up would stop it
            for (int i = third * M / 3; i < (third + 1) * M / 3; ++i) {
                for (int j = 0; j < N * lanes; j += 16) __builtin_prefetch(next[i] + first + d + j, 1);
            }
            rows = tile.add(depth * third / 3, depth * (third + 1) / 3, RowMajor<typename Format::Word>{a, a_stride},
                            rows, N * lanes);
        }
        tile.each([&](int i, int j, Floats sum) __attribute__((always_inline)) {
            float *const to = sums[i] + first + d + j * lanes;
            store(to, load<Floats>(to) + sum * factor);
        });
    });
}

// About how many blocks and panels of columns there are, which prefetches are spread over.
inline std::int64_t blocks_of(const NotedKeys &listed, std::int64_t range) {
    return most<std::int64_t>((listed.starts[range + 1] - listed.starts[range]) / block_rows, 1);
}
inline std::int64_t panels_of(std::int64_t columns) { return (columns + panel - 1) / panel; }

}  // namespace
}  // namespace fusion
