// Measures the peak rate of a variant's multiply-adds, with loops in registers; benchmarks report kernels as a fraction
// of it.

#pragma once

#include "simd/tile.h"

namespace fusion {
namespace {

constexpr int chains = 12;  // independent sums: above latency times rate of common CPUs, below the number of registers

// Runs `turns` rounds of multiply-adds and returns the number of operations; writing `result` keeps the compiler from
// removing them.
inline double float_work(std::int64_t turns, float *result) {
    Floats sums[chains];
    for (int i = 0; i < chains; ++i) sums[i] = all(static_cast<float>(i));
    // Values that change the sums; the compiler would remove a sum that x and y do not change.
    const Floats x = rounded(all(0.9999f)), y = rounded(all(1e-3f));
    for (std::int64_t t = 0; t < turns; ++t) {
#pragma GCC unroll 12
        for (int i = 0; i < chains; ++i) sums[i] = sums[i] * x + y;
    }
    for (int i = 0; i < chains; ++i) *result += sum_of(sums[i]);
    return 2.0 * lanes * chains * static_cast<double>(turns);
}

#if defined(FUSION_TILES) && !defined(FUSION_TILES_MODEL)
double pair_work(std::int64_t turns, float *result) {
    const TileRegion region;
    alignas(64) float sums[tiles::side * tiles::side] = {};
    for (std::int64_t t = 0; t < turns; ++t) {  // of zeros, which configured tiles contain
        tiles::multiply<0, 4, 6>();
        tiles::multiply<1, 4, 7>();
        tiles::multiply<2, 5, 6>();
        tiles::multiply<3, 5, 7>();
    }
    tiles::store<0>(sums, 4 * tiles::side);
    *result += sums[0];
    return 4.0 * tiles::side * tiles::side * 4 * tiles::side * static_cast<double>(turns);
}
#elif defined(FUSION_BRAIN_PRODUCTS)
double pair_work(std::int64_t turns, float *result) {
    Floats sums[chains];
    for (int i = 0; i < chains; ++i) sums[i] = all(static_cast<float>(i));
    const Words x = all(0x3c003c00u), y = all(0x3d003d00u);
    for (std::int64_t t = 0; t < turns; ++t) {
#pragma GCC unroll 12
        for (int i = 0; i < chains; ++i) sums[i] = Pair::dot(sums[i], x, y);
    }
    for (int i = 0; i < chains; ++i) *result += sum_of(sums[i]);
    return 4.0 * lanes * chains * static_cast<double>(turns);
}
#endif

}  // namespace
}  // namespace fusion
