// The dense part of an instruction-set variant: forward, backward, and the measurement of peak rates.
//
// CMake compiles the four variant_*.cpp once per variant, with FUSION_VARIANT_ENTRY set, but no part and no format that
// would gain nothing (dispatch.cpp combines variants).
// No function of the standard library that may be emitted out of line is called here: the linker keeps one copy of such
// a function for the whole module, and it may keep the one an older CPU cannot run. check_leaks.cmake holds us to it.

#include "dense/forward.h"
#include "dense/gradient.h"
#include "dtype_dispatch.h"
#include "peak.h"
#include "simd/operand_formats.h"

namespace fusion {
namespace {

template <class Format> std::size_t packed_bytes(const Problem &problem, const Unit &unit) {
    return Packed<Format>(Sizes<Format>(problem), unit).bytes();
}

template <class Format> std::size_t scratch_bytes(const Problem &problem) {
    return Scratch<Format>(Sizes<Format>(problem), nullptr).bytes;
}

template <class Format> std::size_t row_bytes(const Problem &problem, std::int64_t rows) {
    return RowPart<Format>(Sizes<Format>(problem), rows, nullptr).bytes;
}

template <class Format> std::size_t key_bytes(const Problem &problem) {
    return KeyPart<Format>(problem, Sizes<Format>(problem), nullptr).bytes;
}

template <class Format> constexpr Kernels kernels() {
    return {panel,
            packed_bytes<Format>,
            scratch_bytes<Format>,
            FUSION_KERNEL(pack_panels),
            FUSION_KERNEL(pack_stored_panels),
            carry_panels<Format>,
            attend<Format>};
}

template <class Format> constexpr GradientKernels gradient_kernels() {
    return {tile_keys<Format>,        row_bytes<Format>,  key_bytes<Format>,          FUSION_KERNEL(pack_rows),
            FUSION_KERNEL(load_keys), accumulate<Format>, FUSION_KERNEL(store_dk_dv), FUSION_KERNEL(store_dq)};
}

// The test at import: it runs this variant's instructions and checks their results.

inline float float_of(std::uint16_t brain) {
    const std::uint32_t word = static_cast<std::uint32_t>(brain) << 16;
    float out;
    std::memcpy(&out, &word, sizeof out);
    return out;
}

float dot_bf16(const std::uint16_t *x, const std::uint16_t *y, std::size_t n) {
    float total = 0.0f;
    std::size_t i = 0;
#if defined(FUSION_BRAIN_PRODUCTS)
    Floats sum = {};
    for (; i + 2 * lanes <= n; i += 2 * lanes) sum = Pair::dot(sum, load<Words>(x + i), load<Words>(y + i));
    total = sum_of(sum);
#endif
    for (; i < n; ++i) total += float_of(x[i]) * float_of(y[i]);
    return total;
}

#if defined(FUSION_BRAIN_PRODUCTS)
constexpr DenseVariant variant = {lanes,   {},        kernels<Pair>(), {},      gradient_kernels<Pair>(),
                                  nullptr, pair_work, nullptr,         dot_bf16};
#else
inline float dot(const float *x, const float *y, std::size_t n) {
    Floats sum = {};
    std::size_t i = 0;
    for (; i + lanes <= n; i += lanes) sum += load<Floats>(x + i) * load<Floats>(y + i);
    float total = sum_of(sum);
    for (; i < n; ++i) total += x[i] * y[i];
    return total;
}

constexpr DenseVariant variant = {lanes, kernels<Single>(), {}, gradient_kernels<Single>(), {}, float_work, nullptr,
                                  dot,   dot_bf16};
#endif

}  // namespace
}  // namespace fusion

extern "C" const fusion::DenseVariant *FUSION_ENTRY(_dense)() { return &fusion::variant; }
