// Packed operands of the backward: a tile of query rows of one head, and a tile of keys with its sums of gradients.
//
//   q, dout            [row][word]                    like q in the forward
//   q_rows, dout_rows  [column][rows / depth]         transposed; a word has elements of consecutive rows
//   k, v               [key panel][word][key]         like k in the forward
//   k_keys             [column panel][keys / depth][column]   like v in the forward
//
// In the second operand of products that sum over rows or keys, non-finite elements are replaced by zeros and their
// rows or panels are flagged: 0 * NaN is NaN, and hidden keys have a weight of 0.

#pragma once

#include "dense/pack.h"
#include "simd/dropout_scale.h"

namespace fusion {
namespace {

template <class Format> constexpr std::int64_t tile_keys = 128 * Format::depth;

// The largest maximum of a row at which rounding errors of exponents stay below a tenth of those of bfloat16.
constexpr float small_peak = 1024.0f;

constexpr std::uint8_t nonfinite_q = 1, nonfinite_dout = 2,
                       nonfinite_statistics = 4;  // bits of a row whose statistics or D are not finite

template <class Format> struct RowPart {
    using Word = typename Format::Word;
    std::int64_t padded, deep;  // rows rounded up to blocks; words of a transposed row
    Word *q, *dout, *q_rows, *dout_rows;
    float *dq;                                     // [padded][columns], before scale
    float *peak, *inverse_sum, *delta;             // the saved maximum, 1 / sum, (dout . out - dlse) / keep_rest()
    float *shift;                                  // if Format::fused: peak * log2_e + log2(sum)
    std::uint8_t *empty, *nonfinite, *large_peak;  // large_peak: the maximum is too large for a shift
    std::size_t bytes;

    RowPart(const Sizes<Format> &sizes, std::int64_t rows, void *memory)
        : padded(round_up<std::int64_t>(rows, block_rows)),
          deep(round_up<std::int64_t>(rows, lanes * Format::depth) / Format::depth) {
        Carver carver(memory);
        carver.take(q, padded * sizes.words);
        carver.take(dout, padded * sizes.value_words);
        carver.take(q_rows, deep * sizes.columns);
        carver.take(dout_rows, deep * sizes.value_columns);
        carver.take(dq, padded * sizes.columns);
        carver.take(peak, padded);
        carver.take(inverse_sum, padded);
        carver.take(delta, padded);
        carver.take(shift, padded);
        carver.take(empty, padded);
        carver.take(nonfinite, padded);
        carver.take(large_peak, padded);
        bytes = carver.bytes();
    }
};

template <class Format> struct KeyPart {  // a tile of keys, and scratch of a thread
    using Word = typename Format::Word;
    static constexpr std::int64_t keys = tile_keys<Format>, depth = gradient_rows / Format::depth;
    Word *k, *v, *k_keys;
    float *dk, *dv;                     // [panel][column][key]
    float *scores, *dprobs;             // [block_rows][keys]
    float *slopes;                      // with a cap, [block_rows][keys]: derivative of scores by products
    Word *dscores;                      // [block_rows][keys / depth]
    Word *prob_rows, *dscore_rows;      // [panel][rows / depth][key]
    std::uint8_t *visible, *keep;       // [block_rows][keys / 8]
    std::uint8_t *nonfinite, *fresh;    // [panel]; fresh: sums are undefined and count as zero
    std::int64_t *row_begin, *row_end;  // [panel], the range of rows with visible keys in it
    std::size_t bytes;

    KeyPart(const Problem &p, const Sizes<Format> &sizes, void *memory) {
        Carver carver(memory);
        carver.take(k, keys * sizes.words);
        carver.take(v, keys * sizes.value_words);
        carver.take(k_keys, keys / Format::depth * sizes.columns);
        carver.take(dk, keys * sizes.columns);
        carver.take(dv, keys * sizes.value_columns);
        carver.take(scores, block_rows * keys);
        carver.take(dprobs, block_rows * keys);
        carver.take(dscores, block_rows * keys / Format::depth);
        carver.take(prob_rows, keys * depth);
        carver.take(dscore_rows, keys * depth);
        carver.take(visible, block_rows * keys / 8);
        carver.take(keep, block_rows * keys / 8);
        carver.take(nonfinite, keys / panel);
        carver.take(fresh, keys / panel);
        carver.take(row_begin, keys / panel);
        carver.take(row_end, keys / panel);
        carver.take(slopes, p.softcap > 0.0 ? block_rows * keys : 0);
        bytes = carver.bytes();
    }
};

// -------------------------------------------------------------------------------------------------------------- rows

template <class T> bool has_nonfinite(const T *row, std::int64_t n) {
    Words nonfinite = {};
    for (std::int64_t d = 0; d < n; d += lanes) nonfinite |= not_finite(bits_of(load_floats(row + d, n - d)));
    return any(nonfinite);
}

// Packs a row of dout; returns a vector whose lanes sum to dout . out.
template <class Format, class T>
FUSION_INLINE Floats pack_dout(const T *dout, const T *out, std::int64_t n, std::int64_t words,
                               typename Format::Word *to) {
    constexpr std::int64_t width = lanes * Format::depth;
    Floats sum = {};
    std::int64_t d = 0;
    for (; (d + lanes) * Format::depth <= n; d += lanes) {
        const Words row = load_words<Format>(dout + d * Format::depth, 0, width);
        store(to + d, row);
        sum = Format::dot(sum, row, load_words<Format>(out + d * Format::depth, 0, width));
    }
    if (d < words) sum = Format::dot(sum, pack_tail<Format>(dout, d, n, words, to), load_words<Format>(out, d, n));
    return sum;
}

// Transposes a square of `lanes` words by `lanes` columns, all of which exist. With two rows per word, a vector of both
// rows is interleaved first, and one half of its columns (Half) forms the square. Addresses advance by four rows,
// because the compiler would compute all of them in advance and spill them.
template <class Format, class T, bool Zeroed, int Half>
__attribute__((noinline)) Words transpose_words(const T *row, std::int64_t stride, std::int64_t deep,
                                                typename Format::Word *to) {
    Words nonfinite = {}, block[lanes];
    FUSION_UNROLL for (int i = 0; i < lanes; i += 4) {
        FUSION_UNROLL for (int j = i; j < i + 4; ++j, row += Format::depth * stride) {
            if constexpr (Format::depth == 1) {
                block[j] = checked<Format, Zeroed>(bits_of(load_floats(row, lanes)), nonfinite);
            } else if constexpr (Half == 0 || Zeroed) {
                const Words low = checked<Format, Zeroed>(load<Words>(row), nonfinite);
                const Words high = checked<Format, Zeroed>(load<Words>(row + stride), nonfinite);
                block[j] = Format::template unpack<Half == 1>(low, high);
            } else {  // the first half has checked them
                block[j] = Format::template unpack<true>(load<Words>(row), load<Words>(row + stride));
            }
        }
        __asm__("" : "+r"(row));
    }
    transpose(block);
    to += 4 * Half * deep;
    FUSION_UNROLL for (int i = 0; i < lanes; i += 4, to += 4 * Format::depth * deep) {
        FUSION_UNROLL for (int j = 0; j < 4; ++j) {
            store(to + j * deep, block[i + j]);
            __builtin_prefetch(to + j * deep + lanes, 1);  // destination of the next rows
        }
        __asm__("" : "+r"(to));
    }
    return nonfinite;
}

// Transposes one vector of columns if some are missing: `here` rows of at most n elements.
template <class Format, class T, bool Zeroed>
__attribute__((noinline)) Words transpose_some(const T *first, std::int64_t stride, std::int64_t here, std::int64_t n,
                                               std::int64_t deep, typename Format::Word *to) {
    Words nonfinite = {}, block[lanes];
    for (int i = 0; i < lanes; ++i) {
        const std::int64_t row = i * Format::depth;
        block[i] = row < here
                       ? value_words<Format, T, Zeroed>(first + row * stride, stride, row + 1 < here, n, nonfinite)
                       : Words{};
    }
    transpose(block);
    for (int i = 0; i < lanes; ++i) store(to + i * deep, block[i]);
    return nonfinite;
}

// Transposes rows of n elements, with zeros for non-finite elements; returns true if there was one. Packs all elements
// first and repeats with zeros in the rare case.
template <class Format, class T, bool Zeroed = false>
bool pack_transposed(const T *first, std::int64_t stride, std::int64_t rows, std::int64_t n, std::int64_t deep,
                     typename Format::Word *to) {
    constexpr std::int64_t side = lanes * Format::depth;
    Words nonfinite = {};
    for (std::int64_t at = 0; at < deep; at += lanes) {
        const T *row = first + at * Format::depth * stride;
        const std::int64_t here = rows - at * Format::depth;
        std::int64_t d = 0;
        for (; here >= side && d + side <= n; d += side) {
            nonfinite |= transpose_words<Format, T, Zeroed, 0>(row + d, stride, deep, to + d * deep + at);
            if constexpr (Format::depth == 1) continue;
            nonfinite |=
                transpose_words<Format, T, Zeroed, Format::depth - 1>(row + d, stride, deep, to + d * deep + at);
        }
        for (; d < n; d += lanes) {
            nonfinite |= transpose_some<Format, T, Zeroed>(row + d, stride, here, n - d, deep, to + d * deep + at);
        }
    }
    if (!any_nonfinite<Format>(nonfinite)) return false;
    if constexpr (!Zeroed) pack_transposed<Format, T, true>(first, stride, rows, n, deep, to);
    return true;
}

// Packs the words of rows from i on, at most a vector of rows; returns dout . out of each.
template <class Format, class T>
Floats pack_words(const Job &job, const Sizes<Format> &sizes, const RowPart<Format> &layout, const RowTile &tile,
                  std::int64_t i, std::int64_t here) {
    constexpr std::int64_t ahead =
        16;  // rows of one head are far apart in most layouts, where hardware prefetchers fail
    const Problem &p = *job.problem;
    const Operands &o = *job.operands;
    const std::int64_t b = tile.seq, h = tile.head, row = tile.row0 + i;
    const T *q = row_of<const T>(o.q, b, h, row), *dout = row_of<const T>(job.gradients->dout, b, h, row);
    const T *out = row_of<const T>(o.out, b, h, row);
    Floats dots[lanes] = {};
    for (std::int64_t e = 0; e < here; ++e) {
        if (row + e + ahead < tile.row1) {
            prefetch(q + ahead * o.q.stride_token, p.dim_qk);
            prefetch(dout + ahead * job.gradients->dout.stride_token, p.dim_v);
            prefetch(out + ahead * o.out.stride_token, p.dim_v);
        }
        pack_query<Format>(q, p.dim_qk, sizes.main_words, layout.q + (i + e) * sizes.words);
        dots[e] = pack_dout<Format>(dout, out, p.dim_v, sizes.value_words, layout.dout + (i + e) * sizes.value_words);
        q += o.q.stride_token;
        dout += job.gradients->dout.stride_token;
        out += o.out.stride_token;
    }
    for (std::int64_t e = 0; p.dim_rope && e < here; ++e) {
        pack_query<Format>(row_of<const T>(o.q_rope, b, h, row + e), p.dim_rope, sizes.words - sizes.main_words,
                           layout.q + (i + e) * sizes.words + sizes.main_words);
    }
    return sums_of(dots);
}

// Packs the statistics of `here` rows from i on, at most a vector of rows; missing rows count as empty.
template <class Format>
void pack_statistics(const Job &job, const RowPart<Format> &layout, const RowTile &tile, std::int64_t i,
                     std::int64_t here, Floats delta, PackedRows &packed) {
    const Operands &o = *job.operands;
    Floats peaks = all(-infinity), sums = all(1.0f);
    for (int e = 0; e < here; ++e) {
        peaks[e] = *row_of<float>(o.max, tile.seq, tile.head, tile.row0 + i + e);
        sums[e] = *row_of<float>(o.sum, tile.seq, tile.head, tile.row0 + i + e);
    }
    if (job.gradients->dlse.base) {
        for (int e = 0; e < here; ++e)
            delta[e] -= *row_of<float>(job.gradients->dlse, tile.seq, tile.head, tile.row0 + i + e);
    }
    const auto empty = peaks == all(-infinity);
    const Floats peak = empty ? Floats{} : peaks, inverse_sum = empty ? Floats{} : 1.0f / sums;
    delta = empty ? Floats{} : delta;
    Floats reduced = delta;
    if (const double rest = keep_rest(*job.problem); rest > 1.0) {
        for (int e = 0; e < lanes; ++e) reduced[e] = static_cast<float>(delta[e] / rest);
    }
    const Words nonfinite = not_finite(bits_of(peak)) | not_finite(bits_of(inverse_sum)) | not_finite(bits_of(delta));
    store(layout.peak + i, peak);
    store(layout.inverse_sum + i, inverse_sum);
    store(layout.delta + i, reduced);
    store(layout.empty + i, __builtin_convertvector((Words)empty & 1, Bytes));
    store(layout.nonfinite + i, __builtin_convertvector(nonfinite & nonfinite_statistics, Bytes));
    if constexpr (Format::fused) {
        const auto small = (peak <= all(small_peak)) & (peak >= all(-small_peak));
        store(layout.large_peak + i, __builtin_convertvector(~(Words)small & 1, Bytes));
        store(layout.shift + i, peak * log2_e + Format::log2(sums));
    }
    for (int e = 0; e < here; ++e) {
        if (empty[e]) packed.means += sums[e] > 0.0f;
        else if (job.problem->has_sink)
            packed.dsink -= delta[e] * (__builtin_expf(o.sink[tile.head] - peak[e]) / sums[e]);
    }
}

template <class Format, class T>
void record_nonfinite_rows(const Job &job, const RowTile &tile, const RowPart<Format> &layout) {
    const Problem &p = *job.problem;
    const Operands &o = *job.operands;
    for (std::int64_t i = 0; i < tile.row1 - tile.row0; ++i) {
        const std::int64_t row = tile.row0 + i;
        bool q = has_nonfinite(row_of<const T>(o.q, tile.seq, tile.head, row), p.dim_qk);
        if (p.dim_rope) q |= has_nonfinite(row_of<const T>(o.q_rope, tile.seq, tile.head, row), p.dim_rope);
        const bool dout = has_nonfinite(row_of<const T>(job.gradients->dout, tile.seq, tile.head, row), p.dim_v);
        layout.nonfinite[i] =
            static_cast<std::uint8_t>(layout.nonfinite[i] | (q ? nonfinite_q : 0) | (dout ? nonfinite_dout : 0));
    }
}

template <class Format, class T> PackedRows pack_rows(const Job &job, const RowTile &tile) {
    const Problem &p = *job.problem;
    const Operands &o = *job.operands;
    const Rows &dout = job.gradients->dout;
    const Sizes<Format> sizes(p);
    const std::int64_t rows = tile.row1 - tile.row0;
    const RowPart<Format> layout(sizes, rows, tile.memory);
    const std::int64_t b = tile.seq, h = tile.head;
    PackedRows packed = {};
    for (std::int64_t i = 0; i < rows; i += lanes) {
        const std::int64_t here = least<std::int64_t>(lanes, rows - i);
        pack_statistics(job, layout, tile, i, here, pack_words<Format, T>(job, sizes, layout, tile, i, here), packed);
    }
    std::memset(layout.q + rows * sizes.words, 0, (layout.padded - rows) * sizes.words * sizeof *layout.q);
    std::memset(layout.dout + rows * sizes.value_words, 0,
                (layout.padded - rows) * sizes.value_words * sizeof *layout.dout);
    bool nonfinite = pack_transposed<Format>(row_of<const T>(o.q, b, h, tile.row0), o.q.stride_token, rows, p.dim_qk,
                                             layout.deep, layout.q_rows);
    if (p.dim_rope) {
        nonfinite |= pack_transposed<Format>(row_of<const T>(o.q_rope, b, h, tile.row0), o.q_rope.stride_token, rows,
                                             p.dim_rope, layout.deep, layout.q_rows + sizes.main_columns * layout.deep);
    }
    nonfinite |= pack_transposed<Format>(row_of<const T>(dout, b, h, tile.row0), dout.stride_token, rows, p.dim_v,
                                         layout.deep, layout.dout_rows);
    if (nonfinite) record_nonfinite_rows<Format, T>(job, tile, layout);
    return packed;
}

// -------------------------------------------------------------------------------------------------------------- keys

template <class Format, class T> void load_keys(const Job &job, const KeyTile &tile) {
    const Problem &p = *job.problem;
    const Operands &o = *job.operands;
    const Sizes<Format> sizes(p);
    const KeyPart<Format> layout(p, sizes, tile.memory);
    const std::int64_t count = tile.key1 - tile.key0;
    for (std::int64_t at = 0; at < count; at += panel) {
        const std::int64_t here = least<std::int64_t>(panel, count - at), key = tile.key0 + at;
        const std::int64_t b = tile.seq, h = tile.head;
        for (std::int64_t i = key + panel; i < least(key + 2 * panel, tile.key1); ++i) {
            prefetch(row_of<const T>(o.k, b, h, i), p.dim_qk);
            prefetch(row_of<const T>(o.v, b, h, i), p.dim_v);
        }
        pack_key_panel<Format, T>(p, o, sizes, b, h, key, here, layout.k + at * sizes.words);
        pack_keys<Format>(row_of<const T>(o.v, b, h, key), o.v.stride_token, here, p.dim_v, sizes.value_words,
                          layout.v + at * sizes.value_words);
        constexpr std::int64_t deep = tile_keys<Format> / Format::depth;
        bool nonfinite = pack_values<Format>(row_of<const T>(o.k, b, h, key), o.k.stride_token, here, p.dim_qk, deep,
                                             at, layout.k_keys);
        if (p.dim_rope) {
            nonfinite |= pack_values<Format>(row_of<const T>(o.k_rope, b, h, key), o.k_rope.stride_token, here,
                                             p.dim_rope, deep, at, layout.k_keys + sizes.main_columns * deep);
        }
        layout.nonfinite[at / panel] = nonfinite;
    }
    std::memset(layout.fresh, 1, tile_keys<Format> / panel);
}

}  // namespace
}  // namespace fusion
