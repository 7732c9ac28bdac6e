// Scores from a row of products: they are scaled, optionally capped, and a bias is added that comes from memory, from a
// table of the last rows, or is a distance times a slope.
//
// score = score * scale + factor * value, for `count` keys from key `first` on. Memory behind the sequence's last key
// is not read; the sums there do not matter, because these keys are hidden from all rows.

#pragma once

#include "simd/row_addresses.h"
#include "simd/softcap.h"

namespace fusion {
namespace {

struct Row {  // one row of scores
    std::int64_t seq, head, row, first, count;
    float *scores;
};

template <class T>
void add_stored(const Row &r, const T *values, std::int64_t stride_row, std::int64_t stride_key, std::int64_t readable,
                float scale, float factor) {
    // The next block of rows reads the same columns; such streams are too short for hardware prefetchers.
    if (stride_key) prefetch(values + block_rows * stride_row, least(r.count, readable));
    for (std::int64_t c = 0; c < r.count; c += lanes) {
        const Floats value = stride_key ? load_floats(values + c, readable - c) : all(load_floats(values, 1)[0]);
        store(r.scores + c, load<Floats>(r.scores + c) * all(scale) + value * all(factor));
    }
}

struct Stored {  // position of a row's values: row of the stored matrix, and offset of columns
    std::int64_t row, shift;
};

// The stored row of a table for a row. The last rows are stored; an earlier row takes the stored row with the same
// remainder, at the columns with the same distance to the diagonal. Keys beyond the table's last column are hidden from
// it.
inline Stored table_row(const Sequence &seq, std::int64_t row) {
    const std::int64_t first = seq.q_len - table_rows, stored = row >= first ? row - first : row % table_rows;
    return {stored, first + stored - row};
}

template <class T>
__attribute__((noinline)) void add_row(const Row &r, const Matrix &m, const Sequence &seq, bool table, float scale,
                                       float factor) {
    const Stored at = table ? table_row(seq, r.row) : Stored{r.row, 0};
    const T *values = static_cast<const T *>(m.base) + row_of(m, r.seq, r.head, at.row);
    const std::int64_t from = r.first + at.shift;
    add_stored(r, values + (m.stride_key ? from : 0), m.stride_row[r.seq], m.stride_key, seq.kv_len - from, scale,
               factor);
}

template <bool Root> void add_distances(const Row &r, float slope, std::int64_t shift, float scale) {
    const std::int64_t start = r.first - r.row + shift;
    Ints distance = lane_numbers() + static_cast<std::int32_t>(start);
    for (std::int64_t c = 0; c < r.count; c += lanes, distance += lanes) {
        Floats value = __builtin_convertvector(distance < 0 ? -distance : distance, Floats);
        if constexpr (Root) value = root(value);
        store(r.scores + c, load<Floats>(r.scores + c) * all(scale) - value * all(slope));
    }
}

// True if scores are scaled, capped and biased in a separate pass: unless the scale is positive, the largest product
// does not belong to the largest score.
inline bool needs_bias_pass(const Problem &p) {
    return p.bias != Bias::none || p.has_row_scale || p.softcap > 0.0 || !(p.scale > 1e-30);
}

// Converts a row of products to scores; with Bias::none it only scales or caps them. slopes: as in cap_scores().
inline void add_bias(const Row &r, const Problem &p, const Operands &o, const Sequence &seq, float *slopes = nullptr) {
    const bool capped = p.softcap > 0.0;
    if (capped) cap_scores(p, r.scores, r.count, slopes);
    const float softmax_scale = static_cast<float>(p.scale), factor = p.bias_scaled ? softmax_scale : 1.0f,
                scale = capped ? 1.0f : softmax_scale;
    if (p.bias == Bias::none) {
        if (capped) return;
        for (std::int64_t c = 0; c < r.count; c += lanes) store(r.scores + c, load<Floats>(r.scores + c) * all(scale));
        return;
    }
    if (p.bias == Bias::slopes || p.bias == Bias::slopes_sqrt) {
        const float slope = o.slopes[r.seq * p.heads_q + r.head] * factor;
        if (p.bias == Bias::slopes) return add_distances<false>(r, slope, seq.shift, scale);
        return add_distances<true>(r, slope, seq.shift, scale);
    }
    const bool table = p.bias == Bias::table;
    by_dtype(o.bias.dtype, [&](auto stored) { add_row<decltype(stored)>(r, o.bias, seq, table, scale, factor); });
}

}  // namespace
}  // namespace fusion
