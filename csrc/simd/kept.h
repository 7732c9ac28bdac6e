// 1 / keep_prob, which kept weights are multiplied by: where it is huge, in several steps, so that no factor overflows
// while what it multiplies, and the result, are numbers that float32 holds.

#pragma once

#include "data/problem.h"
#include "simd/types.h"

namespace fusion {
namespace {

constexpr double least_keep = 0x1p-60;

// What the kernels take for keep_prob.
inline float keep_of(const Problem &p) { return static_cast<float>(most(p.keep_prob, least_keep)); }

inline float keep_factor(const Problem &p) { return static_cast<float>(1.0 / most(p.keep_prob, least_keep)); }

// What is left to be multiplied by besides keep_factor(): 1, but for a tiny keep_prob.
inline double keep_rest(const Problem &p) { return p.keep_prob < least_keep ? least_keep / p.keep_prob : 1.0; }

// n numbers times a factor of at least 1.
inline void enlarge(float *x, std::int64_t n, double by) {
    while (by > 1.0) {
        const double step = least(by, 0x1p120);
        for (std::int64_t i = 0; i < n; ++i) x[i] *= static_cast<float>(step);
        by /= step;
    }
}

}  // namespace
}  // namespace fusion
