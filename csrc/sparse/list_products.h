// Products of a list's keys, block by block, with rows read in place; for rows of complete vectors.
//
// Rows in the format of words are not copied, except for tile registers; others are converted while the previous block
// is multiplied. The product of a block is divided into steps; between them, one vector of each row of a later block is
// prefetched and one vector of each row of the current block is transposed, so that memory and products overlap.

#pragma once

#include "sparse/gather.h"

namespace fusion {
namespace {

struct BlockRows {  // addresses of a block's rows, and of their tails (rope), which follow them in B
    const char *main[block_rows], *tail[block_rows];
    std::int64_t main_words, tail_words, apart;  // apart: words from row to row of copies
};

template <class Word> struct Scattered {  // A with rows at arbitrary addresses
    const char *const (&rows)[block_rows];
    FUSION_INLINE Word operator()(int i, std::int64_t k) const { return load<Word>(rows[i] + k * sizeof(Word)); }
};

// Products of a block's rows as in by_panels(); calls side(i) once for each i below `times`.
template <class Format, class Side>
__attribute__((noinline)) void block_by_panels(const BlockRows &rows, const typename Format::Word *b, float *c,
                                               std::int64_t c_stride, std::int64_t columns, std::int64_t times,
                                               const Side &side) {
    using Word = typename Format::Word;
    const std::int64_t main = rows.main_words, depth = main + rows.tail_words;
    const std::int64_t panels = (columns + panel - 1) / panel;
    std::int64_t next = 0;
    for_panels(columns, [&](auto vectors, std::int64_t at) __attribute__((always_inline)) {
        constexpr int N = vectors();
        SumBlock<Format, block_rows, N, N, false> block({c + at, c_stride});
        const std::int64_t end = times * (at / panel + 1) / panels, pieces = most<std::int64_t>(end - next, 1);
        const auto *row = b + at * depth;
        for (std::int64_t segment = 1, k = 0; segment <= pieces; ++segment) {
            if (next < end) side(next++);
            const std::int64_t stop = depth * segment / pieces / Format::step * Format::step;
            if constexpr (Format::step > 1) {  // tails follow the rest
                const auto *const first = reinterpret_cast<const Word *>(rows.main[0]);
                row = block.add(k, stop, RowMajor<Word>{first, rows.apart}, row, N * lanes);
            } else {
                if (k < main) row = block.add(k, least(stop, main), Scattered<Word>{rows.main}, row, N * lanes);
                if (stop > main) {
                    row = block.add(most(k - main, std::int64_t{0}), stop - main, Scattered<Word>{rows.tail}, row,
                                    N * lanes);
                }
            }
            k = stop;
        }
        block.finish();
    });
}

// True if the rows of a problem can be read in place; others use gather().
template <class Format> bool suits_stream(const SparseProblem &p) {
    return (p.dim_qk | p.dim_rope) % (lanes * Format::depth) == 0;
}

template <class Format, class T> class Stream {
public:
    using Word = typename Format::Word;
    static constexpr std::int64_t width = lanes * Format::depth;  // elements of a vector of words

    // buffer: memory for two blocks of rows; across: the first `columns` elements of each row, transposed, with `deep`
    // word rows.
    Stream(const SparseJob &job, const SparseItem &item, const Sizes<Format> &sizes, const std::int32_t *keys,
           std::int64_t count, Word *buffer, Word *across, std::int64_t deep, std::int64_t columns)
        : p_(*job.problem), o_(*job.operands), item_(item), keys_(keys), count_(count), words_(sizes.words),
          main_(p_.dim_qk / width), times_(2 * (sizes.words / lanes)), crossed_(columns / width),
          first_(least(p_.dim_qk, columns)), buffer_(buffer), across_(across), deep_(deep),
          rope_base_(sizes.main_columns * deep) {
        now_.main_words = sizes.main_words;
        now_.tail_words = sizes.words - sizes.main_words;
        now_.apart = sizes.words;
    }

    // Sets the destination of transposed blocks.
    void transpose_to(Word *across) { across_ = across; }

    // Multiplies the block of keys from number i of the list on, which is number `at` of a chunk.
    void multiply(std::int64_t i, std::int64_t at, const Word *b, float *c, std::int64_t c_stride,
                  std::int64_t columns) {
        const std::int64_t after = i + block_rows;
        if (loaded_ != i) begin(i);
        take(i);
        at_ = at / Format::depth;
        next_ = after + block_rows <= count_ ? words_of(after) : nullptr;
        aim(after + ahead);
        to_ = &addresses(after);
        later_ = &addresses(after + ahead);
        block_by_panels<Format>(now_, b, c, c_stride, columns, times_, *this);
        loaded_ = next_ ? after : -1;
    }

    // Multiplies the first `words` of the same block's rows by another operand.
    void multiply_first(std::int64_t words, const Word *b, float *c, std::int64_t c_stride,
                        std::int64_t columns) const {
        BlockRows rows = now_;
        rows.main_words = words;
        rows.tail_words = 0;
        block_by_panels<Format>(rows, b, c, c_stride, columns, 0, *this);
    }

    // One step: prefetches (and copies) a vector of each row, and transposes one.
    FUSION_INLINE void operator()(std::int64_t step) const {
        const std::int64_t slice = step / 2;
        const bool tail = slice >= main_;
        const std::int64_t d = (tail ? slice - main_ : slice) * width;
        if (step % 2 == 0) fetch(slice, tail, d);
        else if (slice < crossed_) cross(tail, d);
    }

private:
    // True if rows are copied; tile registers need rows with a constant stride.
    static constexpr bool copies = sizeof(T) * Format::depth != sizeof(Word) || Format::step > 1;
    static constexpr std::int64_t ahead = 2 * block_rows;  // keys behind the next block that are prefetched
    struct Parts {
        const T *main[block_rows], *rope[block_rows];
    };

    static FUSION_INLINE Words vector(const T *from) {
        if constexpr (Format::depth == 1) return bits_of(load_floats(from, lanes));
        else return load<Words>(from);
    }

    Parts &addresses(std::int64_t i) { return addresses_[i / block_rows % (ahead / block_rows + 2)]; }
    Word *words_of(std::int64_t i) { return buffer_ + i / block_rows % 2 * block_rows * words_; }

    void aim(std::int64_t i) {
        Parts &at = addresses(i);
        std::int64_t keys[block_rows];
        for (int r = 0; r < block_rows; ++r) keys[r] = keys_[least(i + r, count_ - 1)];
        point(o_.k, keys, at.main);
        if (p_.dim_rope) point(o_.k_rope, keys, at.rope);
    }

    FUSION_INLINE void point(const Keys &from, const std::int64_t (&keys)[block_rows],
                             const T *(&to)[block_rows]) const {
        if (from.table || from.kv_len) {
            for (int r = 0; r < block_rows; ++r) to[r] = row_of<T>(from, item_.seq, item_.head_kv, keys[r]);
            return;
        }
        const T *const first = row_of<const T>(from.rows, item_.seq, item_.head_kv, 0);
        const std::int64_t stride = from.rows.stride_token;
        for (int r = 0; r < block_rows; ++r) to[r] = first + keys[r] * stride;
    }

    // Prepares a block without a predecessor.
    void begin(std::int64_t i) {
        next_ = words_of(i);
        for (std::int64_t k = i; k < i + block_rows + ahead; k += block_rows) {
            aim(k);
            to_ = later_ = &addresses(k);
            for (std::int64_t s = 0; s < times_; s += 2) (*this)(s);
            next_ = nullptr;
        }
    }

    void take(std::int64_t i) {
        if constexpr (copies) {
            const Word *copy = words_of(i);
            for (int r = 0; r < block_rows; ++r, copy += words_) {
                now_.main[r] = reinterpret_cast<const char *>(copy);
                now_.tail[r] = reinterpret_cast<const char *>(copy + now_.main_words);
            }
        } else {
            const Parts &from = addresses(i);
            std::memcpy(now_.main, from.main, sizeof now_.main);
            std::memcpy(now_.tail, p_.dim_rope ? from.rope : from.main, sizeof now_.tail);
        }
    }

    FUSION_INLINE void fetch(std::int64_t slice, bool tail, std::int64_t d) const {
        const T *const *const later = tail ? later_->rope : later_->main;
        FUSION_UNROLL for (int i = 0; i < block_rows; ++i) __builtin_prefetch(later[i] + d, 0, 2);
        if constexpr (copies) {
            if (!next_) return;
            const T *const *const from = tail ? to_->rope : to_->main;
            const std::int64_t words = words_;
            Word *to = next_ + slice * lanes;
            FUSION_UNROLL for (int i = 0; i < block_rows; ++i, to += words) store(to, vector(from[i] + d));
        }
    }

    FUSION_INLINE void cross(bool tail, std::int64_t d) const {
        const std::int64_t n = tail ? p_.dim_rope : first_, column = d / panel * panel;
        const std::int64_t pitch = least<std::int64_t>(panel, n - column), at = d / width * lanes * sizeof(Word);
        Word *to = across_ + (tail ? rope_base_ : 0) + column * deep_ + at_ * pitch + (d - column);
        const char *const *const from = tail ? now_.tail : now_.main;
        if constexpr (Format::depth == 1) {
            FUSION_UNROLL for (int i = 0; i < block_rows; ++i, to += pitch) store(to, load<Words>(from[i] + at));
        } else {
            FUSION_UNROLL for (int i = 0; i < block_rows; i += 2, to += pitch) {
                Words pair[2];
                Format::interleave(load<Words>(from[i] + at), load<Words>(from[i + 1] + at), pair);
                store(to, pair[0]);
                store(to + lanes, pair[1]);
            }
        }
    }

    const SparseProblem &p_;
    const SparseOperands &o_;
    const SparseItem &item_;
    const std::int32_t *keys_;
    std::int64_t count_, words_, main_, times_, crossed_, first_;
    Word *buffer_, *across_;
    std::int64_t deep_, rope_base_;
    BlockRows now_;
    Parts addresses_[ahead / block_rows + 2];  // of the current and the following blocks
    const Parts *to_ = nullptr, *later_ = nullptr;
    Word *next_ = nullptr;  // destination of the next block's rows
    std::int64_t at_ = 0, loaded_ = -1;
};

// Products of a list's keys with heads: rows are read in place if possible, else gathered block by block, each of which
// is multiplied while its rows are in the cache.
template <class Format, class T> struct ListReader {
    using Word = typename Format::Word;
    const SparseJob &job;
    const SparseItem &item;
    const Sizes<Format> &sizes;
    const std::int32_t *keys;
    Word *rows;  // two blocks of rows
    const std::int64_t deep;
    const bool streams;
    KeyPrefetch ahead;
    Stream<Format, T> stream;

    // lead: number of keys to prefetch ahead; cost: words multiplied per key; columns: elements of rows that streams
    // transpose.
    ListReader(const SparseJob &job_, const SparseItem &item_, const Sizes<Format> &sizes_, const std::int32_t *keys_,
               std::int64_t count, bool streams_, std::int64_t lead, std::int64_t cost, Word *rows_, Word *across,
               std::int64_t deep_, std::int64_t columns)
        : job(job_), item(item_), sizes(sizes_), keys(keys_), rows(rows_), deep(deep_), streams(streams_),
          ahead(job, item, keys, streams ? 0 : count, lead, cost),
          stream(job, item, sizes, keys, count, rows, across, deep, columns) {}

    // Products of a chunk's keys with packed heads, to [key][pitch]; gathered rows are transposed too unless the
    // destination is null. Calls rest(first key of a block, keys, true if rows are read in place) for other work per
    // block.
    template <class Rest>
    FUSION_INLINE void score(const Chunk &chunk, const Word *q, float *to, std::int64_t pitch, std::int64_t columns,
                             Word *across, Rest rest) {
        const std::int64_t words = sizes.words;
        for (std::int64_t at = 0; at < chunk.count; at += block_rows, to += block_rows * pitch) {
            const std::int64_t here = least<std::int64_t>(block_rows, chunk.count - at);
            const bool in_place = streams && here == block_rows;
            if (in_place) {
                stream.multiply(chunk.keys - keys + at, at, q, to, pitch, columns);
            } else {
                gather_keys(chunk, at, here, across);
                ahead.gathered(here);
                by_panels<Format, block_rows, false>(rows, words, q, words, words, to, pitch, columns, nullptr, ahead);
            }
            rest(at, here, in_place);
        }
    }

private:
    void gather_keys(const Chunk &chunk, std::int64_t at, std::int64_t here, Word *across) {
        const SparseProblem &p = *job.problem;
        const SparseOperands &o = *job.operands;
        const std::int64_t words = sizes.words, main = sizes.main_words;
        for (std::int64_t i = at; i < at + here; i += Format::depth) {
            Word *const row = rows + (i - at) * words;
            gather<Format, T>(o.k, item, chunk, i, p.dim_qk, main, words, row, across, deep);
            if (!p.dim_rope) continue;
            gather<Format, T>(o.k_rope, item, chunk, i, p.dim_rope, words - main, words, row + main,
                              across ? across + sizes.main_columns * deep : nullptr, deep);
        }
        clear_rows(here, words, rows);
    }
};

}  // namespace
}  // namespace fusion
