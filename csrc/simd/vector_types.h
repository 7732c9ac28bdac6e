// The widest vectors of the instruction set of the compilation, as GCC and Clang vector types, and functions on them
// that need no special instructions. All functions are local to the including file and inlined.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Dot-product instructions of the instruction set: of pairs of bfloat16, and of bytes.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(FUSION_TILES_MODEL)
#define FUSION_BRAIN_PRODUCTS
#endif
// Products of tile registers (AMX), or their software model, which runs on any processor.
#if defined(__AMX_BF16__) || defined(FUSION_TILES_MODEL)
#define FUSION_TILES
#endif
#if defined(__AVX512VNNI__) || (defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD))
#define FUSION_BYTE_PRODUCTS
#endif

#define FUSION_INLINE inline __attribute__((always_inline))
#define FUSION_UNROLL _Pragma("GCC unroll 32")
#define FUSION_RARE __attribute__((noinline, cold))  // compiled for size

namespace fusion {
namespace {

// block_rows x panel_vectors accumulators, panel_vectors operands and one broadcast fill the register file; with tiles,
// four accumulators and four operands do. Heights of blocks are multiples of block_rows / block_parts.
#if defined(FUSION_TILES)
constexpr int lanes = 16, block_rows = 32, block_parts = 2, panel_vectors = 2;
#elif defined(__AVX512F__)
constexpr int lanes = 16, block_rows = 12, block_parts = 3, panel_vectors = 2;
#elif defined(__AVX__)
constexpr int lanes = 8, block_rows = 6, block_parts = 3, panel_vectors = 2;
#elif defined(__aarch64__)
constexpr int lanes = 4, block_rows = 6, block_parts = 3, panel_vectors = 4;
#else
constexpr int lanes = 4, block_rows = 6, block_parts = 3, panel_vectors = 2;
#endif
constexpr int panel = panel_vectors * lanes;

typedef float Floats __attribute__((vector_size(lanes * 4)));
typedef std::int32_t Ints __attribute__((vector_size(lanes * 4)));
typedef std::uint32_t Words __attribute__((vector_size(lanes * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(lanes * 2)));
typedef std::uint8_t Bytes __attribute__((vector_size(lanes)));

struct Half {  // IEEE binary16
    std::uint16_t bits;
};
struct Brain {  // bfloat16
    std::uint16_t bits;
};

constexpr float infinity = __builtin_inff(), log2_e = 1.44269504f, least_weight = 1.17549435e-38f;
// Weights below this power of 2 become 0. Products of larger weights with values that matter next to 1 in float32 are
// not subnormal; subnormal operands take a hundred times longer on some CPUs.
constexpr float least_power = -102.0f;

template <class T> constexpr FUSION_INLINE T least(T a, T b) { return b < a ? b : a; }
template <class T> constexpr FUSION_INLINE T most(T a, T b) { return a < b ? b : a; }

template <class V> FUSION_INLINE V load(const void *from) {  // unaligned
    V out;
    std::memcpy(&out, from, sizeof out);
    return out;
}
template <class V> FUSION_INLINE void store(void *to, V value) { std::memcpy(to, &value, sizeof value); }

FUSION_INLINE Floats all(float x) { return x - Floats{}; }
FUSION_INLINE Words all(std::uint32_t x) { return x + Words{}; }
FUSION_INLINE Ints all(std::int32_t x) { return x + Ints{}; }
FUSION_INLINE Words bits_of(Floats x) { return (Words)x; }
FUSION_INLINE Floats floats_of(Words x) { return (Floats)x; }

// Upper halves of floats, rounded to nearest, ties to even.
FUSION_INLINE Halves upper_halves(Floats x) {
    const Words bits = bits_of(x);
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Words quiet = bits >> 16 | 0x40;
    return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded, Halves);
}

FUSION_INLINE Ints lane_numbers() {
    Ints out;
    for (int i = 0; i < lanes; ++i) out[i] = i;
    return out;
}

// The maximum; b if a or b is NaN, so `larger(constant, x)` keeps a NaN in x.
FUSION_INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)  // GCC would compare with a constant and then select
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

}  // namespace
}  // namespace fusion
