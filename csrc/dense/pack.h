// Packing of rows into panels for the products of the forward. Keys and values are converted once for all query heads
// of a group.
//
//   q  [row][word]                     rows of a tile, followed by rope
//   k  [key panel][word][key]          transposed, `panel` keys per panel
//   v  [column panel][keys / depth][column]   `panel` columns per panel, the last panel may be narrower;
//                                      with two elements per word, a word has elements of two consecutive keys
//
// Rows are padded with zeros to complete words and panels. A panel of values with inf or NaN is flagged as nonfinite
// and these elements are packed as zeros: 0 * NaN is NaN, and hidden keys have a probability of 0.

#pragma once

#include "simd/carve.h"

namespace fusion {
namespace {

template <class Format> struct Packed {  // addresses of the packed arrays of a unit
    using Word = typename Format::Word;
    std::int64_t first_key, keys;
    Word *k, *v;
    std::uint8_t *nonfinite;  // one byte per panel of keys

    Packed(const Sizes<Format> &sizes, const Unit &unit)
        : first_key(unit.key_begin), keys(unit.key_end - unit.key_begin), k(reinterpret_cast<Word *>(unit.packed)),
          v(k + keys * sizes.words),
          nonfinite(reinterpret_cast<std::uint8_t *>(v + keys / Format::depth * sizes.value_columns)) {}

    std::size_t bytes() const {
        return round_up<std::size_t>(reinterpret_cast<char *>(nonfinite) - reinterpret_cast<char *>(k) + keys / panel,
                                     64);
    }
    // Address of column `column` (a multiple of panel) of key `at`, from which `width` columns are contiguous.
    Word *values(std::int64_t column, std::int64_t at, std::int64_t width) const {
        return v + column * (keys / Format::depth) + at / Format::depth * width;
    }
};

// Words [d, d + lanes) of a row of n elements, padded with zeros; all zeros for a missing row (n <= 0).
template <class Format, class T> FUSION_INLINE Words load_words(const T *row, std::int64_t d, std::int64_t n) {
    if constexpr (Format::depth == 1) {
        return bits_of(load_floats(row + d, n - d));
    } else {
        const std::int64_t left = n - d * Format::depth;
        if (left >= lanes * Format::depth) return load<Words>(row + d * Format::depth);
        Words out = {};
        if (left > 0) std::memcpy(&out, row + d * Format::depth, left * sizeof(T));
        return out;
    }
}

// Packs the last words of a row, less than a vector.
template <class Format, class T>
__attribute__((noinline)) Words pack_tail(const T *row, std::int64_t d, std::int64_t n, std::int64_t words,
                                          typename Format::Word *to) {
    const Words rest = load_words<Format>(row, d, n);
    std::memcpy(to + d, &rest, (words - d) * 4);
    return rest;
}

template <class Format, class T>
FUSION_INLINE void pack_query(const T *row, std::int64_t n, std::int64_t words, typename Format::Word *to) {
    constexpr std::int64_t width = lanes * Format::depth;
    std::int64_t d = 0;
    for (; (d + lanes) * Format::depth <= n; d += lanes)
        store(to + d, load_words<Format>(row + d * Format::depth, 0, width));
    if (d < words) pack_tail<Format>(row, d, n, words, to);
}

// Transposes an incomplete square of keys and words; not inlined, so that complete squares do not pay for it.
template <class Format, class T>
__attribute__((noinline)) void pack_some_keys(const T *first, std::int64_t stride, std::int64_t here, std::int64_t d,
                                              std::int64_t n, std::int64_t words, typename Format::Word *to) {
    Words block[lanes];
    for (int i = 0; i < lanes; ++i) block[i] = i < here ? load_words<Format>(first + i * stride, d, n) : Words{};
    transpose(block);
    for (int i = 0; i < least<std::int64_t>(lanes, words - d); ++i) store(to + i * panel, block[i]);
}

// Packs one panel of keys: `here` rows of n elements.
template <class Format, class T>
void pack_keys(const T *first, std::int64_t stride, std::int64_t here, std::int64_t n, std::int64_t words,
               typename Format::Word *to) {
    constexpr std::int64_t width = lanes * Format::depth;
    for (std::int64_t d = 0; d < words; d += lanes) {
        for (int c = 0; c < panel; c += lanes) {
            const T *row = first + c * stride;
            auto *const at = to + d * panel + c;
            if (c + lanes > here || (d + lanes) * Format::depth > n) {
                pack_some_keys<Format>(row, stride, here - c, d, n, words, at);
                continue;
            }
            Words block[lanes];
            row += d * Format::depth;
            FUSION_UNROLL for (int i = 0; i < lanes; i += 4, row += 4 * stride) {
                FUSION_UNROLL for (int j = 0; j < 4; ++j) block[i + j] = load_words<Format>(row + j * stride, 0, width);
                __asm__(
                    ""
                    : "+r"(row));  // else the compiler computes the addresses of all rows in advance and spills them
            }
            transpose(block);
            FUSION_UNROLL for (int i = 0; i < lanes; ++i) store(at + i * panel, block[i]);
        }
    }
}

FUSION_INLINE Words not_finite(Words bits) { return (Words)((bits & 0x7f800000) == 0x7f800000); }

// Bits of a word's elements for the test for infinity and NaN: sign bits, and the lowest bits of exponents. Adding the
// latter to a magnitude carries into the sign bit exactly if the exponent is all ones.
template <class Format> constexpr std::uint32_t signs = Format::depth == 1 ? 0x80000000 : 0x80008000;
template <class Format> constexpr std::uint32_t lowest = Format::depth == 1 ? 0x00800000 : 0x00800080;

// Sets the sign bits of non-finite elements in `nonfinite`; with Zeroed, replaces them by zeros.
template <class Format, bool Zeroed> FUSION_INLINE Words checked(Words words, Words &nonfinite) {
    const Words marks = (words & ~signs<Format>)+lowest<Format>;
    nonfinite |= marks;
    if constexpr (Zeroed) {
        const Words ones = (marks & signs<Format>) >> (32 / Format::depth - 1);
        words &= ~(Format::depth == 1 ? -ones : (ones << 16) - ones);
    }
    return words;
}

// Words of values: of one key, or of two consecutive keys, of which the second may not exist.
template <class Format, class T, bool Zeroed>
FUSION_INLINE Words value_words(const T *row, std::int64_t stride, bool second, std::int64_t n, Words &nonfinite) {
    if constexpr (Format::depth == 1) {
        (void)stride, (void)second;
        return checked<Format, Zeroed>(bits_of(load_floats(row, n)), nonfinite);
    } else {
        const Words words = widen(load_halves(row, n)) | (second ? widen(load_halves(row + stride, n)) << 16 : Words{});
        return checked<Format, Zeroed>(words, nonfinite);
    }
}

// The same for all columns of a panel of two consecutive keys; false if words have one element.
template <class Format, class T, bool Zeroed>
FUSION_INLINE bool value_pairs(const T *row, std::int64_t stride, typename Format::Word *to, Words &nonfinite) {
    if constexpr (Format::depth == 1) {
        (void)row, (void)stride, (void)to, (void)nonfinite;
        return false;
    } else {
        Format::interleave_panel(row, row + stride, to, [&](Words words) __attribute__((always_inline)) {
            return checked<Format, Zeroed>(words, nonfinite);
        });
        return true;
    }
}

template <class Format> FUSION_INLINE bool any_nonfinite(Words nonfinite) { return any(nonfinite & signs<Format>); }

// Packs a panel of keys, `here` rows of n elements, at key `key` of the second operand of a product over keys, with
// `deep` words per column and zeros for non-finite elements. Returns true if there was one; packs all elements first
// and repeats with zeros in this rare case.
template <class Format, class T, bool Zeroed = false>
bool pack_values(const T *first, std::int64_t stride, std::int64_t here, std::int64_t n, std::int64_t deep,
                 std::int64_t key, typename Format::Word *to) {
    const std::int64_t columns = round_up<std::int64_t>(n, lanes);
    Words nonfinite = {};
    for (std::int64_t i = 0; i < panel; i += Format::depth) {
        const T *row = first + i * stride;
        for (std::int64_t column = 0; column < columns; column += panel) {
            const std::int64_t width = least<std::int64_t>(panel, columns - column);
            auto *at = to + column * deep + (key + i) / Format::depth * width;
            if (i + 1 < here && column + panel <= n &&
                value_pairs<Format, T, Zeroed>(row + column, stride, at, nonfinite))
                continue;
            for (std::int64_t d = column; d < column + width; d += lanes, at += lanes) {
                store(at, i < here ? value_words<Format, T, Zeroed>(row + d, stride, i + 1 < here, n - d, nonfinite)
                                   : Words{});
            }
        }
    }
    if (!any_nonfinite<Format>(nonfinite)) return false;
    if constexpr (!Zeroed) pack_values<Format, T, true>(first, stride, here, n, deep, key, to);
    return true;
}

// Packs a panel of keys with their rope elements.
template <class Format, class T>
void pack_key_panel(const Problem &p, const Operands &o, const Sizes<Format> &sizes, std::int64_t b, std::int64_t head,
                    std::int64_t key, std::int64_t here, typename Format::Word *to) {
    pack_keys<Format>(row_of<const T>(o.k, b, head, key), o.k.stride_token, here, p.dim_qk, sizes.main_words, to);
    if (!p.dim_rope) return;
    pack_keys<Format>(row_of<const T>(o.k_rope, b, head, key), o.k_rope.stride_token, here, p.dim_rope,
                      sizes.words - sizes.main_words, to + sizes.main_words * panel);
}

template <class Format, class T>
void pack_panels(const Job &job, const Unit &unit, std::int64_t first, std::int64_t end) {
    const Problem &p = *job.problem;
    const Operands &o = *job.operands;
    const Sequence &seq = job.sequences[unit.seq];
    const Sizes<Format> sizes(p);
    const Packed<Format> packed(sizes, unit);
    for (std::int64_t i = first; i < end; ++i) {
        const std::int64_t key = i * panel, token = unit.key_begin + key;
        const std::int64_t here = least<std::int64_t>(panel, seq.kv_len - token);
        pack_key_panel<Format, T>(p, o, sizes, unit.seq, unit.head, token, here, packed.k + key * sizes.words);
        packed.nonfinite[i] = pack_values<Format>(row_of<const T>(o.v, unit.seq, unit.head, token), o.v.stride_token,
                                                  here, p.dim_v, packed.keys / Format::depth, key, packed.v);
    }
}

// Moves packed panels that two units share, in the same memory, from their position in the first unit to that in the
// second. Data move towards lower addresses in ascending order, so that none is overwritten before it is moved.
template <class Format>
void carry_panels(const Problem &p, const Unit &from, const Unit &to, std::int64_t panels) {
    using Word = typename Format::Word;
    const Sizes<Format> sizes(p);
    const Packed<Format> old(sizes, from), fresh(sizes, to);
    const std::int64_t gone = to.key_begin - from.key_begin, keys = panels * panel;
    std::memmove(fresh.k, old.k + gone * sizes.words, keys * sizes.words * sizeof(Word));
    for (std::int64_t d = 0; d < sizes.value_columns; d += panel) {
        const std::int64_t width = least<std::int64_t>(panel, sizes.value_columns - d);
        std::memmove(fresh.values(d, 0, width), old.values(d, gone, width),
                     keys / Format::depth * width * sizeof(Word));
    }
    std::memmove(fresh.nonfinite, old.nonfinite + gone / panel, panels);
}

}  // namespace
}  // namespace fusion
