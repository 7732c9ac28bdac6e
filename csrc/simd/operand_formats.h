// Operand formats of products: words of one float32 (Single) or two bfloat16 (Pair).

#pragma once

#include "simd/vec.h"

namespace fusion {
namespace {

// Operands with one float32 per word.
struct Single {
    using Word = float;
    static constexpr int depth = 1;  // elements per word
    // Weights are 2^((score - peak) * factor), which is accurate near the peak, as float32 results require.
    static constexpr bool fused = false;
    static constexpr int step = 1;  // words per instruction of a product; depths are multiples of it

    static FUSION_INLINE Floats dot(Floats sum, Word a, Words b) { return sum + all(a) * floats_of(b); }
    static FUSION_INLINE Floats dot(Floats sum, Words a, Words b) { return sum + floats_of(a) * floats_of(b); }
    static FUSION_INLINE void store_elements(Word *row, std::int64_t at, Floats low, Floats high) {
        store(row + at, low);
        store(row + at + lanes, high);
    }
    static FUSION_INLINE float get(const Word *row, std::int64_t at) { return row[at]; }
    // One word per lane, with that lane of every row.
    static FUSION_INLINE Words join(const Floats (&rows)[1]) { return bits_of(rows[0]); }
    // The same for twice as many lanes.
    static FUSION_INLINE void join(const Floats (&low)[1], const Floats (&high)[1], Words (&to)[2]) {
        to[0] = bits_of(low[0]);
        to[1] = bits_of(high[0]);
    }
};

#if defined(FUSION_BRAIN_PRODUCTS)
// Operands with two contiguous bfloat16 per word; products and sums are float32.
struct Pair {
    using Word = std::uint32_t;
    static constexpr int depth = 2;
    // Weights are 2^(score * factor - shift), which saves an instruction; their common error is removed at the end.
    static constexpr bool fused = true;
#if defined(FUSION_TILES)
    static constexpr int step = 16;
#else
    static constexpr int step = 1;
#endif

    static FUSION_INLINE Floats dot(Floats sum, Word a, Words b) { return dot(sum, all(a), b); }
    static FUSION_INLINE Floats dot(Floats sum, Words a, Words b) { return dot_brains(sum, a, b); }
    static FUSION_INLINE void store_elements(Word *row, std::int64_t at, Floats low, Floats high) {
        store(row + at / 2, brains_of(low, high));
    }
    static FUSION_INLINE float get(const Word *row, std::int64_t at) {
        const std::uint32_t bits = (row[at / 2] >> (at % 2 * 16)) << 16;
        float out;
        std::memcpy(&out, &bits, 4);
        return out;
    }
    // The rounding error of a product: a * b - product, rounded once.
    static FUSION_INLINE Floats rest(Floats a, Floats b, Floats product) { return fused_difference(a, b, product); }
    // One word per lane, with that lane of both rows.
    static FUSION_INLINE Words join(const Floats (&rows)[2]) {
        const Both both = joined(rows[0], rows[1]);
        return interleaved<0, lanes>(both, both, std::make_integer_sequence<int, 2 * lanes>{});
    }
    static FUSION_INLINE void join(const Floats (&low)[2], const Floats (&high)[2], Words (&to)[2]) {
        using Lanes = std::make_integer_sequence<int, 2 * lanes>;
        const Both first = joined(low[0], high[0]), second = joined(low[1], high[1]);
        to[0] = interleaved<0, 2 * lanes>(first, second, Lanes{});
        to[1] = interleaved<lanes, 2 * lanes>(first, second, Lanes{});
    }
    // Interleaves two rows: one word with both elements for each of 2 * lanes columns.
    static FUSION_INLINE void interleave(Words low, Words high, Words (&to)[2]) {
        using Lanes = std::make_integer_sequence<int, 2 * lanes>;
        to[0] = interleaved<0, 2 * lanes>((Both)low, (Both)high, Lanes{});
        to[1] = interleaved<lanes, 2 * lanes>((Both)low, (Both)high, Lanes{});
    }
    // Interleaves the columns of a panel, after change() of the loaded words. Recursive instead of a loop, because the
    // compiler would estimate a larger size and inline less elsewhere.
    template <int Column = 0, class T, class Change>
    static FUSION_INLINE void interleave_panel(const T *one, const T *two, Word *to, Change change) {
        Words both[2];
        interleave(change(load<Words>(one + Column)), change(load<Words>(two + Column)), both);
        store(to + Column, both[0]);
        store(to + Column + lanes, both[1]);
        if constexpr (Column + 2 * lanes < panel) interleave_panel<Column + 2 * lanes>(one, two, to, change);
    }
    // Like interleave(), with one instruction per word: words 4 i ... 4 i + 3 have columns from 8 i on, or, with High,
    // from 8 i + 4 on.
    template <bool High> static FUSION_INLINE Words unpack(Words low, Words high) {
        return unpack_halves<High>(low, high);
    }
    // log2(x) to an error of 2e-7 plus that of the result's last bit; exact at 1.
    static FUSION_INLINE Floats log2(Floats x) {
        Floats exponent;
        const Floats m = mantissa_of(x, exponent);
        const Floats s = (m - 1.0f) / (m + 1.0f), t = s * s;  // log(m) = 2 artanh(s)
        return exponent + s * (2 * log2_e * (1.0f + t * (1.0f / 3 + t * (0.2f + t * (1.0f / 7)))));
    }
    // 2^x to a relative error of 9e-5; exact at 0. Rounding to bfloat16 has an error of 2e-3.
    static FUSION_INLINE Floats power(Floats x) {
        const Floats r = fraction_of(x);
        const Floats p = ((7.706704199e-2f * r + 2.276449912e-1f) * r + 6.951167864e-1f) * r + 1.0f;
        return scaled_by_power(p, x);
    }

private:
    typedef std::uint16_t Both __attribute__((vector_size(lanes * 4)));

    static FUSION_INLINE Both joined(Floats low, Floats high) { return (Both)brains_of(low, high); }
    template <int From, int Apart, int... I>
    static FUSION_INLINE Words interleaved(Both a, Both b, std::integer_sequence<int, I...>) {
        return (Words)__builtin_shufflevector(a, b, (From + I / 2 + I % 2 * Apart)...);
    }
};
#endif

// Shifts above this are infinite, so that only the peak has a weight: the last bit of such scores is so large that the
// rounding error of the shift could make weights overflow.
constexpr float largest_shift = 0x1p30f;
template <class Format> FUSION_INLINE Floats shift_of(Floats peak, float factor) {
    if constexpr (!Format::fused) return peak;
    const Floats shift = rounded(peak * factor);
    return larger(shift, -shift) < all(largest_shift) ? shift : shift * infinity;
}

}  // namespace
}  // namespace fusion
