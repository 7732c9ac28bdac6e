// The factor 1 / keep_prob of weights that dropout keeps. A huge factor is applied in several steps, so that none
// overflows in float32 if operands and results are finite.

#pragma once

#include "data/problem.h"
#include "simd/vector_types.h"

namespace fusion {
namespace {

constexpr double least_keep = 0x1p-60;

// keep_prob in kernels, at least least_keep.
inline float keep_of(const Problem &p) { return static_cast<float>(most(p.keep_prob, least_keep)); }

inline float keep_factor(const Problem &p) { return static_cast<float>(1.0 / most(p.keep_prob, least_keep)); }

// The remaining factor besides keep_factor(): 1 except for a tiny keep_prob.
inline double keep_rest(const Problem &p) { return p.keep_prob < least_keep ? least_keep / p.keep_prob : 1.0; }

// Multiplies n numbers by a factor of at least 1.
inline void enlarge(float *x, std::int64_t n, double by) {
    while (by > 1.0) {
        const double step = least(by, 0x1p120);
        for (std::int64_t i = 0; i < n; ++i) x[i] *= static_cast<float>(step);
        by /= step;
    }
}

}  // namespace
}  // namespace fusion
