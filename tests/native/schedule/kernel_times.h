// How long kernels compute, in ns of one core of the machine that docs/performance.md tells of: what it says there, and
// what follows from it. Only proportions matter to a speed-up.

#pragma once

#include "data/problem.h"

#include <algorithm>
#include <cstdint>

namespace schedule {

constexpr double peak = 235, float_peak = 118;  // FLOP a ns

// Multiply-adds at a fraction of the peak.
inline double products(fusion::Dtype dtype, double multiply_adds, double fraction) {
    return 2 * multiply_adds / (dtype == fusion::Dtype::bfloat16 ? peak : float_peak) / fraction;
}

constexpr double forward_share = 0.88, backward_share = 0.90;  // of tiles without packing
constexpr double sparse_share = 0.90, sparse_backward_share = 0.82, indexer_share = 0.85;
constexpr double list_loss_share = 0.84, tile_loss_share = 0.75;

// Visible keys of row i are [first, end).
inline std::int64_t first_key(const fusion::Sequence &s, std::int64_t i) { return std::max<std::int64_t>(i + s.lo, 0); }
inline std::int64_t end_key(const fusion::Sequence &s, std::int64_t i) {
    return std::min(std::max(i + s.hi, s.prefix), s.kv_len);
}

// Pairs of rows [row0, row1) and keys [begin, end) that see each other.
inline double visible_pairs(const fusion::Sequence &s, std::int64_t row0, std::int64_t row1, std::int64_t begin,
                            std::int64_t end) {
    std::int64_t pairs = 0;
    for (std::int64_t i = row0; i < row1; ++i) {
        pairs += std::max<std::int64_t>(std::min(end_key(s, i), end) - std::max(first_key(s, i), begin), 0);
    }
    return static_cast<double>(pairs);
}

}  // namespace schedule
