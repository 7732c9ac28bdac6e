// Operands of products with selected keys: the keys of a row's list, their gathered rows, and packed heads.
//
// All heads of a row are multiplied at once. Keys are the rows of the scores and heads their columns, so gathered rows
// need not be transposed:
//
//   rows   [key][word]                           gathered rows, as the first operand
//   across [column panel][keys / depth][column]  the same as the second operand of a product over keys
//   q      [head panel][word][head]              heads, transposed
//   q_rows [column panel][heads / depth][column] the second operand of a product over heads

#pragma once

#include "dense/gradient_pack.h"
#include "data/variant_sparse.h"
#include "simd/prefetch_queue.h"
#include "simd/tile.h"

namespace fusion {
namespace {

template <class T>
FUSION_INLINE const T *row_of(const KeySource &keys, std::int64_t b, std::int64_t head, std::int64_t j) {
    if (!keys.table) return row_of<const T>(keys.rows, b, head, j);
    const std::int64_t page = keys.table[b * keys.stride_table + j / keys.page_size];
    return row_of<const T>(keys.rows, b, head, j % keys.page_size) + page * keys.stride_page;
}

template <class T> FUSION_INLINE const T *row_of(const Keys &keys, std::int64_t b, std::int64_t head, std::int64_t j) {
    const std::int64_t behind = keys.kv_len ? j - keys.kv_len[b] : -1;
    return behind < 0 ? row_of<T>(static_cast<const KeySource &>(keys), b, head, j)
                      : row_of<T>(keys.compressed, b, head, behind);
}

// Loads the indexer's weights of one row, padded with zeros to `pitch`.
inline void load_weights(const SparseProblem &p, const Rows &weights, std::int64_t b, std::int64_t row,
                         std::int64_t pitch, float *to) {
    by_dtype(p.weights_dtype, [&](auto kind) {
        const auto *from = row_of<const decltype(kind)>(weights, b, 0, row);
        for (std::int64_t h = 0; h < pitch; h += lanes) store(to + h, load_floats(from + h, p.heads_q - h));
    });
}

// ---------------------------------------------------------------------------------------------------------- selection

// The end of the keys that are visible to a row.
inline std::int64_t end_key(const SparseProblem &p, const Sequence &seq, std::int64_t row) {
    return least(most((row + seq.hi) / p.ratio, seq.prefix), seq.kv_len);
}

// The number of keys of the second source that are visible to a row.
inline std::int64_t compressed_end(const SparseProblem &p, const Sequence &seq, std::int64_t row) {
    return least(most<std::int64_t>(row + seq.compressed_hi, 0) / p.compressed_ratio, seq.compressed_len);
}

// Expands the keys that a row reads: those of its list, in its order; with two sources, after the band of the first.
// Returns their number. A list ends at its first negative entry; no more entries are read than visible keys could fill.
inline std::int64_t expand(const SparseJob &job, const SparseItem &item, std::int32_t *keys) {
    const SparseProblem &p = *job.problem;
    const Sequence &seq = job.sequences[item.seq];
    std::int64_t first = first_key(seq, item.row), end = end_key(p, seq, item.row), block = p.select_block;
    std::int64_t count = 0, before = 0;
    if (p.compressed_ratio) {
        for (std::int64_t j = first; j < end; ++j) keys[count++] = static_cast<std::int32_t>(j);
        first = 0;
        end = compressed_end(p, seq, item.row);
        before = seq.kv_len;
        if (!p.select_count) {
            for (std::int64_t j = 0; j < end; ++j) keys[count++] = static_cast<std::int32_t>(before + j);
            return count;
        }
    }
    const std::int32_t *list = row_of<const std::int32_t>(job.operands->indices, item.seq, item.head_kv, item.row);
    const std::int64_t slots = least(p.select_count, end <= 0 ? 0 : (end + block - 1) / block);
    if (block == 1) {
        for (std::int64_t s = 0; s < slots && list[s] >= 0; ++s) {
            keys[count] = static_cast<std::int32_t>(before + list[s]);
            count += list[s] >= first && list[s] < end;
        }
        return count;
    }
    for (std::int64_t s = 0; s < slots && list[s] >= 0; ++s) {
        const std::int64_t start = list[s] * block, stop = least(start + block, end);
        for (std::int64_t j = most(start, first); j < stop; ++j) keys[count++] = static_cast<std::int32_t>(before + j);
    }
    return count;
}

// Numbers of heads are rounded up to vectors; if weights of heads are operands of tile registers, to the size of these.
template <class Format> constexpr std::int64_t head_unit = Format::step > 1 ? Format::step * Format::depth : lanes;

constexpr int digit_bits = 11;

// A stable radix sort, ascending by bits [from, to). `spare` has the size of items; returns the array with the result.
template <class T>
T *sort_upward(T *items, T *spare, std::int64_t count, int from, int to, std::uint32_t *histogram) {
    for (int shift = from; shift < to; shift += digit_bits) {
        std::memset(histogram, 0, sizeof(std::uint32_t) << digit_bits);
        for (std::int64_t i = 0; i < count; ++i) ++histogram[items[i] >> shift & ((1 << digit_bits) - 1)];
        std::uint32_t sum = 0;
        for (int d = 0; d < 1 << digit_bits; ++d) {
            const std::uint32_t here = histogram[d];
            histogram[d] = sum;
            sum += here;
        }
        for (std::int64_t i = 0; i < count; ++i)
            spare[histogram[items[i] >> shift & ((1 << digit_bits) - 1)]++] = items[i];
        T *const other = items;
        items = spare;
        spare = other;
    }
    return items;
}

// Writes the numbers of the set bits, counted from `first`, ascending; up to a vector may be written behind them.
// Returns their end.
FUSION_INLINE std::int32_t *set_bits(std::uint32_t bits, std::int32_t first, std::int32_t *to) {
    for (int at = 0; at < 32; at += lanes, bits >>= lanes) {
        const std::uint32_t here = bits & ((1u << lanes) - 1);
        compress(to, lane_numbers() + (first + at), here);
        to += __builtin_popcount(here);
    }
    return to;
}

inline int bits_for(std::int64_t n) {  // number of bits of numbers below n
    int bits = 0;
    while (bits < 62 && (std::int64_t{1} << bits) < n) ++bits;
    return bits;
}

// ------------------------------------------------------------------------------------------------------------ packing

// A vector of columns from column d on, of one row (depth 1) or of two, of which the second may be missing.
template <class Format, class T>
FUSION_INLINE Words column_words(const T *one, const T *two, std::int64_t d, std::int64_t n) {
    const Words low = bits_of(load_floats(one + d, n - d));
    if constexpr (Format::depth == 1) {
        (void)two;
        return low;
    } else {
        return low >> 16 | (two ? bits_of(load_floats(two + d, n - d)) : Words{});
    }
}

// Stores rows of n elements as word row `at` of [column panel][deep][column].
template <class Format, class T>
FUSION_INLINE void store_across(const T *one, const T *two, std::int64_t n, typename Format::Word *to,
                                std::int64_t deep, std::int64_t at) {
    const std::int64_t columns = round_up<std::int64_t>(n, lanes);
    for (std::int64_t column = 0; column < columns; column += panel) {
        const std::int64_t width = least<std::int64_t>(panel, columns - column);
        auto *const words = to + column * deep + at * width;
        if constexpr (Format::depth == 2) {
            if (column + panel <= n && two) {
                Format::interleave_panel(one + column, two + column, words, [](Words x) { return x; });
                continue;
            }
        }
        for (std::int64_t d = 0; d < width; d += lanes) store(words + d, column_words<Format>(one, two, column + d, n));
    }
}

// Writes zeros behind the words of `rows` rows, up to the depth of a product.
template <class Format>
FUSION_INLINE void clear_across(std::int64_t rows, std::int64_t n, typename Format::Word *to, std::int64_t deep) {
    const std::int64_t from = (rows + Format::depth - 1) / Format::depth, end = words_of<Format>(rows);
    const std::int64_t columns = round_up<std::int64_t>(n, lanes);
    for (std::int64_t column = 0; from < end && column < columns; column += panel) {
        const std::int64_t width = least<std::int64_t>(panel, columns - column);
        std::memset(to + column * deep + from * width, 0, (end - from) * width * sizeof *to);
    }
}

// Packs `rows` rows, `stride` elements apart, as [column panel][rows / depth][column].
template <class Format, class T>
void pack_across(const T *first, std::int64_t stride, std::int64_t rows, std::int64_t n, typename Format::Word *to) {
    const std::int64_t deep = words_of<Format>(rows);
    for (std::int64_t i = 0; i < rows; i += Format::depth) {
        const T *one = first + i * stride;
        store_across<Format>(one, i + 1 < rows ? one + stride : nullptr, n, to, deep, i / Format::depth);
    }
    clear_across<Format>(rows, n, to, deep);
}

// Packs rows of n elements, transposed: word d of row i at
// to[(i / panel) * deep * panel + (first_word + d) * width + i % panel].
template <class Format, class T>
void pack_heads(const T *first, std::int64_t stride, std::int64_t rows, std::int64_t n, std::int64_t words,
                std::int64_t first_word, std::int64_t deep, typename Format::Word *to) {
    const std::int64_t padded = round_up(rows, head_unit<Format>);
    for (std::int64_t i0 = 0; i0 < padded; i0 += lanes) {
        const std::int64_t width = least<std::int64_t>(panel, padded - i0 / panel * panel);
        auto *const destination = to + i0 / panel * panel * deep + first_word * width + i0 % panel;
        for (std::int64_t d = 0; d < words; d += lanes) {
            Words block[lanes];
            FUSION_UNROLL for (int i = 0; i < lanes; ++i) {
                block[i] = i0 + i < rows ? load_words<Format>(first + (i0 + i) * stride, d, n) : Words{};
            }
            transpose(block);
            for (std::int64_t i = 0; i < least<std::int64_t>(lanes, words - d); ++i)
                store(destination + (d + i) * width, block[i]);
        }
    }
}

// Packs the query heads of an item, transposed, followed by rope.
template <class Format, class T>
void pack_item_heads(const SparseProblem &p, const SparseOperands &o, const SparseItem &item,
                     const Sizes<Format> &sizes, typename Format::Word *to) {
    pack_heads<Format>(row_of<const T>(o.q, item.seq, item.head0, item.row), o.q.stride_head[item.seq], item.heads,
                       p.dim_qk, sizes.main_words, 0, sizes.words, to);
    if (!p.dim_rope) return;
    pack_heads<Format>(row_of<const T>(o.q_rope, item.seq, item.head0, item.row), o.q_rope.stride_head[item.seq],
                       item.heads, p.dim_rope, sizes.words - sizes.main_words, sizes.main_words, sizes.words, to);
}

// ----------------------------------------------------------------------------------------------------------- products

template <class T> Floats dot_rows(const T *x, const T *y, std::int64_t n) {
    Floats sum = {};
    for (std::int64_t d = 0; d < n; d += lanes) sum += load_floats(x + d, n - d) * load_floats(y + d, n - d);
    return sum;
}

struct Idle {  // does nothing while products are computed
    FUSION_INLINE void operator()(std::int64_t) const {}
};

// C[M][columns] = A[M][depth] * B[column panel][deep][column], plus fade[i] * C[i] with Add. Calls meanwhile(number of
// words multiplied) before each panel, for prefetches.
template <class Format, int M, bool Add, class Left = RowMajor<typename Format::Word>, class Meanwhile>
__attribute__((noinline)) void by_panels(const typename Format::Word *a, std::int64_t a_stride,
                                         const typename Format::Word *b, std::int64_t deep, std::int64_t depth,
                                         float *c, std::int64_t c_stride, std::int64_t columns, const float *fade,
                                         Meanwhile &meanwhile) {
    for_panels(columns, [&](auto vectors, std::int64_t d) __attribute__((always_inline)) {
        if (vectors() == panel_vectors) meanwhile(M * depth * panel);
        multiply<Format, M, vectors(), vectors(), Add, Left>(a, a_stride, b + d * deep, depth, c + d, c_stride, fade);
    });
}

// Calls body(M, first row) for blocks of at most M rows. Two blocks of two thirds are used instead of a full one and
// one of a third, which uses registers badly.
template <class Body> FUSION_INLINE void in_blocks(std::int64_t rows, Body body) {
    constexpr int unit = block_rows / block_parts;
    for (std::int64_t at = 0; at < rows;) {
        const std::int64_t left = rows - at, parts = (left + unit - 1) / unit;
        with_height(block_parts == 3 && parts == 4 ? 2 * unit : left, [&](auto height) __attribute__((always_inline)) {
            body(height, at);
            at += height();
        });
    }
}

// C[i] = fade[i] * C[i] + A[heads][depth] * B.
template <class Format, class Meanwhile>
void add_heads(const typename Format::Word *a, std::int64_t a_stride, const typename Format::Word *b, std::int64_t deep,
               std::int64_t depth, float *c, std::int64_t c_stride, std::int64_t columns, std::int64_t heads,
               const float *fade, Meanwhile &meanwhile) {
    in_blocks(heads, [&](auto height, std::int64_t h) __attribute__((always_inline)) {
        by_panels<Format, height(), true>(a + h * a_stride, a_stride, b, deep, depth, c + h * c_stride, c_stride,
                                          columns, fade + h, meanwhile);
    });
}

// ----------------------------------------------------------------------------------------------------------- gathering

constexpr std::int64_t gather_ahead =
    4;  // number of keys by which prefetches into the first-level cache precede their use

struct Chunk {  // `count` keys from the list's `at` on; `left` keys of the list begin there
    const std::int32_t *keys;
    std::int64_t count, left;
};

// True if every token has the same address in both sources.
inline bool same_rows(const KeySource &a, const KeySource &b, std::int64_t seq, std::int64_t head) {
    return a.table == b.table && a.stride_table == b.stride_table && a.page_size == b.page_size &&
           a.stride_page == b.stride_page && a.rows.base == b.rows.base && a.rows.address[seq] == b.rows.address[seq] &&
           a.rows.stride_token == b.rows.stride_token &&
           head * a.rows.stride_head[seq] == head * b.rows.stride_head[seq];
}

inline bool same_rows(const Keys &a, const Keys &b, std::int64_t seq, std::int64_t head) {
    return same_rows(static_cast<const KeySource &>(a), static_cast<const KeySource &>(b), seq, head) &&
           (!a.kv_len || same_rows(a.compressed, b.compressed, seq, head));
}

// Gathers key i and, with two elements per word, key i + 1 of a chunk: rows of n elements, to rows of `words` words,
// `stride` words apart, in `rows`, and to word row i / depth of `across`; either may be null.
template <class Format, class T>
FUSION_INLINE void gather(const Keys &from, const SparseItem &item, const Chunk &chunk, std::int64_t i, std::int64_t n,
                          std::int64_t words, std::int64_t stride, typename Format::Word *rows,
                          typename Format::Word *across, std::int64_t deep) {
    const auto row = [&](std::int64_t e) __attribute__((always_inline)) {
        return row_of<T>(from, item.seq, item.head_kv, chunk.keys[e]);
    };
    if (rows) {
        const std::int64_t upcoming = i + gather_ahead;
        for (std::int64_t e = upcoming; e < least(upcoming + Format::depth, chunk.left); ++e) prefetch(row(e), n);
    }
    const T *one = row(i), *two = nullptr;
    if (Format::depth > 1 && i + 1 < chunk.count) two = row(i + 1);
    if (rows) {
        pack_query<Format>(one, n, words, rows);
        if (two) pack_query<Format>(two, n, words, rows + stride);
    }
    if (across) store_across<Format>(one, two, n, across, deep, i / Format::depth);
}

// Prefetches rows of a list's keys into the second-level cache while products are computed, a few at a time, in
// proportion to the products between two keys, up to `lead` keys ahead. Not a PrefetchQueue, because the rows of keys
// are not adjacent and products between two keys differ in length.
class KeyPrefetch {
public:
    // cost: number of words multiplied per key.
    KeyPrefetch(const SparseJob &job, const SparseItem &item, const std::int32_t *keys, std::int64_t count,
                std::int64_t lead, std::int64_t cost)
        : item_(item), is_float32_(job.problem->dtype == Dtype::float32), keys_(keys), count_(count), lead_(lead),
          cost_(cost) {
        const SparseProblem &p = *job.problem;
        const SparseOperands &o = *job.operands;
        parts_[shown_++] = {&o.k, p.dim_qk};
        if (p.dim_rope) parts_[shown_++] = {&o.k_rope, p.dim_rope};
        if (!p.indexes && !same_rows(o.k, o.v, item.seq, item.head_kv)) parts_[shown_++] = {&o.v, p.dim_v};
        while (prefetched_ < least(count_, few)) ask();
    }

    void gathered(std::int64_t keys) { gathered_ += keys; }

    FUSION_INLINE void operator()(std::int64_t words) {
        budget_ += words;
        if (budget_ >= cost_ / 2) spend();
    }

private:
    static constexpr std::int64_t few = 2 * block_rows;
    struct Operand {
        const Keys *keys;
        std::int64_t n;
    };

    __attribute__((noinline)) void spend() {
        const std::int64_t price = prefetched_ < gathered_ + 2 * few ? cost_ / 2 : cost_ * 3 / 4;
        const std::int64_t end = least(count_, gathered_ + lead_);
        for (; budget_ >= price && prefetched_ < end; budget_ -= price) ask();
        budget_ = least(budget_, price);
    }
    void ask() {
        const std::int64_t key = keys_[prefetched_++];
        for (int i = 0; i < shown_; ++i) {
            const auto [keys, n] = parts_[i];
            if (is_float32_) prefetch<2>(row_of<float>(*keys, item_.seq, item_.head_kv, key), n);
            else prefetch<2>(row_of<Half>(*keys, item_.seq, item_.head_kv, key), n);
        }
    }

    const SparseItem &item_;
    const bool is_float32_;  // elements of 4 bytes, else of 2
    const std::int32_t *keys_;
    std::int64_t count_, lead_, cost_, prefetched_ = 0, gathered_ = 0, budget_ = 0;
    Operand parts_[3];
    int shown_ = 0;
};

// Writes zeros to the rows of a block behind its last key.
template <class Word> void clear_rows(std::int64_t keys, std::int64_t words, Word *rows) {
    if (keys < block_rows) std::memset(rows + keys * words, 0, (block_rows - keys) * words * sizeof *rows);
}

}  // namespace
}  // namespace fusion
