// From a row's list of selected blocks to operands of products: which keys it names, their rows gathered, heads packed.
//
// All heads of a row are multiplied at once. Keys are the rows of the scores, heads their columns, so a gathered row needs
// no transposing:
//
//   rows   [key][word]                           gathered rows, as the first operand
//   across [column panel][keys / depth][column]  the same as the last operand of a product over keys
//   q      [head panel][word][head]              heads beside each other, transposed
//   q_rows [column panel][heads / depth][column] the last operand of a product over heads

#pragma once

#include "gradient_pack.h"
#include "variant_sparse.h"

namespace fusion {
namespace {

template <class T> FUSION_INLINE const T *row_of(const Keys &keys, std::int64_t b, std::int64_t head, std::int64_t j) {
    if (!keys.table) return row_of<const T>(keys.rows, b, head, j);
    const std::int64_t page = keys.table[b * keys.stride_table + j / keys.page_size];
    return row_of<const T>(keys.rows, b, head, j % keys.page_size) + page * keys.stride_page;
}

template <class Format> struct SparseSizes {
    std::int64_t main_words, words, value_words;
    std::int64_t main_columns, columns, value_columns;

    explicit SparseSizes(const SparseProblem &p)
        : main_words((p.dim_qk + Format::depth - 1) / Format::depth),
          words(main_words + (p.dim_rope + Format::depth - 1) / Format::depth),
          value_words((p.dim_v + Format::depth - 1) / Format::depth), main_columns(round_up<std::int64_t>(p.dim_qk, lanes)),
          columns(main_columns + round_up<std::int64_t>(p.dim_rope, lanes)),
          value_columns(round_up<std::int64_t>(p.dim_v, lanes)) {}
};

template <class Body> FUSION_INLINE void by_dtype(Dtype dtype, Body body) {
    switch (dtype) {
    case Dtype::float32: return body(float{});
    case Dtype::float16: return body(Half{});
    case Dtype::bfloat16: return body(Brain{});
    }
}

// The indexer's weights of one row, zeros behind them up to `pitch`.
inline void load_weights(const SparseProblem &p, const Rows &weights, std::int64_t b, std::int64_t row, std::int64_t pitch,
                         float *to) {
    by_dtype(p.weights_dtype, [&](auto kind) {
        const auto *from = row_of<const decltype(kind)>(weights, b, 0, row);
        for (std::int64_t h = 0; h < pitch; h += lanes) store(to + h, load_floats(from + h, p.heads_q - h));
    });
}

// ---------------------------------------------------------------------------------------------------------- selection

// The keys that a row's list names, in its order; returns their number. A list ends at its first negative entry, and
// entries behind those that the visible keys could fill are not read.
inline std::int64_t expand(const SparseJob &job, const SparseItem &item, std::int32_t *keys) {
    const SparseProblem &p = *job.problem;
    const Sequence &seq = job.sequences[item.seq];
    const std::int64_t first = first_key(seq, item.row), end = end_key(seq, item.row), block = p.select_block;
    const std::int32_t *list = row_of<const std::int32_t>(job.operands->indices, item.seq, item.head_kv, item.row);
    const std::int64_t slots = least(p.select_count, end <= 0 ? 0 : (end + block - 1) / block);
    std::int64_t count = 0;
    for (std::int64_t s = 0; s < slots && list[s] >= 0; ++s) {
        const std::int64_t start = list[s] * block, stop = least(start + block, end);
        for (std::int64_t j = most(start, first); j < stop; ++j) keys[count++] = static_cast<std::int32_t>(j);
    }
    return count;
}

// The most that expand() can give.
inline std::int64_t most_keys(const SparseProblem &p, std::int64_t longest) {
    return least(p.select_count, (longest + p.select_block - 1) / p.select_block) * p.select_block;
}

constexpr int digit_bits = 11;

// Ascending by what lies above `from` bits, stable; `spare` has the same room. Returns where the result is.
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
        for (std::int64_t i = 0; i < count; ++i) spare[histogram[items[i] >> shift & ((1 << digit_bits) - 1)]++] = items[i];
        T *const other = items;
        items = spare;
        spare = other;
    }
    return items;
}

inline int bits_for(std::int64_t n) {  // of numbers below n
    int bits = 0;
    while (bits < 62 && (std::int64_t{1} << bits) < n) ++bits;
    return bits;
}

// ------------------------------------------------------------------------------------------------------------ packing

// A vector of columns of one row (depth 1) or of two (the second perhaps missing), from column d on.
template <class Format, class T> FUSION_INLINE Words column_words(const T *one, const T *two, std::int64_t d, std::int64_t n) {
    const Words low = bits_of(load_floats(one + d, n - d));
    if constexpr (Format::depth == 1) {
        (void)two;
        return low;
    } else {
        return low >> 16 | (two ? bits_of(load_floats(two + d, n - d)) : Words{});
    }
}

#if defined(__AVX512BF16__)
template <int... I> FUSION_INLINE void interleave(Words a, Words b, Words (&out)[2], std::integer_sequence<int, I...>) {
    typedef std::uint16_t Both __attribute__((vector_size(lanes * 4)));
    out[0] = (Words)__builtin_shufflevector((Both)a, (Both)b, (I / 2 + I % 2 * 2 * lanes)...);
    out[1] = (Words)__builtin_shufflevector((Both)a, (Both)b, (I / 2 + lanes + I % 2 * 2 * lanes)...);
}
#endif

// Rows of n elements as word row `at` of [column panel][deep][column].
template <class Format, class T>
FUSION_INLINE void put_across(const T *one, const T *two, std::int64_t n, typename Format::Word *to, std::int64_t deep,
                              std::int64_t at) {
    const std::int64_t columns = round_up<std::int64_t>(n, lanes);
    for (std::int64_t column = 0; column < columns; column += panel) {
        const std::int64_t width = least<std::int64_t>(panel, columns - column);
        auto *const words = to + column * deep + at * width;
#if defined(__AVX512BF16__)
        if constexpr (Format::depth == 2) {
            if (column + panel <= n && two) {
                Words pair[2];
                interleave(load<Words>(one + column), load<Words>(two + column), pair,
                           std::make_integer_sequence<int, 2 * lanes>{});
                store(words, pair[0]);
                store(words + lanes, pair[1]);
                continue;
            }
        }
#endif
        for (std::int64_t d = 0; d < width; d += lanes) store(words + d, column_words<Format>(one, two, column + d, n));
    }
}

// `rows` rows, `stride` elements apart, as [column panel][rows / depth][column].
template <class Format, class T>
void pack_across(const T *first, std::int64_t stride, std::int64_t rows, std::int64_t n, typename Format::Word *to) {
    const std::int64_t deep = (rows + Format::depth - 1) / Format::depth;
    for (std::int64_t at = 0; at < deep; ++at) {
        const T *one = first + at * Format::depth * stride;
        put_across<Format>(one, at * Format::depth + 1 < rows ? one + stride : nullptr, n, to, deep, at);
    }
}

// Rows of n elements beside each other: word d of row i at to[(i / panel) * deep * panel + (first_word + d) * width + i % panel].
template <class Format, class T>
void pack_beside(const T *first, std::int64_t stride, std::int64_t rows, std::int64_t n, std::int64_t words,
                 std::int64_t first_word, std::int64_t deep, typename Format::Word *to) {
    const std::int64_t padded = round_up<std::int64_t>(rows, lanes);
    for (std::int64_t i0 = 0; i0 < padded; i0 += lanes) {
        const std::int64_t width = least<std::int64_t>(panel, padded - i0 / panel * panel);
        auto *const own = to + i0 / panel * panel * deep + first_word * width + i0 % panel;
        for (std::int64_t d = 0; d < words; d += lanes) {
            Words block[lanes];
            FUSION_UNROLL for (int i = 0; i < lanes; ++i) {
                block[i] = i0 + i < rows ? load_words<Format>(first + (i0 + i) * stride, d, n) : Words{};
            }
            transpose(block);
            for (std::int64_t i = 0; i < least<std::int64_t>(lanes, words - d); ++i) store(own + (d + i) * width, block[i]);
        }
    }
}

// ----------------------------------------------------------------------------------------------------------- products

// C[M][columns] = A[M][depth] * B[column panel][deep][column] from its word row 0 on, added to what is there times
// fade[i] if Add.
template <class Format, int M, bool Add>
__attribute__((noinline)) void by_panels(const typename Format::Word *a, std::int64_t a_stride,
                                         const typename Format::Word *b, std::int64_t deep, std::int64_t depth, float *c,
                                         std::int64_t c_stride, std::int64_t columns, const float *fade) {
    std::int64_t d = 0;
    for (; d + panel <= columns; d += panel) {
        multiply<Format, M, panel_vectors, panel_vectors, Add>(a, a_stride, b + d * deep, depth, c + d, c_stride, fade);
    }
    const std::int64_t vectors = (columns - d) / lanes;
    if (vectors == 1) multiply<Format, M, 1, 1, Add>(a, a_stride, b + d * deep, depth, c + d, c_stride, fade);
    if constexpr (panel_vectors > 2) {
        if (vectors == 2) multiply<Format, M, 2, 2, Add>(a, a_stride, b + d * deep, depth, c + d, c_stride, fade);
        if (vectors == 3) multiply<Format, M, 3, 3, Add>(a, a_stride, b + d * deep, depth, c + d, c_stride, fade);
    }
}

// Blocks of at most M rows: body(M, first row). Two of two thirds rather than a whole one and a third, which uses
// registers badly.
template <class Body> FUSION_INLINE void in_blocks(std::int64_t rows, Body body) {
    constexpr int third = block_rows / 3;
    for (std::int64_t at = 0; at < rows;) {
        const std::int64_t left = rows - at, thirds = (left + third - 1) / third;
        if (thirds >= 3 && thirds != 4) {
            body(std::integral_constant<int, block_rows>{}, at);
            at += block_rows;
        } else if (thirds > 1) {
            body(std::integral_constant<int, 2 * third>{}, at);
            at += 2 * third;
        } else {
            body(std::integral_constant<int, third>{}, at);
            at += third;
        }
    }
}

// Adds A[heads][depth] * B to C, whose rows first shrink by `fade`.
template <class Format>
void add_heads(const typename Format::Word *a, std::int64_t a_stride, const typename Format::Word *b, std::int64_t deep,
               std::int64_t depth, float *c, std::int64_t c_stride, std::int64_t columns, std::int64_t heads,
               const float *fade) {
    in_blocks(heads, [&](auto height, std::int64_t h) __attribute__((always_inline)) {
        by_panels<Format, height(), true>(a + h * a_stride, a_stride, b, deep, depth, c + h * c_stride, c_stride, columns,
                                          fade + h);
    });
}

// The scores of `keys` gathered rows: [key][head], `pitch` floats apart; rows are there in whole blocks. meanwhile(at):
// before each block, for what memory can do by the way.
template <class Format, class Meanwhile>
void key_products(const typename Format::Word *rows, std::int64_t stride, const typename Format::Word *heads,
                  std::int64_t words, std::int64_t keys, std::int64_t padded_heads, float *to, std::int64_t pitch,
                  Meanwhile meanwhile) {
    for (std::int64_t at = 0; at < keys; at += block_rows) {
        meanwhile(at);
        by_panels<Format, block_rows, false>(rows + at * stride, stride, heads, words, words, to + at * pitch, pitch,
                                             padded_heads, nullptr);
    }
}

// ------------------------------------------------------------------------------------------------------------ gathering

constexpr std::int64_t gather_ahead = 16;   // keys whose rows are asked for before they are needed,
constexpr std::int64_t gather_block = 16;   // and keys of which all parts are loaded before the next keys'

struct Chunk {  // `count` keys from the list's `at` on; `left` keys of the list begin there
    const std::int32_t *keys;
    std::int64_t count, left;
};

// Keys [at, at + gather_block) of a chunk: rows of n elements, `words` words of them to every `stride` words of `rows`,
// and to `across`; either may be null.
template <class Format, class T>
FUSION_INLINE void gather(const Keys &from, const SparseItem &item, const Chunk &chunk, std::int64_t at, std::int64_t n,
                          std::int64_t words, std::int64_t stride, typename Format::Word *rows,
                          typename Format::Word *across, std::int64_t deep) {
    const auto row = [&](std::int64_t i) __attribute__((always_inline)) {
        return row_of<T>(from, item.seq, item.head_kv, chunk.keys[i]);
    };
    const std::int64_t end = least(at + gather_block, chunk.count);
    for (std::int64_t i = at; i < end; i += Format::depth) {
        for (std::int64_t e = i + gather_ahead; e < least(i + gather_ahead + Format::depth, chunk.left); ++e) prefetch(row(e), n);
        const T *one = row(i), *two = nullptr;
        if (Format::depth > 1 && i + 1 < chunk.count) two = row(i + 1);
        if (rows) {
            pack_query<Format>(one, n, words, rows + i * stride);
            if (two) pack_query<Format>(two, n, words, rows + (i + 1) * stride);
        }
        if (across) put_across<Format>(one, two, n, across, deep, i / Format::depth);
    }
}

// Asks a second-level cache for rows [at, at + block_rows) of the chunk behind this one.
template <class T>
FUSION_INLINE void ask_ahead(const Keys &from, const SparseItem &item, const Chunk &chunk, std::int64_t at, std::int64_t n) {
    for (std::int64_t i = chunk.count + at; i < least(chunk.count + at + block_rows, chunk.left); ++i) {
        const T *row = row_of<T>(from, item.seq, item.head_kv, chunk.keys[i]);
        for (std::int64_t d = 0; d < n; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 2);
    }
}

// All parts of these rows; values where they are no part of a key's own row.
template <class T>
FUSION_INLINE void ask_ahead(const SparseJob &job, const SparseItem &item, const Chunk &chunk, std::int64_t at) {
    const SparseProblem &p = *job.problem;
    const SparseOperands &o = *job.operands;
    ask_ahead<T>(o.k, item, chunk, at, p.dim_qk);
    if (p.dim_rope) ask_ahead<T>(o.k_rope, item, chunk, at, p.dim_rope);
    if (p.indexes) return;
    const T *k = row_of<T>(o.k, item.seq, item.head_kv, chunk.keys[0]);
    if (row_of<T>(o.v, item.seq, item.head_kv, chunk.keys[0]) != k) ask_ahead<T>(o.v, item, chunk, at, p.dim_v);
}

// Rows of a chunk behind its last key count as zeros.
template <class Word> void clear_rows(const Chunk &chunk, std::int64_t words, Word *rows) {
    const std::int64_t end = round_up<std::int64_t>(chunk.count, block_rows);
    std::memset(rows + chunk.count * words, 0, (end - chunk.count) * words * sizeof *rows);
}

}  // namespace
}  // namespace fusion
