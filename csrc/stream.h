// Gathers a block of keys while the block before it is multiplied, where rows are whole vectors.
//
// Copying rows waits for memory and multiplying does not touch it, so the product of a block is cut into pieces, and
// between them a vector's width of each row of the next block is copied, that of the rows behind it is asked for, and that
// of the block itself is laid across.

#pragma once

#include "gather.h"

namespace fusion {
namespace {

// Products of a whole block of rows as by_panels() gives them; `side(i)` runs once for each i below `times`.
template <class Format, class Side>
__attribute__((noinline)) void block_by_panels(const typename Format::Word *a, std::int64_t a_stride,
                                               const typename Format::Word *b, std::int64_t depth, float *c,
                                               std::int64_t c_stride, std::int64_t columns, std::int64_t times,
                                               const Side &side) {
    constexpr int M = block_rows, N = panel_vectors;
    const std::int64_t panels = columns / panel;
    std::int64_t next = 0;
    for (std::int64_t at = 0; at < panels; ++at, b += panel * depth, c += panel) {
        Floats sum[M][N];
        FUSION_UNROLL for (int i = 0; i < M; ++i) {
            FUSION_UNROLL for (int j = 0; j < N; ++j) sum[i][j] = Floats{};
        }
        const std::int64_t end = times * (at + 1) / panels, pieces = most<std::int64_t>(end - next, 1);
        const auto *row = b;
        std::int64_t k = 0;
        for (std::int64_t piece = 1; piece <= pieces; ++piece) {
            if (next < end) side(next++);
            const std::int64_t stop = depth * piece / pieces;
#pragma GCC unroll 2
            for (; k < stop; ++k, row += panel) {
                Words right[N];
                FUSION_UNROLL for (int j = 0; j < N; ++j) right[j] = load<Words>(row + j * lanes);
                FUSION_UNROLL for (int i = 0; i < M; ++i) {
                    FUSION_UNROLL for (int j = 0; j < N; ++j) {
                        sum[i][j] = Format::dot(sum[i][j], a[i * a_stride + k], right[j]);
                    }
                }
            }
        }
        FUSION_UNROLL for (int i = 0; i < M; ++i) {
            FUSION_UNROLL for (int j = 0; j < N; ++j) store(c + i * c_stride + j * lanes, sum[i][j]);
        }
    }
    for (; next < times; ++next) side(next);
    if (columns == panels * panel) return;
    Idle idle;
    by_panels<Format, M, false>(a, a_stride, b, depth, depth, c, c_stride, columns - panels * panel, nullptr, idle);
}

// Whether rows can be gathered so; others take gather().
template <class Format> bool suits_stream(const SparseProblem &p) {
    return (p.dim_qk | p.dim_rope) % (lanes * Format::depth) == 0;
}

template <class Format, class T> class Stream {
public:
    using Word = typename Format::Word;
    static constexpr std::int64_t width = lanes * Format::depth;  // elements of a vector of words

    // buffer: two blocks of rows; across: of `columns` elements of each row, with `deep` word rows.
    Stream(const SparseJob &job, const SparseItem &item, const SparseSizes<Format> &sizes, const std::int32_t *keys,
           std::int64_t count, Word *buffer, Word *across, std::int64_t deep, std::int64_t columns)
        : p_(*job.problem), o_(*job.operands), item_(item), keys_(keys), count_(count), words_(sizes.words),
          main_(p_.dim_qk / width), times_(2 * (sizes.words / lanes)), crossed_(columns / width), buffer_(buffer),
          across_(across), deep_(deep), rope_base_(sizes.main_columns * deep) {}

    // Multiplies the block of keys from the list's i on, which is a chunk's `at`-th.
    void multiply(std::int64_t i, std::int64_t at, const Word *b, float *c, std::int64_t c_stride, std::int64_t columns) {
        const std::int64_t after = i + block_rows;
        if (held_ != i) {
            aim(i, to_);
            later_ = to_;
            next_ = rows(i);
            now_ = nullptr;
            for (std::int64_t s = 0; s < times_; s += 2) (*this)(s);
        }
        now_ = rows(i);
        at_ = at / Format::depth;
        next_ = after + block_rows <= count_ ? rows(after) : nullptr;
        if (next_) aim(after, to_);
        aim(after + ahead, later_);
        block_by_panels<Format>(rows(i), words_, b, words_, c, c_stride, columns, times_, *this);
        held_ = next_ ? after : -1;
    }

    const Word *rows(std::int64_t i) const { return buffer_ + i / block_rows % 2 * block_rows * words_; }
    Word *rows(std::int64_t i) { return buffer_ + i / block_rows % 2 * block_rows * words_; }

    // In turns: a vector of each row is copied, and one is laid across.
    FUSION_INLINE void operator()(std::int64_t turn) const {
        const std::int64_t slice = turn / 2;
        const bool tail = slice >= main_;
        const std::int64_t d = (tail ? slice - main_ : slice) * width;
        if (turn % 2 == 0) copy(slice, tail, d);
        else if (now_ && slice < crossed_) cross(slice, tail, d);
    }

private:
    static constexpr std::int64_t ahead = 2 * block_rows;  // keys behind the next block that are asked for
    struct Parts {
        const T *main[block_rows], *rope[block_rows];
    };

    static FUSION_INLINE Words vector(const T *from) {
        if constexpr (Format::depth == 1) return bits_of(load_floats(from, lanes));
        else return load<Words>(from);
    }

    void aim(std::int64_t i, Parts &at) const {
        for (int r = 0; r < block_rows; ++r) {
            const std::int64_t key = keys_[least(i + r, count_ - 1)];
            at.main[r] = row_of<T>(o_.k, item_.seq, item_.head_kv, key);
            if (p_.dim_rope) at.rope[r] = row_of<T>(o_.k_rope, item_.seq, item_.head_kv, key);
        }
    }

    FUSION_INLINE void copy(std::int64_t slice, bool tail, std::int64_t d) const {
        const T *const *const later = tail ? later_.rope : later_.main, *const *const from = tail ? to_.rope : to_.main;
        FUSION_UNROLL for (int i = 0; i < block_rows; ++i) __builtin_prefetch(later[i] + d, 0, 2);
        if (!next_) return;
        const std::int64_t words = words_;
        Word *to = next_ + slice * lanes;
        FUSION_UNROLL for (int i = 0; i < block_rows; ++i, to += words) store(to, vector(from[i] + d));
    }

    FUSION_INLINE void cross(std::int64_t slice, bool tail, std::int64_t d) const {
        const std::int64_t n = tail ? p_.dim_rope : p_.dim_qk, column = d / panel * panel;
        const std::int64_t pitch = least<std::int64_t>(panel, n - column);
        const std::int64_t words = words_;
        Word *to = across_ + (tail ? rope_base_ : 0) + column * deep_ + at_ * pitch + (d - column);
        const Word *from = now_ + slice * lanes;
        if constexpr (Format::depth == 1) {
            FUSION_UNROLL for (int i = 0; i < block_rows; ++i, from += words, to += pitch) store(to, load<Words>(from));
        } else {
#if defined(__AVX512BF16__)
            FUSION_UNROLL for (int i = 0; i < block_rows; i += 2, from += 2 * words, to += pitch) {
                Words pair[2];
                interleave(load<Words>(from), load<Words>(from + words), pair, std::make_integer_sequence<int, 2 * lanes>{});
                store(to, pair[0]);
                store(to + lanes, pair[1]);
            }
#endif
        }
    }

    const SparseProblem &p_;
    const SparseOperands &o_;
    const SparseItem &item_;
    const std::int32_t *keys_;
    std::int64_t count_, words_, main_, times_, crossed_;
    Word *buffer_, *across_;
    std::int64_t deep_, rope_base_;
    Parts to_, later_;
    Word *next_ = nullptr;
    const Word *now_ = nullptr;
    std::int64_t at_ = 0, held_ = -1;
};

}  // namespace
}  // namespace fusion
