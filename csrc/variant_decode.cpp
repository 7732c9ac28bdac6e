// The decode part of an instruction-set variant; compiled like variant_dense.cpp, with the same restrictions.

#include "decode/attend.h"
#include "decode/finish.h"
#include "kernel_table.h"

namespace fusion {
namespace {

std::size_t scratch_bytes(const DecodeProblem &problem) { return decode::DecodeScratch(problem, nullptr).bytes; }

std::size_t partial_floats(const DecodeProblem &problem) { return decode::partial_stride(problem); }

bool attend_unit(const DecodeJob &job, const DecodeUnit &unit, const DecodeUnit *next, void *scratch, float *partial) {
    [[maybe_unused]] const DecodeProblem &p = *job.problem;
#if defined(FUSION_BRAIN_PRODUCTS)
    if (p.storage == Storage::bfloat16) return decode::attend_unit<decode::Paired>(job, unit, next, scratch, partial);
#endif
#if defined(FUSION_BYTE_PRODUCTS) || defined(__AVX2__)
    if (p.dtype != Dtype::float32 && p.dim_rope == 0) {
        if (p.storage == Storage::int8) return decode::attend_unit<decode::Byte>(job, unit, next, scratch, partial);
        if (p.storage == Storage::int4) return decode::attend_unit<decode::Nibble>(job, unit, next, scratch, partial);
    }
#endif
#if defined(__AVX512VNNI__)
    if (p.dtype == Dtype::float32 && p.dim_rope == 0 && p.dim_qk <= decode::fine_products) {
        using Byte = decode::Fine<decode::Byte>;
        using Nibble = decode::Fine<decode::Nibble>;
        if (p.storage == Storage::int8) return decode::attend_unit<Byte>(job, unit, next, scratch, partial);
        if (p.storage == Storage::int4) return decode::attend_unit<Nibble>(job, unit, next, scratch, partial);
    }
#endif
    if constexpr (lanes >= 8) {  // narrower vectors convert slowly, and few rows use each value
        using Halved = decode::Widened<Half, Storage::float16>;
        using Brained = decode::Widened<Brain, Storage::bfloat16>;
        if (p.storage == Storage::float16) return decode::attend_unit<Halved>(job, unit, next, scratch, partial);
        if (p.storage == Storage::bfloat16) return decode::attend_unit<Brained>(job, unit, next, scratch, partial);
    }
    return decode::attend_unit<decode::Floating>(job, unit, next, scratch, partial);
}

// sum(x * y) of bytes, for the test at import that checks a variant's instructions.
std::int32_t dot_bytes(const std::uint8_t *x, const std::int8_t *y, std::size_t n) {
    std::int32_t total = 0;
    std::size_t i = 0;
#if defined(FUSION_BYTE_PRODUCTS)
    Ints sum = {};
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
        sum = decode::Byte::dot(sum, load<Words>(x + i), load<Words>(y + i));
    }
    for (int lane = 0; lane < lanes; ++lane) total += sum[lane];
#endif
    for (; i < n; ++i) total += x[i] * y[i];
    return total;
}

constexpr DecodeKernels kernels = {scratch_bytes,      partial_floats,      attend_unit,
                                   decode::merge_rows, decode::finish_rows, dot_bytes};

}  // namespace
}  // namespace fusion

extern "C" const fusion::DecodeKernels *FUSION_ENTRY(_decode)() { return &fusion::kernels; }
