// Functions for Pair that are built from floor_of(), for CPUs without instructions for exponents and mantissas.

#pragma once

namespace fusion {
namespace {

FUSION_INLINE Floats mantissa_of(Floats x, Floats &exponent) {
    const Ints bits = (Ints)x, above = bits - 0x3f400000;  // 0.75
    const Ints integer = above >> 23;
    const Floats m = (Floats)(bits - (integer << 23));
    const auto normal = (x > Floats{}) & (x < all(infinity));  // for other numbers the logarithm is the exponent
    exponent = normal ? __builtin_convertvector(integer, Floats) : x == Floats{} ? all(-infinity) : x;
    return normal ? m : all(1.0f);
}

FUSION_INLINE Floats fraction_of(Floats x) { return x - floor_of(x); }

FUSION_INLINE Floats scaled_by_power(Floats p, Floats x) {
    const Ints n = __builtin_convertvector(floor_of(larger(all(-127.0f), x)), Ints);
    return x < all(least_power) ? Floats{} : p * (Floats)((n + 127) << 23);
}

}  // namespace
}  // namespace fusion
