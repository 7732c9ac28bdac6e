// The vector layer: the widest vectors of the instruction set this is compiled for, as GCC and Clang vector types.
//
// Intrinsics appear only where the portable form is much slower. Everything is local to the including file and inlined.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FUSION_INLINE inline __attribute__((always_inline))
#define FUSION_UNROLL _Pragma("GCC unroll 32")

namespace fusion {
namespace {

// block_rows x panel_vectors accumulators, panel_vectors operands and one broadcast fill the register file.
#if defined(__AVX512F__)
constexpr int lanes = 16, block_rows = 12, panel_vectors = 2;
#elif defined(__AVX__)
constexpr int lanes = 8, block_rows = 6, panel_vectors = 2;
#elif defined(__aarch64__)
constexpr int lanes = 4, block_rows = 6, panel_vectors = 4;
#else
constexpr int lanes = 4, block_rows = 6, panel_vectors = 2;
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

template <class T> FUSION_INLINE T least(T a, T b) { return b < a ? b : a; }
template <class T> FUSION_INLINE T most(T a, T b) { return a < b ? b : a; }

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

// x, rounded to float32 here: the compiler may not fuse its product with what follows.
FUSION_INLINE Floats rounded(Floats x) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(x));
#elif defined(__x86_64__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

FUSION_INLINE Ints lane_numbers() {
    Ints out;
    for (int i = 0; i < lanes; ++i) out[i] = i;
    return out;
}

// Where a is NaN the result is b: `larger(constant, x)` keeps a NaN in x.
FUSION_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

FUSION_INLINE float sum_of(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float part[lanes];
    store(part, x);
    for (int n = lanes / 2; n; n /= 2) {
        for (int i = 0; i < n; ++i) part[i] += part[i + n];
    }
    return part[0];
#endif
}

// Where a's or b's lanes are of those whose numbers have the bit `half`, or (Upper) not: of two vectors one.
template <int half, bool Upper, int... I>
FUSION_INLINE Floats folded(Floats a, Floats b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, ((I & half ? lanes : 0) + (I & ~half) + (Upper ? half : 0))...);
}

template <int half> FUSION_INLINE void fold(Floats *x) {
    using Lanes = std::make_integer_sequence<int, lanes>;
    FUSION_UNROLL for (int i = 0; i < half; ++i) {
        x[i] = folded<half, false>(x[i], x[i + half], Lanes{}) + folded<half, true>(x[i], x[i + half], Lanes{});
    }
    if constexpr (half > 1) fold<half / 2>(x);
}

// Lane i is sum_of(x[i]), to the last bit.
FUSION_INLINE Floats sums_of(Floats (&x)[lanes]) {
    fold<lanes / 2>(x);
    return x[0];
}

FUSION_INLINE float largest_of(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float part[lanes];
    store(part, x);
    for (int n = lanes / 2; n; n /= 2) {
        for (int i = 0; i < n; ++i) part[i] = part[i] > part[i + n] ? part[i] : part[i + n];
    }
    return part[0];
#endif
}

FUSION_INLINE bool any(Words x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#else
    std::uint32_t joined = 0;
    for (int i = 0; i < lanes; ++i) joined |= x[i];
    return joined != 0;
#endif
}

// Lane i is yes[i] where bit i is set, else no[i].
FUSION_INLINE Floats pick(std::uint32_t bits, Floats yes, Floats no) {
#if defined(__AVX512F__)
    return (Floats)_mm512_mask_blend_ps((__mmask16)bits, (__m512)no, (__m512)yes);
#else
    const Words own = all(std::uint32_t{1}) << (Words)lane_numbers();
    return (all(bits) & own) != 0 ? yes : no;
#endif
}

// The lanes' bits of a row of bits, from bit `at` on, a multiple of lanes.
FUSION_INLINE std::uint32_t lane_bits(const std::uint8_t *row, std::int64_t at) {
    if constexpr (lanes == 16) {
        std::uint16_t bits;
        std::memcpy(&bits, row + at / 8, 2);  // x86 alone has 16 lanes: the low byte comes first
        return bits;
    }
    return row[at / 8] >> (at % 8);
}

FUSION_INLINE Floats root(Floats x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__)
    return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE__)
    return (Floats)_mm_sqrt_ps((__m128)x);
#else
    for (int i = 0; i < lanes; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

// 2^x for x <= 127, to a relative error of 2e-7, or (degree 6) 8e-8; 0 below the normal numbers, NaN where x is.
template <int degree = 5> FUSION_INLINE Floats exp2(Floats x) {
    // Minimax polynomials of the relative error that are exact at 0, the first also just below 1: the weight of a row's
    // only key is 1. AVX-512 has instructions for x - floor(x) and for
    // p * 2^floor(x), also right for -inf; elsewhere adding `magic` rounds x to the nearest whole number.
#if defined(__AVX512F__)
    const Floats r = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    constexpr float c[][7] = {
        {1.0f, 6.931517124e-1f, 2.401592880e-1f, 5.581867695e-2f, 8.990994655e-3f, 1.879318617e-3f},
        {1.0f, 6.931470e-1f, 2.4022952e-1f, 5.5484153e-2f, 9.678064e-3f, 1.2440877e-3f, 2.1715024e-4f}};
#else
    const Floats magic = all(12582912.0f);  // 1.5 * 2^23: its neighbours are whole numbers
    x = larger(all(-150.0f), x);
    const Floats shifted = x + magic;
    const Floats r = x - (shifted - magic);
    constexpr float c[][7] = {
        {1.0f, 6.931470037e-1f, 2.402224243e-1f, 5.550733581e-2f, 9.671512991e-3f, 1.326472731e-3f},
        {1.0f, 6.931472e-1f, 2.4022648e-1f, 5.5503324e-2f, 9.618437e-3f, 1.3398875e-3f, 1.5353362e-4f}};
#endif
    Floats p = all(c[degree - 5][degree]);
    FUSION_UNROLL for (int i = degree - 1; i >= 0; --i) p = p * r + all(c[degree - 5][i]);
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    const Ints n = (Ints)shifted - (Ints)magic;
    return x < all(-126.5f) ? Floats{} : p * (Floats)((n + 127) << 23);
#endif
}

// ------------------------------------------------------------------------------------------------------- conversions

FUSION_INLINE Words widen(Halves x) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, Words);
#endif
}

FUSION_INLINE Floats to_floats(Half, Halves x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)x);
#else
    const Words wide = widen(x);
    const Words magnitude = (wide & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
    Floats out = floats_of(magnitude + (112u << 23));
    out = exponent == 0x0f800000 ? floats_of(magnitude + (224u << 23)) : out;                      // inf, NaN
    out = exponent == 0 ? floats_of(magnitude + (113u << 23)) - floats_of(all(113u << 23)) : out;  // subnormal
    return floats_of(bits_of(out) | (wide & 0x8000) << 16);
#endif
}

FUSION_INLINE Floats to_floats(Brain, Halves x) { return floats_of(widen(x) << 16); }

#if !defined(__F16C__)
FUSION_INLINE std::uint16_t half_of(float value) {
    std::uint32_t x, out;
    std::memcpy(&x, &value, 4);
    const std::uint32_t sign = x & 0x80000000u;
    x ^= sign;
    if (x >= 143u << 23) {
        out = x > 255u << 23 ? 0x7e00 : 0x7c00;  // NaN, or too large
    } else if (x < 113u << 23) {                 // subnormal: an addition rounds it to the last bit
        const std::uint32_t magic = 126u << 23;
        float a, b;
        std::memcpy(&a, &x, 4);
        std::memcpy(&b, &magic, 4);
        a += b;
        std::memcpy(&x, &a, 4);
        out = x - magic;
    } else {
        out = (x - (112u << 23) + 0xfff + (x >> 13 & 1)) >> 13;
    }
    return static_cast<std::uint16_t>(out | sign >> 16);
}
#endif

FUSION_INLINE Halves from_floats(Half, Floats x) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    Halves out;
    for (int i = 0; i < lanes; ++i) out[i] = half_of(x[i]);
    return out;
#endif
}

FUSION_INLINE Halves from_floats(Brain, Floats x) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    const Words bits = bits_of(x);
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
    const Words quiet = bits >> 16 | 0x40;
    return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded, Halves);
#endif
}

// The first n elements of a row as floats (n may exceed lanes, or be negative), zeros behind them.
FUSION_INLINE Floats load_floats(const float *from, std::int64_t n) {
    if (n >= lanes) return load<Floats>(from);
    Floats out = {};
    if (n > 0) std::memcpy(&out, from, n * 4);
    return out;
}
template <class T> FUSION_INLINE Halves load_halves(const T *from, std::int64_t n) {
    if (n >= lanes) return load<Halves>(from);
    Halves out = {};
    if (n > 0) std::memcpy(&out, from, n * 2);
    return out;
}
template <class T> FUSION_INLINE Floats load_floats(const T *from, std::int64_t n) {
    return to_floats(T{}, load_halves(from, n));
}

FUSION_INLINE void store_floats(float *to, Floats x, std::int64_t n) {
    if (n >= lanes) return store(to, x);
    std::memcpy(to, &x, n * 4);
}
template <class T> FUSION_INLINE void store_floats(T *to, Floats x, std::int64_t n) {
    const Halves out = from_floats(T{}, x);
    if (n >= lanes) return store(to, out);
    std::memcpy(to, &out, n * 2);
}

// Two vectors beside each other.
template <class T> FUSION_INLINE void store_both(T *to, Floats low, Floats high) {
    store_floats(to, low, lanes);
    store_floats(to + lanes, high, lanes);
}
#if defined(__AVX512BF16__)
FUSION_INLINE void store_both(Brain *to, Floats low, Floats high) {
    store(to, (Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
#endif

// n elements times a factor; `from` is filled up to whole vectors.
template <class T> FUSION_INLINE void store_scaled(T *to, const float *from, std::int64_t n, float factor) {
    std::int64_t d = 0;
    for (; d + 2 * lanes <= n; d += 2 * lanes) {
        store_both(to + d, load<Floats>(from + d) * factor, load<Floats>(from + d + lanes) * factor);
    }
    for (; d < n; d += lanes) store_floats(to + d, load<Floats>(from + d) * factor, n - d);
}

// --------------------------------------------------------------------------------------------------------- transpose

template <int... I> FUSION_INLINE Words interleave_low(Words a, Words b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / 2 + I % 2 * lanes)...);
}
template <int... I> FUSION_INLINE Words interleave_high(Words a, Words b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / 2 + lanes / 2 + I % 2 * lanes)...);
}

FUSION_INLINE void transpose(Words (&r)[lanes]) {
#if defined(__AVX512F__)
    // Half of the steps interleave within 128 bits: more ports do that than permute whole registers. Four rows at a
    // time, so that no more values are alive than there are registers.
    __m512i t[lanes];
    FUSION_UNROLL for (int i = 0; i < lanes; i += 4) {
        const __m512i low = _mm512_unpacklo_epi32((__m512i)r[i], (__m512i)r[i + 1]);
        const __m512i high = _mm512_unpackhi_epi32((__m512i)r[i], (__m512i)r[i + 1]);
        const __m512i low_after = _mm512_unpacklo_epi32((__m512i)r[i + 2], (__m512i)r[i + 3]);
        const __m512i high_after = _mm512_unpackhi_epi32((__m512i)r[i + 2], (__m512i)r[i + 3]);
        t[i] = _mm512_unpacklo_epi64(low, low_after);
        t[i + 1] = _mm512_unpackhi_epi64(low, low_after);
        t[i + 2] = _mm512_unpacklo_epi64(high, high_after);
        t[i + 3] = _mm512_unpackhi_epi64(high, high_after);
    }
    FUSION_UNROLL for (int i = 0; i < 4; ++i) {  // of each of four rows, 128 bits of column i + 4 * (their place)
        const __m512i even = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88),
                      odd = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        const __m512i even_low = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
        r[i] = (Words)_mm512_shuffle_i32x4(even, even_low, 0x88);
        r[i + 4] = (Words)_mm512_shuffle_i32x4(odd, odd_low, 0x88);
        r[i + 8] = (Words)_mm512_shuffle_i32x4(even, even_low, 0xdd);
        r[i + 12] = (Words)_mm512_shuffle_i32x4(odd, odd_low, 0xdd);
    }
#else
    using Lanes = std::make_integer_sequence<int, lanes>;
    FUSION_UNROLL for (int stage = 1; stage < lanes; stage *= 2) {
        Words t[lanes];
        FUSION_UNROLL for (int i = 0; i < lanes / 2; ++i) {
            t[2 * i] = interleave_low(r[i], r[i + lanes / 2], Lanes{});
            t[2 * i + 1] = interleave_high(r[i], r[i + lanes / 2], Lanes{});
        }
        FUSION_UNROLL for (int i = 0; i < lanes; ++i) r[i] = t[i];
    }
#endif
}

// ------------------------------------------------------------------------------------------ what a product multiplies

// One element per word, multiplied as float32.
struct Single {
    using Word = float;
    static constexpr int depth = 1;  // elements per word
    // Weights are 2^((score - peak) * factor): exact near the peak, as a float32 result needs.
    static constexpr bool fused = false;

    static FUSION_INLINE Floats dot(Floats sum, Word a, Words b) { return sum + all(a) * floats_of(b); }
    static FUSION_INLINE Floats dot(Floats sum, Words a, Words b) { return sum + floats_of(a) * floats_of(b); }
    static FUSION_INLINE void put(Word *row, std::int64_t at, Floats low, Floats high) {
        store(row + at, low);
        store(row + at + lanes, high);
    }
    static FUSION_INLINE float get(const Word *row, std::int64_t at) { return row[at]; }
    // One word per lane, which holds the lane of every row.
    static FUSION_INLINE Words stack(const Floats (&rows)[1]) { return bits_of(rows[0]); }
    // The same of twice as many lanes.
    static FUSION_INLINE void stack(const Floats (&low)[1], const Floats (&high)[1], Words (&to)[2]) {
        to[0] = bits_of(low[0]);
        to[1] = bits_of(high[0]);
    }
};

#if defined(__AVX512BF16__)
// Two neighbouring bfloat16 per word; products and sums in float32.
struct Pair {
    using Word = std::uint32_t;
    static constexpr int depth = 2;
    // Weights are 2^(score * factor - shift), one instruction less; the error that they share is taken out at the end.
    static constexpr bool fused = true;

    static FUSION_INLINE Floats dot(Floats sum, Word a, Words b) { return dot(sum, all(a), b); }
    static FUSION_INLINE Floats dot(Floats sum, Words a, Words b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)a);
    }
    static FUSION_INLINE void put(Word *row, std::int64_t at, Floats low, Floats high) {
        store(row + at / 2, (Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
    static FUSION_INLINE float get(const Word *row, std::int64_t at) {
        const std::uint32_t bits = (row[at / 2] >> (at % 2 * 16)) << 16;
        float out;
        std::memcpy(&out, &bits, 4);
        return out;
    }
    // a * b - product, exactly: what rounding the product left.
    static FUSION_INLINE Floats rest(Floats a, Floats b, Floats product) {
        return (Floats)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)product);
    }
    // One word per lane, which holds the lane of both rows.
    static FUSION_INLINE Words stack(const Floats (&rows)[2]) {
        const Both both = joined(rows[0], rows[1]);
        return interleaved<0, lanes>(both, both, std::make_integer_sequence<int, 2 * lanes>{});
    }
    static FUSION_INLINE void stack(const Floats (&low)[2], const Floats (&high)[2], Words (&to)[2]) {
        using Lanes = std::make_integer_sequence<int, 2 * lanes>;
        const Both first = joined(low[0], high[0]), second = joined(low[1], high[1]);
        to[0] = interleaved<0, 2 * lanes>(first, second, Lanes{});
        to[1] = interleaved<lanes, 2 * lanes>(first, second, Lanes{});
    }
    // Elements of two rows beside each other: one word for each of 2 * lanes columns.
    static FUSION_INLINE void pair(Words low, Words high, Words (&to)[2]) {
        using Lanes = std::make_integer_sequence<int, 2 * lanes>;
        to[0] = interleaved<0, 2 * lanes>((Both)low, (Both)high, Lanes{});
        to[1] = interleaved<lanes, 2 * lanes>((Both)low, (Both)high, Lanes{});
    }
    // The same with one instruction for each word: words 4 i ... 4 i + 3 are of columns from 8 i on, or (High) 8 i + 4.
    template <bool High> static FUSION_INLINE Words beside(Words low, Words high) {
        return (Words)(High ? _mm512_unpackhi_epi16((__m512i)low, (__m512i)high)
                            : _mm512_unpacklo_epi16((__m512i)low, (__m512i)high));
    }
    // To an error of 2e-7 beside that of the result's last bit; exact at 1.
    static FUSION_INLINE Floats log2(Floats x) {
        const __m512 m = _mm512_getmant_ps((__m512)x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_nan);
        const __m512 exponent = _mm512_getexp_ps((__m512)x);
        const __mmask16 below = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1.0f), _CMP_LT_OQ);
        const Floats whole = (Floats)_mm512_mask_add_ps(exponent, below, exponent, _mm512_set1_ps(1.0f));
        const Floats s = ((Floats)m - 1.0f) / ((Floats)m + 1.0f), t = s * s;  // log(m) = 2 artanh(s)
        return whole + s * (2 * log2_e * (1.0f + t * (1.0f / 3 + t * (0.2f + t * (1.0f / 7)))));
    }
    // 2^x to a relative error of 9e-5, where rounding to bfloat16 leaves 2e-3; exact at 0.
    static FUSION_INLINE Floats power(Floats x) {
        const Floats r = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        const Floats p = ((7.706704199e-2f * r + 2.276449912e-1f) * r + 6.951167864e-1f) * r + 1.0f;
        return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
    }

private:
    typedef std::uint16_t Both __attribute__((vector_size(lanes * 4)));

    static FUSION_INLINE Both joined(Floats low, Floats high) {
        return (Both)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    }
    template <int From, int Apart, int... I>
    static FUSION_INLINE Words interleaved(Both a, Both b, std::integer_sequence<int, I...>) {
        return (Words)__builtin_shufflevector(a, b, (From + I / 2 + I % 2 * Apart)...);
    }
};
#endif

// C[M][N vectors] = sum over k < depth of A[M][k] * B[k][N vectors], B's rows being Stride vectors apart; with Add and
// fade, fade[i] * C[i] is added to it. Every key tile is summed from zero: one sum over all keys would lose bits.
template <class Format, int M, int N, int Stride, bool Add>
FUSION_INLINE void multiply(const typename Format::Word *a, std::int64_t a_stride, const typename Format::Word *b,
                            std::int64_t depth, float *c, std::int64_t c_stride, const float *fade) {
    Floats sum[M][N];
    FUSION_UNROLL for (int i = 0; i < M; ++i) { FUSION_UNROLL for (int j = 0; j < N; ++j) sum[i][j] = Floats{}; }
#pragma GCC unroll 2
    for (std::int64_t k = 0; k < depth; ++k, b += Stride * lanes) {
        Words right[N];
        FUSION_UNROLL for (int j = 0; j < N; ++j) right[j] = load<Words>(b + j * lanes);
        FUSION_UNROLL for (int i = 0; i < M; ++i) {
            FUSION_UNROLL for (int j = 0; j < N; ++j) {
                sum[i][j] = Format::dot(sum[i][j], a[i * a_stride + k], right[j]);
            }
        }
    }
    FUSION_UNROLL for (int i = 0; i < M; ++i) {
        FUSION_UNROLL for (int j = 0; j < N; ++j) {
            float *at = c + i * c_stride + j * lanes;
            if (Add && fade) sum[i][j] += load<Floats>(at) * all(fade[i]);
            store(at, sum[i][j]);
        }
    }
}

}  // namespace
}  // namespace fusion
