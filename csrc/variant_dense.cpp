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

#if defined(FUSION_BRAIN_PRODUCTS)
constexpr DenseVariant variant = {{}, kernels<Pair>(), {}, gradient_kernels<Pair>(), nullptr, pair_work};
#else
constexpr DenseVariant variant = {kernels<Single>(), {}, gradient_kernels<Single>(), {}, float_work, nullptr};
#endif

}  // namespace
}  // namespace fusion

extern "C" const fusion::DenseVariant *FUSION_ENTRY(_dense)() { return &fusion::variant; }
