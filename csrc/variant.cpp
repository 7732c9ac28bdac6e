// One instruction-set variant; CMake compiles this file once per variant with FUSION_VARIANT_NAME and
// FUSION_VARIANT_ENTRY set.
//
// No function of the standard library that may be emitted out of line is called here: the linker keeps one copy of such
// a function for the whole module, and it may keep the one an older CPU cannot run. check_leaks.cmake holds us to it.

#include "decode/attend.h"
#include "decode/finish.h"
#include "dense/forward.h"
#include "dense/gradient.h"
#include "peak.h"
#include "kernel_table.h"
#include "simd/formats.h"

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
    return KeyPart<Format>(Sizes<Format>(problem), nullptr).bytes;
}

template <class Format> constexpr Kernels kernels() {
    return {packed_bytes<Format>, scratch_bytes<Format>, FUSION_KERNEL(pack_panels), FUSION_KERNEL(attend)};
}

template <class Format> constexpr GradientKernels gradient_kernels() {
    return {tile_keys<Format>,        row_bytes<Format>,         key_bytes<Format>,          FUSION_KERNEL(pack_rows),
            FUSION_KERNEL(load_keys), FUSION_KERNEL(accumulate), FUSION_KERNEL(store_dk_dv), FUSION_KERNEL(store_dq)};
}

std::size_t decode_scratch_bytes(const DecodeProblem &problem) { return decode::DecodeScratch(problem, nullptr).bytes; }

std::size_t decode_partial_floats(const DecodeProblem &problem) { return decode::partial_stride(problem); }

bool decode_unit(const DecodeJob &job, const DecodeUnit &unit, const DecodeUnit *next, void *scratch, float *partial) {
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
    const DecodeProblem &p = *job.problem;
    if (p.storage == Storage::bfloat16) return decode::attend_unit<decode::Paired>(job, unit, next, scratch, partial);
    if (p.dtype != Dtype::float32 && p.dim_rope == 0) {
        if (p.storage == Storage::int8) return decode::attend_unit<decode::Byte>(job, unit, next, scratch, partial);
        if (p.storage == Storage::int4) return decode::attend_unit<decode::Nibble>(job, unit, next, scratch, partial);
    }
#endif
    return decode::attend_unit<decode::Floating>(job, unit, next, scratch, partial);
}

constexpr DecodeKernels decode_kernels = {decode_scratch_bytes, decode_partial_floats, decode_unit, decode::merge_rows,
                                          decode::finish_rows};

// The probe: proof that this variant's instructions run here and mean what they should.

inline float float_of(std::uint16_t brain) {
    const std::uint32_t word = static_cast<std::uint32_t>(brain) << 16;
    float out;
    std::memcpy(&out, &word, sizeof out);
    return out;
}

float dot(const float *x, const float *y, std::size_t n) {
    Floats sum = {};
    std::size_t i = 0;
    for (; i + lanes <= n; i += lanes) sum += load<Floats>(x + i) * load<Floats>(y + i);
    float total = sum_of(sum);
    for (; i < n; ++i) total += x[i] * y[i];
    return total;
}

float dot_bf16(const std::uint16_t *x, const std::uint16_t *y, std::size_t n) {
    float total = 0.0f;
    std::size_t i = 0;
#if defined(__AVX512BF16__)
    __m512 sum = _mm512_setzero_ps();
    for (; i + 32 <= n; i += 32) {
        const __m512i left = _mm512_loadu_si512(x + i);
        const __m512i right = _mm512_loadu_si512(y + i);
        sum = _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
    }
    alignas(64) float parts[16];
    _mm512_store_ps(parts, sum);
    for (float part : parts) total += part;
#endif
    for (; i < n; ++i) total += float_of(x[i]) * float_of(y[i]);
    return total;
}

constexpr Variant variant = {
    FUSION_VARIANT_NAME,
    lanes,
    panel,
    kernels<Single>(),
#if defined(__AVX512BF16__)
    kernels<Pair>(),
    gradient_kernels<Single>(),
    gradient_kernels<Pair>(),
    decode_kernels,
    float_work,
    pair_work,
#else
    {},
    gradient_kernels<Single>(),
    {},
    decode_kernels,
    float_work,
    nullptr,
#endif
    dot,
    dot_bf16,
};

}  // namespace
}  // namespace fusion

extern "C" const fusion::Variant *FUSION_VARIANT_ENTRY() { return &fusion::variant; }
