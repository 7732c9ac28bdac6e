// The five products of the backward for a block or a tile of rows, and prefetches while they run.
//
// Start reading at dense/gradient.h's accumulate().

#pragma once

#include "dense/bias.h"
#include "simd/prefetch_queue.h"
#include "dense/gradient_pack.h"
#include "simd/tile.h"

namespace fusion {
namespace {

static_assert(gradient_rows % block_rows == 0 && gradient_rows % 32 == 0 && block_rows % 2 == 0);

template <class Format> struct GradientWork {
    const Problem &p;
    const Operands &o;
    const Gradients &g;
    const Sequence &seq;
    const Sizes<Format> sizes;
    const RowTile &row_tile;
    const KeyTile &key_tile;
    const RowPart<Format> r;
    const KeyPart<Format> k;
    const bool bias_pass;   // as in the forward
    const float natural;    // factor from stored scores to scores of the problem
    const bool wide_dbias;  // dbias sums dS in float32, not rounded to bfloat16
    const RowTurn &turn;
    PrefetchQueue &queue;

    GradientWork(const Job &job, const RowTile &row_tile_, const KeyTile &key_tile_, const RowTurn &turn_,
                 PrefetchQueue &queue_)
        : p(*job.problem), o(*job.operands), g(*job.gradients), seq(job.sequences[row_tile_.seq]), sizes(p),
          row_tile(row_tile_), key_tile(key_tile_), r(sizes, row_tile.row1 - row_tile.row0, row_tile.memory),
          k(p, sizes, key_tile.memory), bias_pass(needs_bias_pass(p)),
          natural(bias_pass ? 1.0f : static_cast<float>(p.scale)),
          wide_dbias(g.dbias.base && !(g.owns_dbias && g.dbias.dtype == Dtype::bfloat16)), turn(turn_), queue(queue_) {}
};

// Rows [row, row + rows) of the row tile and keys [at, at + count) of the key tile, complete panels.
struct GradientBlock {
    std::int64_t row, rows, at, count;
    std::int64_t from, to;  // range of visible keys in the key tile, rounded to vectors (with tile registers, panels)
    bool hidden;            // some key is hidden from some row
    bool small_peaks;       // no row has a large peak, and weights are only used in bfloat16
    bool nonfinite;         // some operand is not finite; hidden is set too
};

// ---------------------------------------------------------------------------------------------------------- products

// Two panels are multiplied together with half as many rows: the same number of accumulators, but fewer loads per
// multiply-add. Only if registers suffice for the wider row of operands; tile registers hold one panel.
constexpr int abreast = lanes == 16 && block_parts == 3 ? 2 : 1, low_rows = block_rows / abreast;
static_assert(low_rows % block_parts == 0);

// C[M][Panels x N vectors] = A[M][depth] * B, plus C with `add`. Panels of B are b_apart words apart and their rows
// Step vectors; panels of C are c_apart floats apart.
template <class Format, int M, int N, int Panels, int Step = N>
__attribute__((noinline)) void multiply_panels(const typename Format::Word *a, std::int64_t a_stride,
                                               const typename Format::Word *b, std::int64_t b_apart, std::int64_t depth,
                                               float *c, std::int64_t c_stride, std::int64_t c_apart, bool add) {
    SumBlock<Format, M, Panels * N, N, false> block({c, c_stride, c_apart, add});
    block.add(0, depth, RowMajor<typename Format::Word>{a, a_stride}, b, Step * lanes, InPanels<N>{b_apart});
    block.finish();
}

// The same for a block of rows (padded to a compiled height) and any number of panels; calls before() for each step of
// columns.
template <class Format, class Before>
FUSION_INLINE void multiply_block(const typename Format::Word *a, std::int64_t a_stride, std::int64_t rows,
                                  const typename Format::Word *b, std::int64_t b_apart, std::int64_t depth, float *c,
                                  std::int64_t c_stride, std::int64_t columns, bool add, Before before) {
    std::int64_t at = 0;
    for (; at + abreast * panel <= columns; at += abreast * panel, b += abreast * b_apart) {
        before();
        for (std::int64_t i = 0; i < rows; i += low_rows) {
            multiply_panels<Format, low_rows, panel_vectors, abreast>(a + i * a_stride, a_stride, b, b_apart, depth,
                                                                      c + i * c_stride + at, c_stride, panel, add);
        }
    }
    if (abreast > 1 && at + panel <= columns) {
        before();
        multiply_panels<Format, block_rows, panel_vectors, 1>(a, a_stride, b, 0, depth, c + at, c_stride, 0, add);
        at += panel;
        b += b_apart;
    }
}

// Prefetches the operands of the next block of rows from a farther cache: q, dq and bias while S is computed, the
// others during dP.
template <class Format> struct NextBlock {
    PrefetchQueue beside_scores, beside_dprobs;

    NextBlock(const GradientWork<Format> &w, const GradientBlock &b) {
        const std::int64_t row = b.row + block_rows, row0 = w.row_tile.row0 + row;
        const std::int64_t steps = (b.count + abreast * panel - 1) / (abreast * panel);
        const auto add_matrix = [&](PrefetchQueue &queue, const Matrix &m) {
            const std::int64_t size = m.dtype == Dtype::float32 ? 4 : 2,
                               rows = least(block_rows + row0, w.seq.q_len) - row0;
            if (rows <= 0) return;
            const std::int64_t first = row_of(m, w.row_tile.seq, w.row_tile.head, row0) + w.key_tile.key0 + b.at;
            queue.add({static_cast<const char *>(m.base) + first * size, m.stride_row[w.row_tile.seq] * size, rows,
                       b.count * size});
        };
        if (w.p.bias == Bias::matrix && w.o.bias.stride_key) {
            add_matrix(beside_scores, w.o.bias);
            if (w.g.dbias.base && !w.g.owns_dbias) add_matrix(beside_dprobs, w.g.dbias);
        }
        if (row < w.r.padded) {
            beside_scores.add(w.r.q + row * w.sizes.words, block_rows * w.sizes.words * 4);
            beside_scores.add(w.r.dq + row * w.sizes.columns, block_rows * w.sizes.columns * 4);
            beside_dprobs.add(w.r.dout + row * w.sizes.value_words, block_rows * w.sizes.value_words * 4);
        }
        beside_scores.spread(steps);
        beside_dprobs.spread(steps);
    }
};

// Multiplies the rows of a block by its visible keys; panels at the ends of the range are multiplied vector by vector.
template <class Format, class Before>
FUSION_INLINE void multiply_keys(const GradientBlock &b, const typename Format::Word *rows,
                                 const typename Format::Word *panels, std::int64_t words, float *c, Before before) {
    constexpr std::int64_t keys = tile_keys<Format>;
    rows += b.row * words;
    std::int64_t at = b.from;
    const auto multiply_vectors = [&](std::int64_t end) {
        if (at < end) before();
        for (; at < end; at += lanes) {
            const auto *vector = panels + at / panel * panel * words + at % panel;
            multiply_panels<Format, block_rows, 1, 1, panel_vectors>(rows, words, vector, 0, words, c + at - b.at, keys,
                                                                     0, false);
        }
    };
    multiply_vectors(least(b.to, round_up<std::int64_t>(at, panel)));
    const std::int64_t complete = (b.to - at) / panel * panel, first = at - b.at;
    multiply_block<Format>(rows, words, b.rows, panels + at * words, words * panel, words, c + first, keys, complete,
                           false, before);
    at += complete;
    multiply_vectors(b.to);
}

template <class Format> void multiply_rows(const GradientWork<Format> &w, const GradientBlock &b) {
    NextBlock<Format> next(w, b);
    multiply_keys<Format>(b, w.r.q, w.k.k, w.sizes.words, w.k.scores, [&]() __attribute__((always_inline)) {
        w.queue.step();
        next.beside_scores.step();
    });
    multiply_keys<Format>(b, w.r.dout, w.k.v, w.sizes.value_words, w.k.dprobs, [&]() __attribute__((always_inline)) {
        w.queue.step();
        next.beside_dprobs.step();
    });
}

// Adds dS times columns [column, column + columns) of keys, which are packed together, to dq; with fresh rows, sets dq.
template <class Format>
void add_dq_part(const GradientWork<Format> &w, const GradientBlock &b, std::int64_t column, std::int64_t columns) {
    constexpr std::int64_t deep = tile_keys<Format> / Format::depth;
    const std::int64_t skip = b.from / Format::depth, depth = (b.to - b.from) / Format::depth;
    const auto *weights = w.k.dscores + (b.from - b.at) / Format::depth;
    const auto *keys = w.k.k_keys + column * deep;
    float *dq = w.r.dq + b.row * w.sizes.columns + column;
    const bool add = !w.row_tile.fresh;
    // All blocks together prefetch the transposed rows, which are read after the last block.
    const std::int64_t word_row = b.row / Format::depth, height = block_rows / Format::depth;
    prefetch<2>(w.r.q_rows + word_row * columns, height * columns);
    prefetch<2>(w.r.dout_rows + word_row * w.sizes.value_columns, height * w.sizes.value_columns);
    multiply_block<Format>(weights, deep, b.rows, keys + skip * panel, panel * deep, depth, dq, w.sizes.columns,
                           columns, add, [] {});
    narrow_panel(columns, [&](auto vectors) {
        const std::int64_t rest = vectors() * lanes, complete = columns - rest;
        multiply_panels<Format, block_rows, vectors(), 1>(weights, deep, keys + complete * deep + skip * rest, 0, depth,
                                                          dq + complete, w.sizes.columns, 0, add);
    });
}

template <class Format> void add_dq(const GradientWork<Format> &w, const GradientBlock &b) {
    const std::int64_t main = w.sizes.main_columns;
    add_dq_part(w, b, 0, main);
    if (w.p.dim_rope) add_dq_part(w, b, main, w.sizes.columns - main);
}

// Offset of the word of row `row` of the tile and the key at `at` in weights [panel][rows / depth][key].
template <class Format> FUSION_INLINE std::int64_t weight_at(std::int64_t row, std::int64_t at) {
    return (at / panel * KeyPart<Format>::depth + row / Format::depth) * panel + at % panel;
}

// The ragged edge of a band: for each vector of keys, the range of words of the transposed rows with visible pairs, and
// true for panels that have sums already.
template <int Panels> struct RaggedRows {
    static constexpr int vectors = Panels * panel_vectors;
    std::int64_t begin[vectors], end[vectors];
    bool add;

    // True if ranges of rows ascend with keys and have a common intersection.
    bool are_ordered() const {
        bool ordered = begin[vectors - 1] <= end[0];
        for (int j = 1; j < vectors; ++j) ordered &= begin[j - 1] <= begin[j] && end[j - 1] <= end[j];
        return ordered;
    }
};

// [column][key] (+)= rows^T [column][row] * weights [row][key] for M columns and several panels of keys. Rows with
// visible pairs in some vectors of keys only are multiplied by these; all products are summed in registers.
template <class Format, int M, int Panels>
__attribute__((noinline)) void multiply_ragged(const typename Format::Word *a, std::int64_t a_stride,
                                               const typename Format::Word *b, std::int64_t b_apart,
                                               const RaggedRows<Panels> &ragged, float *c, std::int64_t c_apart) {
    constexpr int N = panel_vectors, V = Panels * N;
    SumBlock<Format, M, V, N, false> block({c, panel, c_apart, ragged.add});
    const auto add = [&](int from, int to, std::int64_t first, std::int64_t end) __attribute__((always_inline)) {
        block.add(first, end, RowMajor<typename Format::Word>{a, a_stride}, b + first * panel, panel,
                  InPanels<N>{b_apart}, from, to);
    };
    FUSION_UNROLL for (int j = 1; j < V; ++j) add(0, j, ragged.begin[j - 1], ragged.begin[j]);
    add(0, V, ragged.begin[V - 1], ragged.end[0]);
    FUSION_UNROLL for (int j = 1; j < V; ++j) add(j, V, ragged.end[j - 1], ragged.end[j]);
    block.finish();
}

// Adds to dk^T or dv^T of several panels of keys, for all columns of the tile's rows.
template <class Format, int Panels>
void add_transposed(const typename Format::Word *rows, std::int64_t deep, const typename Format::Word *weights,
                    const RaggedRows<Panels> &ragged, std::int64_t columns, float *to) {
    constexpr int height = block_rows / Panels;
    for (std::int64_t d = 0; d < columns;
         d += height) {  // columns are complete vectors; the rest is a fraction of a height
        with_height<height>(columns - d, [&](auto rows_at_once) __attribute__((always_inline)) {
            multiply_ragged<Format, rows_at_once(), Panels>(rows + d * deep, deep, weights,
                                                            KeyPart<Format>::depth * panel, ragged, to + d * panel,
                                                            columns * panel);
        });
    }
}

// Sets sums of panels of keys from `at` on to zero, unless they have sums already.
template <class Format>
void begin_panels(const Sizes<Format> &sizes, const KeyPart<Format> &k, std::int64_t at, int panels) {
    for (int i = 0; i < panels; ++i, at += panel) {
        if (!k.fresh[at / panel]) continue;
        std::memset(k.dk + at * sizes.columns, 0, panel * sizes.columns * sizeof *k.dk);
        std::memset(k.dv + at * sizes.value_columns, 0, panel * sizes.value_columns * sizeof *k.dv);
        k.fresh[at / panel] = 0;
    }
}

// The ranges of rows of a tile with visible pairs in each vector of the panels at `at`.
template <class Format, int Panels> RaggedRows<Panels> ragged_rows(const GradientWork<Format> &w, std::int64_t at) {
    constexpr std::int64_t depth = Format::depth, step = Format::step;
    RaggedRows<Panels> ragged;
    for (int j = 0; j < RaggedRows<Panels>::vectors; ++j, at += lanes) {
        const std::int64_t key = w.key_tile.key0 + at, row0 = w.row_tile.row0;
        const std::int64_t some = w.k.row_begin[at / panel], end = w.k.row_end[at / panel];
        const std::int64_t top = w.seq.prefix > key ? 0 : key - w.seq.hi + 1 - row0,
                           bottom = key + lanes - w.seq.lo - row0;
        ragged.begin[j] = least(most(top, some), end) / depth / step * step;
        ragged.end[j] = round_up(least(most((bottom + depth - 1), some), end) / depth, step);
    }
    return ragged;
}

template <class Format, int Panels> void add_dk_dv(const GradientWork<Format> &w, std::int64_t at) {
    RaggedRows<Panels> ragged = ragged_rows<Format, Panels>(w, at);
    if (!ragged.are_ordered()) {  // few keys per row, or ranges of rows that do not ascend
        if constexpr (Panels > 1) {
            for (int i = 0; i < Panels; ++i) add_dk_dv<Format, 1>(w, at + i * panel);
            return;
        }
        for (int j = 0; j < ragged.vectors; ++j) {
            ragged.begin[j] = w.k.row_begin[at / panel] / Format::depth / Format::step * Format::step;
            ragged.end[j] = words_of<Format>(w.k.row_end[at / panel]);
        }
    }
    if (ragged.begin[0] >= ragged.end[ragged.vectors - 1]) return;
    std::uint8_t *const fresh = w.k.fresh + at / panel;
    ragged.add = false;
    for (int i = 0; i < Panels; ++i) ragged.add |= !fresh[i];
    if (ragged.add) begin_panels(w.sizes, w.k, at, Panels);
    for (int i = 0; i < Panels; ++i) fresh[i] = 0;
    const std::int64_t from = weight_at<Format>(0, at);
    add_transposed<Format, Panels>(w.r.dout_rows, w.r.deep, w.k.prob_rows + from, ragged, w.sizes.value_columns,
                                   w.k.dv + at * w.sizes.value_columns);
    add_transposed<Format, Panels>(w.r.q_rows, w.r.deep, w.k.dscore_rows + from, ragged, w.sizes.columns,
                                   w.k.dk + at * w.sizes.columns);
}

}  // namespace
}  // namespace fusion
