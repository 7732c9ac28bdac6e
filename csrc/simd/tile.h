// The register tile that products are made of.

#pragma once

#include "simd/formats.h"

namespace fusion {
namespace {

// C[M][N vectors] = sum over k < depth of A[M][k] * B[k][N vectors], B's rows being Stride vectors apart; with Add and
// fade, fade[i] * C[i] is added to it. Every key tile is summed from zero: one sum over all keys would lose bits.
template <class Format, int M, int N, int Stride, bool Add>
FUSION_INLINE void multiply(const typename Format::Word *a, std::int64_t a_stride, const typename Format::Word *b,
                            std::int64_t depth, float *c, std::int64_t c_stride, const float *fade) {
    Floats sum[M][N];
    FUSION_UNROLL for (int i = 0; i < M; ++i) { FUSION_UNROLL for (int j = 0; j < N; ++j) sum[i][j] = Floats{}; }
#pragma GCC unroll 2
    for (std::int64_t k = 0; k < depth; ++k, b += Stride * lanes) {
        Words right[N];
        FUSION_UNROLL for (int j = 0; j < N; ++j) right[j] = load<Words>(b + j * lanes);
        FUSION_UNROLL for (int i = 0; i < M; ++i) {
            FUSION_UNROLL for (int j = 0; j < N; ++j) {
                sum[i][j] = Format::dot(sum[i][j], a[i * a_stride + k], right[j]);
            }
        }
    }
    FUSION_UNROLL for (int i = 0; i < M; ++i) {
        FUSION_UNROLL for (int j = 0; j < N; ++j) {
            float *at = c + i * c_stride + j * lanes;
            if (Add && fade) sum[i][j] += load<Floats>(at) * all(fade[i]);
            store(at, sum[i][j]);
        }
    }
}

}  // namespace
}  // namespace fusion
