// The functions of brain_avx512.h in portable vector types, for the software model of tiles on any processor.

#pragma once

#include "simd/vec_portable.h"

namespace fusion {
namespace {

FUSION_INLINE Floats dot_brains(Floats sum, Words a, Words b) {
    return sum + floats_of(a << 16) * floats_of(b << 16) + floats_of(a & 0xffff0000) * floats_of(b & 0xffff0000);
}

FUSION_INLINE Words brains_of(Floats low, Floats high) {
    const Halves both[] = {upper_halves(low), upper_halves(high)};
    return load<Words>(both);
}

FUSION_INLINE Halves from_floats(Brain, Floats x) { return upper_halves(x); }

typedef std::uint16_t TwoHalves __attribute__((vector_size(lanes * 4)));

template <bool High, int... I>
FUSION_INLINE Words unpacked(TwoHalves low, TwoHalves high, std::integer_sequence<int, I...>) {
    return (Words)__builtin_shufflevector(low, high, (I / 8 * 8 + High * 4 + I % 8 / 2 + I % 2 * 2 * lanes)...);
}
template <bool High> FUSION_INLINE Words unpack_halves(Words low, Words high) {
    return unpacked<High>((TwoHalves)low, (TwoHalves)high, std::make_integer_sequence<int, 2 * lanes>{});
}

FUSION_INLINE Floats fused_difference(Floats a, Floats b, Floats product) {
    for (int i = 0; i < lanes; ++i) a[i] = static_cast<float>(static_cast<double>(a[i]) * b[i] - product[i]);
    return a;
}

// floor(x) for x in the range of int32; the caller replaces all other results.
FUSION_INLINE Floats floor_of(Floats x) {
    x = larger(all(-0x1p30f), x);
    const Floats truncated = __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);
    const Floats down = truncated > x ? truncated - 1.0f : truncated;
    return x == x ? down : x;
}

}  // namespace
}  // namespace fusion

#include "simd/exponent_portable.h"  // IWYU pragma: export
