// The C functions that return constants and conversions.
#include <bit>
#include <cmath>

#include "acl/acl.h"
#include "capi/dtypes.h"
#include "capi/handles.h"

namespace fusion::capi {

FUSION_C const char *aclrtGetSocName() { return "Ascend910B"; }

FUSION_C int aclrtGetVersion(std::int32_t *majorVersion, std::int32_t *minorVersion, std::int32_t *patchVersion) {
    return coded([&] {
        need_address(majorVersion, "majorVersion");
        need_address(minorVersion, "minorVersion");
        need_address(patchVersion, "patchVersion");
        *majorVersion = 1, *minorVersion = 14, *patchVersion = 0;
    });
}

FUSION_C std::size_t aclDataTypeSize(aclDataType dataType) {
    const Dtype *dtype = dtype_of(dataType);
    return dtype == nullptr ? 0 : static_cast<std::size_t>(dtype->bits / 8);
}

FUSION_C float aclFloat16ToFloat(aclFloat16 value) {
    const int exponent = value >> 10 & 31, fraction = value & 1023;
    float magnitude = std::ldexp(static_cast<float>(fraction), -24);
    if (exponent == 31) {
        magnitude = fraction == 0 ? HUGE_VALF : NAN;
    } else if (exponent != 0) {
        magnitude = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    }
    return (value & 0x8000) != 0 ? -magnitude : magnitude;
}

// Rounds to nearest, ties to even; values beyond the largest become infinity.
FUSION_C aclFloat16 aclFloatToFloat16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<aclFloat16>(bits >> 16 & 0x8000);
    const float size = std::fabs(value);
    if (std::isnan(size)) return static_cast<aclFloat16>(sign | 0x7e00);
    if (size >= 65520.0F) return static_cast<aclFloat16>(sign | 0x7c00);
    int exponent = 0;
    std::frexp(size, &exponent);
    // A multiple of the last place that this size has: 2^-24 for the smallest, which have no leading one.
    const int last = exponent < -13 ? -24 : exponent - 11;
    const auto mantissa = static_cast<std::uint32_t>(std::lrint(std::ldexp(size, -last)));
    const std::uint32_t magnitude =
        mantissa < 1024 || last == -24 ? mantissa : mantissa + ((static_cast<std::uint32_t>(last + 24)) << 10);
    return static_cast<aclFloat16>(sign | magnitude);
}

}  // namespace fusion::capi
