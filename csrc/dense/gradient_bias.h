// The gradient of a bias: dS of a block, which is stored in place of its scores, is added to dbias with the layout of
// the bias; if each element belongs to a single (row, key) pair, it is written once.

#pragma once

#include "dense/gradient_products.h"
#include "simd/streaming_stores.h"

namespace fusion {
namespace {

template <class Format> FUSION_INLINE float dbias_factor(const GradientWork<Format> &w) {
    return w.p.bias_scaled ? static_cast<float>(w.p.scale) : 1.0f;
}

template <class Format> void add_dbias(const GradientWork<Format> &w, const GradientBlock &b) {
    const Matrix &m = w.g.dbias;
    const float factor = dbias_factor(w);
    const std::int64_t first = w.key_tile.key0 + b.at;
    for (std::int64_t i = 0; i < b.rows; ++i) {
        const float *from = w.k.scores + i * w.k.keys;
        const std::int64_t row = w.row_tile.row0 + b.row + i;
        const Stored at = w.p.bias == Bias::table ? table_row(w.seq, row) : Stored{row, 0};
        auto *to =
            static_cast<float *>(const_cast<void *>(m.base)) + row_of(m, w.row_tile.seq, w.row_tile.head, at.row);
        if (m.stride_key == 0) {
            Floats sum = {};
            for (std::int64_t c = 0; c < b.count; c += lanes) sum += load<Floats>(from + c);
            *to += sum_of(sum) * factor;
            continue;
        }
        to += first + at.shift;
        const std::int64_t there = w.seq.kv_len - first - at.shift;
        for (std::int64_t c = 0; c < b.count && c < there; c += lanes) {
            store_floats(to + c, load_floats(to + c, there - c) + load<Floats>(from + c) * factor, there - c);
        }
    }
}

// Writes dbias for all keys of the tile, also the hidden ones outside [b.at, b.at + b.count).
template <class T, class Format> void write_rows(const GradientWork<Format> &w, const GradientBlock &b) {
    const float factor = dbias_factor(w);
    const std::int64_t there = w.key_tile.key1 - w.key_tile.key0;
    for (std::int64_t i = 0; i < b.rows; ++i) {
        const float *from = w.k.scores + i * w.k.keys;
        T *to = static_cast<T *>(const_cast<void *>(w.g.dbias.base)) +
                row_of(w.g.dbias, w.row_tile.seq, w.row_tile.head, w.row_tile.row0 + b.row + i) + w.key_tile.key0;
        const auto value = [&](std::int64_t c) {
            return c >= b.at && c < b.at + b.count ? load<Floats>(from + c - b.at) * factor : Floats{};
        };
        for (std::int64_t c = 0; c < there; c += 2 * lanes) {
            const Floats low = value(c), high = value(c + lanes);
            if (c + 2 * lanes <= there && write_lines(to + c, low, high)) continue;
            store_floats(to + c, low, there - c);
            if (c + lanes < there) store_floats(to + c + lanes, high, there - c - lanes);
        }
    }
}

template <class Format> void write_dbias(const GradientWork<Format> &w, const GradientBlock &b) {
    by_dtype(w.g.dbias.dtype, [&](auto stored) { write_rows<decltype(stored)>(w, b); });
}

}  // namespace
}  // namespace fusion
