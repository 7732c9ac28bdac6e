// What the backward multiplies, packed: a tile of query rows of one head, and a tile of keys with what is added up there.
//
//   q, dout            [row][word]                    as the forward's q
//   q_rows, dout_rows  [column][rows / depth]         transposed; a word holds neighbouring rows' elements
//   k, v               [key panel][word][key]         as the forward's k
//   k_keys             [column panel][keys / depth][column]   as the forward's v
//
// The last operand of each product that sums over rows or keys is packed without its elements that are not finite, and
// notes where they were: 0 * NaN is NaN, and a weight of 0 may stand for "not seen".

#pragma once

#include "pack.h"

namespace fusion {
namespace {

template <class Format> constexpr std::int64_t tile_keys = 128 * Format::depth;

template <class Format> struct GradientSizes {
    std::int64_t main_words, words, value_words;        // of rows of q and k without and with rope, and of v and dout
    std::int64_t main_columns, columns, value_columns;  // the same in elements, each part in whole vectors

    explicit GradientSizes(const Problem &p)
        : main_words((p.dim_qk + Format::depth - 1) / Format::depth),
          words(main_words + (p.dim_rope + Format::depth - 1) / Format::depth),
          value_words((p.dim_v + Format::depth - 1) / Format::depth), main_columns(round_up<std::int64_t>(p.dim_qk, lanes)),
          columns(main_columns + round_up<std::int64_t>(p.dim_rope, lanes)),
          value_columns(round_up<std::int64_t>(p.dim_v, lanes)) {}
};

class Carver {  // cuts memory into parts that begin on cache lines
public:
    explicit Carver(void *memory) : start_(static_cast<char *>(memory)), at_(start_) {}

    template <class T> FUSION_INLINE void take(T *&part, std::int64_t count) {
        part = reinterpret_cast<T *>(at_);
        at_ += round_up<std::size_t>(count * sizeof(T), 64);
    }
    FUSION_INLINE std::size_t bytes() const { return at_ - start_; }

private:
    char *start_, *at_;
};

// Up to this maximum of a row, rounding errors of exponents stay below a tenth of those of bfloat16.
constexpr float near_peak = 1024.0f;

constexpr std::uint8_t wild_q = 1, wild_dout = 2;

template <class Format> struct RowPart {
    using Word = typename Format::Word;
    std::int64_t padded, deep;  // rows in whole blocks; words of a transposed row
    Word *q, *dout, *q_rows, *dout_rows;
    float *dq;                    // [padded][columns], before scale
    float *peak, *share, *delta;  // the saved maximum, 1 / sum, dout . out
    float *shift;                 // where Format::fused: peak * log2_e + log2(sum)
    std::uint8_t *empty, *wild, *far;  // far: the maximum is too large for a shift
    std::size_t bytes;

    RowPart(const GradientSizes<Format> &sizes, std::int64_t rows, void *memory)
        : padded(round_up<std::int64_t>(rows, block_rows)),
          deep(round_up<std::int64_t>(rows, lanes * Format::depth) / Format::depth) {
        Carver carver(memory);
        carver.take(q, padded * sizes.words);
        carver.take(dout, padded * sizes.value_words);
        carver.take(q_rows, deep * sizes.columns);
        carver.take(dout_rows, deep * sizes.value_columns);
        carver.take(dq, padded * sizes.columns);
        carver.take(peak, padded);
        carver.take(share, padded);
        carver.take(delta, padded);
        carver.take(shift, padded);
        carver.take(empty, padded);
        carver.take(wild, padded);
        carver.take(far, padded);
        bytes = carver.bytes();
    }
};

template <class Format> struct KeyPart {  // and one thread's scratch
    using Word = typename Format::Word;
    static constexpr std::int64_t keys = tile_keys<Format>, depth = gradient_rows / Format::depth;
    Word *k, *v, *k_keys;
    float *dk, *dv;              // [panel][column][key]
    float *scores, *dprobs;      // [block_rows][keys]
    Word *dscores;               // [block_rows][keys / depth]
    Word *prob_rows, *dscore_rows;  // [panel][rows / depth][key]
    std::uint8_t *seen, *keep;   // [block_rows][keys / 8]
    std::uint8_t *wild;          // [panel]
    std::int64_t *row_begin, *row_end;  // [panel], the rows of a tile that meet it
    std::size_t bytes;

    KeyPart(const GradientSizes<Format> &sizes, void *memory) {
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
        carver.take(seen, block_rows * keys / 8);
        carver.take(keep, block_rows * keys / 8);
        carver.take(wild, keys / panel);
        carver.take(row_begin, keys / panel);
        carver.take(row_end, keys / panel);
        bytes = carver.bytes();
    }
};

// -------------------------------------------------------------------------------------------------------------- rows

template <class T> bool has_wild(const T *row, std::int64_t n) {
    Words wild = {};
    for (std::int64_t d = 0; d < n; d += lanes) wild |= not_finite(bits_of(load_floats(row + d, n - d)));
    return any(wild);
}

template <class T> Floats dot_rows(const T *x, const T *y, std::int64_t n) {
    Floats sum = {};
    for (std::int64_t d = 0; d < n; d += lanes) sum += load_floats(x + d, n - d) * load_floats(y + d, n - d);
    return sum;
}

// Rows of n elements, transposed and tame; returns whether any element was not finite. Few are: first all are packed.
template <class Format, class T, bool Tame = false>
bool pack_transposed(const T *first, std::int64_t stride, std::int64_t rows, std::int64_t n, std::int64_t deep,
                     typename Format::Word *to) {
    Words wild = {};
    for (std::int64_t at = 0; at < deep; at += lanes) {
        for (std::int64_t d = 0; d < n; d += lanes) {
            Words block[lanes];
            FUSION_UNROLL for (int i = 0; i < lanes; ++i) {
                const std::int64_t row = (at + i) * Format::depth;
                const T *from = first + row * stride + d;
                block[i] = row < rows ? value_words<Format, T, Tame>(from, stride, row + 1 < rows, n - d, wild) : Words{};
            }
            transpose(block);
            FUSION_UNROLL for (int i = 0; i < lanes; ++i) {
                store(to + (d + i) * deep + at, block[i]);
                __builtin_prefetch(to + (d + i) * deep + at + lanes, 1);  // where the next rows go
            }
        }
    }
    if (!any_wild<Format>(wild)) return false;
    if constexpr (!Tame) pack_transposed<Format, T, true>(first, stride, rows, n, deep, to);
    return true;
}

template <class Format, class T>
void pack_row(const Operands &o, const Gradients &g, const Problem &p, const GradientSizes<Format> &sizes,
              const RowPart<Format> &part, const RowTile &tile, std::int64_t i) {
    const std::int64_t row = tile.row0 + i;
    auto *q = part.q + i * sizes.words;
    pack_query<Format>(row_of<const T>(o.q, tile.seq, tile.head, row), p.dim_qk, sizes.main_words, q);
    if (p.dim_rope) {
        pack_query<Format>(row_of<const T>(o.q_rope, tile.seq, tile.head, row), p.dim_rope, sizes.words - sizes.main_words,
                           q + sizes.main_words);
    }
    const T *dout = row_of<const T>(g.dout, tile.seq, tile.head, row);
    pack_query<Format>(dout, p.dim_v, sizes.value_words, part.dout + i * sizes.value_words);
    const float peak = *row_of<float>(o.max, tile.seq, tile.head, row), sum = *row_of<float>(o.sum, tile.seq, tile.head, row);
    part.empty[i] = peak == -infinity;
    part.wild[i] = 0;
    part.peak[i] = part.empty[i] ? 0.0f : peak;
    part.share[i] = part.empty[i] ? 0.0f : 1.0f / sum;
    if constexpr (Format::fused) {
        part.far[i] = !(__builtin_fabsf(part.peak[i]) <= near_peak);
        part.shift[i] = part.peak[i] * log2_e + __builtin_log2f(sum);
    }
    part.delta[i] = part.empty[i] ? 0.0f : sum_of(dot_rows(dout, row_of<const T>(o.out, tile.seq, tile.head, row), p.dim_v));
}

template <class Format, class T> void note_wild_rows(const Job &job, const RowTile &tile, const RowPart<Format> &part) {
    const Problem &p = *job.problem;
    const Operands &o = *job.operands;
    for (std::int64_t i = 0; i < tile.row1 - tile.row0; ++i) {
        const std::int64_t row = tile.row0 + i;
        bool q = has_wild(row_of<const T>(o.q, tile.seq, tile.head, row), p.dim_qk);
        if (p.dim_rope) q |= has_wild(row_of<const T>(o.q_rope, tile.seq, tile.head, row), p.dim_rope);
        const bool dout = has_wild(row_of<const T>(job.gradients->dout, tile.seq, tile.head, row), p.dim_v);
        part.wild[i] = (q ? wild_q : 0) | (dout ? wild_dout : 0);
    }
}

// Packs a tile; dq begins at zero.
template <class Format, class T> RowNotes pack_rows(const Job &job, const RowTile &tile) {
    const Problem &p = *job.problem;
    const Operands &o = *job.operands;
    const Rows &dout = job.gradients->dout;
    const GradientSizes<Format> sizes(p);
    const std::int64_t rows = tile.row1 - tile.row0;
    const RowPart<Format> part(sizes, rows, tile.memory);
    const std::int64_t b = tile.seq, h = tile.head;
    RowNotes notes = {};
    constexpr std::int64_t ahead = 16;  // rows of one head lie far apart in most layouts, where no hardware follows
    for (std::int64_t i = 0; i < rows; ++i) {
        if (i + ahead < rows) {
            const std::int64_t later = tile.row0 + i + ahead;
            prefetch(row_of<const T>(o.q, b, h, later), p.dim_qk);
            prefetch(row_of<const T>(dout, b, h, later), p.dim_v);
            prefetch(row_of<const T>(o.out, b, h, later), p.dim_v);
        }
        pack_row<Format, T>(o, *job.gradients, p, sizes, part, tile, i);
        const float sum = *row_of<float>(o.sum, b, h, tile.row0 + i);
        if (part.empty[i]) notes.means += sum > 0.0f;
        if (p.has_sink && !part.empty[i]) notes.dsink -= part.delta[i] * (__builtin_expf(o.sink[h] - part.peak[i]) / sum);
    }
    std::memset(part.q + rows * sizes.words, 0, (part.padded - rows) * sizes.words * sizeof *part.q);
    std::memset(part.dout + rows * sizes.value_words, 0, (part.padded - rows) * sizes.value_words * sizeof *part.dout);
    std::memset(part.dq, 0, part.padded * sizes.columns * sizeof *part.dq);
    bool wild = pack_transposed<Format>(row_of<const T>(o.q, b, h, tile.row0), o.q.stride_token, rows, p.dim_qk, part.deep,
                                        part.q_rows);
    if (p.dim_rope) {
        wild |= pack_transposed<Format>(row_of<const T>(o.q_rope, b, h, tile.row0), o.q_rope.stride_token, rows, p.dim_rope,
                                        part.deep, part.q_rows + sizes.main_columns * part.deep);
    }
    wild |= pack_transposed<Format>(row_of<const T>(dout, b, h, tile.row0), dout.stride_token, rows, p.dim_v, part.deep,
                                    part.dout_rows);
    if (wild) note_wild_rows<Format, T>(job, tile, part);
    return notes;
}

// -------------------------------------------------------------------------------------------------------------- keys

// The panel of keys from `at` on, `here` rows of n elements, as the last operand of a product over keys, tame.
template <class Format, class T, bool Tame = false>
bool pack_key_panel(const Rows &rows, const KeyTile &tile, std::int64_t at, std::int64_t here, std::int64_t n,
                    typename Format::Word *to) {
    const std::int64_t columns = round_up<std::int64_t>(n, lanes), stride = rows.stride_token;
    const T *row = row_of<const T>(rows, tile.seq, tile.head, tile.key0 + at);
    Words wild = {};
    for (std::int64_t i = 0; i < panel; i += Format::depth, row += Format::depth * stride) {
        for (std::int64_t column = 0; column < columns; column += panel) {
            const std::int64_t width = least<std::int64_t>(panel, columns - column);
            auto *words = to + column * (tile_keys<Format> / Format::depth) + (at + i) / Format::depth * width;
            for (std::int64_t d = column; d < column + width; d += lanes) {
                store(words + d - column, i < here ? value_words<Format, T, Tame>(row + d, stride, i + 1 < here, n - d, wild)
                                                   : Words{});
            }
        }
    }
    if (!any_wild<Format>(wild)) return false;
    if constexpr (!Tame) pack_key_panel<Format, T, true>(rows, tile, at, here, n, to);
    return true;
}

template <class Format, class T> void load_keys(const Job &job, const KeyTile &tile) {
    const Problem &p = *job.problem;
    const Operands &o = *job.operands;
    const GradientSizes<Format> sizes(p);
    const KeyPart<Format> part(sizes, tile.memory);
    const std::int64_t count = tile.key1 - tile.key0, padded = round_up<std::int64_t>(count, panel);
    for (std::int64_t at = 0; at < count; at += panel) {
        const std::int64_t here = least<std::int64_t>(panel, count - at), key = tile.key0 + at;
        const std::int64_t b = tile.seq, h = tile.head;
        for (std::int64_t i = key + panel; i < least(key + 2 * panel, tile.key1); ++i) {
            prefetch(row_of<const T>(o.k, b, h, i), p.dim_qk);
            prefetch(row_of<const T>(o.v, b, h, i), p.dim_v);
        }
        auto *k = part.k + at * sizes.words;
        pack_keys<Format>(row_of<const T>(o.k, b, h, key), o.k.stride_token, here, p.dim_qk, sizes.main_words, k);
        pack_keys<Format>(row_of<const T>(o.v, b, h, key), o.v.stride_token, here, p.dim_v, sizes.value_words,
                          part.v + at * sizes.value_words);
        bool wild = pack_key_panel<Format, T>(o.k, tile, at, here, p.dim_qk, part.k_keys);
        if (p.dim_rope) {
            pack_keys<Format>(row_of<const T>(o.k_rope, b, h, key), o.k_rope.stride_token, here, p.dim_rope,
                              sizes.words - sizes.main_words, k + sizes.main_words * panel);
            wild |= pack_key_panel<Format, T>(o.k_rope, tile, at, here, p.dim_rope,
                                              part.k_keys + sizes.main_columns * (tile_keys<Format> / Format::depth));
        }
        part.wild[at / panel] = wild;
    }
    std::memset(part.dk, 0, padded * sizes.columns * sizeof *part.dk);
    std::memset(part.dv, 0, padded * sizes.value_columns * sizeof *part.dv);
}

}  // namespace
}  // namespace fusion
