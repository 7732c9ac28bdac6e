// One instruction-set variant; CMake compiles this file once per variant with FUSION_VARIANT_NAME and
// FUSION_VARIANT_ENTRY set.
//
// No function of the standard library that may be emitted out of line is called here: the linker keeps one copy of such
// a function for the whole module, and it may keep the one an older CPU cannot run. check_leaks.cmake holds us to it.

#include "variant.h"

#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;  // SSE2, NEON, or what the compiler makes of four floats
#endif

typedef float Vec __attribute__((vector_size(lanes * sizeof(float))));

inline Vec load(const float *from) {
    Vec out;
    std::memcpy(&out, from, sizeof out);  // an unaligned vector load
    return out;
}

inline float widen(std::uint16_t bits) {
    const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
    float out;
    std::memcpy(&out, &word, sizeof out);
    return out;
}

float dot(const float *x, const float *y, std::size_t n) {
    Vec sum = {};
    std::size_t i = 0;
    for (; i + lanes <= n; i += lanes) sum += load(x + i) * load(y + i);
    float total = 0.0f;
    for (int lane = 0; lane < lanes; ++lane) total += sum[lane];
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
    for (; i < n; ++i) total += widen(x[i]) * widen(y[i]);
    return total;
}

constexpr fusion::Variant variant = {FUSION_VARIANT_NAME, lanes, dot, dot_bf16};

}  // namespace

extern "C" const fusion::Variant *FUSION_VARIANT_ENTRY() { return &variant; }
