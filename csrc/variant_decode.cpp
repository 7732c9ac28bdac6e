// The decode part of an instruction-set variant; compiled like variant_dense.cpp, with the same restrictions.

#include "decode/attend.h"
#include "decode/finish.h"
#include "dtype_dispatch.h"

namespace fusion {
namespace {

std::size_t scratch_bytes(const DecodeProblem &problem) { return decode::DecodeScratch(problem, nullptr).bytes; }

std::size_t partial_floats(const DecodeProblem &problem) { return decode::partial_stride(problem); }

#if defined(FUSION_TILES) && !defined(FUSION_TILES_MODEL)
// bfloat16 in tile registers if they are filled by a unit's rows. Other rows, and those of common keys, are multiplied
// as floats, because processors with tile registers compute vector products of bfloat16 at a quarter of the rate of
// floats.
DecodeNonfinite attend_brains(const DecodeJob &job, const DecodeUnit &unit, const DecodeUnit *next, void *scratch,
                              float *partial, bool careful) {
    using namespace decode;
    const auto attend_unit = fits_tiles<Paired>(job, unit) ? attend<Paired> : attend<Widened<Brain, Storage::bfloat16>>;
    return attend_unit(job, unit, next, scratch, partial, careful);
}
#endif

// Formats that are not instantiated here are taken from the variant before (dispatch.cpp). The model of tiles has lanes
// of its own, so it has all of them.
constexpr DecodeKernels make_kernels() {
    using namespace decode;
    DecodeKernels k = {scratch_bytes, partial_floats, {}, merge_rows, finish_rows};
    [[maybe_unused]] const auto at = [&](DecodeFormat format) -> auto & { return k.attend[static_cast<int>(format)]; };
#if defined(FUSION_TILES) && !defined(FUSION_TILES_MODEL)
    at(DecodeFormat::brains) = attend_brains;
#elif defined(FUSION_BRAIN_PRODUCTS)
    at(DecodeFormat::brains) = attend<Paired>;
#endif
#if defined(FUSION_TILES_MODEL) || !(defined(FUSION_BRAIN_PRODUCTS) || defined(FUSION_BYTE_PRODUCTS))
    at(DecodeFormat::floats) = attend<Floating>;
    if constexpr (lanes >= 8) {  // narrower vectors convert slowly, and few rows use each value
        at(DecodeFormat::halves) = attend<Widened<Half, Storage::float16>>;
#if !defined(FUSION_BRAIN_PRODUCTS)
        at(DecodeFormat::brains) = attend<Widened<Brain, Storage::bfloat16>>;
#endif
    }
#endif
#if !defined(FUSION_BRAIN_PRODUCTS) && (defined(FUSION_BYTE_PRODUCTS) || defined(__AVX2__))
    at(DecodeFormat::bytes) = attend<Byte>;
    at(DecodeFormat::nibbles) = attend<Nibble>;
#if defined(__AVX512VNNI__)
    at(DecodeFormat::fine_bytes) = attend<Fine<Byte>>;
    at(DecodeFormat::fine_nibbles) = attend<Fine<Nibble>>;
#endif
#endif
    return k;
}

constexpr DecodeKernels kernels = make_kernels();

}  // namespace
}  // namespace fusion

extern "C" const fusion::DecodeKernels *FUSION_ENTRY(_decode)() { return &fusion::kernels; }
