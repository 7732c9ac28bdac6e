// The cap of scores: softcap * tanh(score * scale / softcap).

#pragma once

#include "data/problem.h"
#include "simd/vec.h"

namespace fusion {
namespace {

// tanh(x) with an error below two units of the last place; 1 and -1 for infinities, NaN for NaN.
FUSION_INLINE Floats tanh(Floats x) {
    const Words sign = bits_of(x) & 0x80000000u;
    const Floats size = floats_of(bits_of(x) ^ sign), square = size * size;
    // From `even` on, 1 - 2 / (e^2x + 1) loses no bits; below it, a minimax polynomial of the relative error that is
    // exact at 0.
    constexpr float even = 0.625f, one = 16.0f;  // from `one` on the result is 1
    const Floats power = exp2<6>((size > all(one) ? all(one) : size) * (2 * log2_e));
    const Floats large = 1.0f - 2.0f / (power + 1.0f);
    constexpr float c[] = {-3.3333282e-1f, 1.3331442e-1f, -5.3739713e-2f, 2.0639079e-2f, -5.7049774e-3f};
    Floats p = all(c[4]);
    FUSION_UNROLL for (int i = 3; i >= 0; --i) p = p * square + all(c[i]);
    const Floats small = size + size * square * p;
    return floats_of(bits_of(size < all(even) ? small : large) | sign);
}

// Converts products to capped scores. slopes, unless null, become 1 - tanh^2, the derivative of scores by scaled
// products.
__attribute__((noinline)) inline void cap_scores(const Problem &p, float *scores, std::int64_t count, float *slopes) {
    constexpr double most = 3.4e38;  // limit of float32: 0 times an infinity would be NaN
    constexpr double least = 1e-30;  // smaller factors might be subnormal and inaccurate, so the cap divides separately
    const double ratio = p.scale / p.softcap;
    const bool small = -least < ratio && ratio < least;
    const auto factor = static_cast<float>(small ? p.scale : ratio > most ? most : ratio < -most ? -most : ratio);
    const auto divisor = static_cast<float>(small ? 1 / p.softcap : 1.0);
    const auto cap = static_cast<float>(p.softcap);
    for (std::int64_t c = 0; c < count; c += lanes) {
        const Floats tangent =
            rounded(tanh(load<Floats>(scores + c) * factor * divisor));  // the same bits with and without slopes
        store(scores + c, tangent * cap);
        if (slopes) store(slopes + c, 1.0f - tangent * tangent);
    }
}

}  // namespace
}  // namespace fusion
