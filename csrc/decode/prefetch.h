// Prefetches of rows of a cache while earlier ones are multiplied.

#pragma once

#include "decode/queries.h"

namespace fusion {
namespace {
namespace decode {

// A processor drops prefetches that are faster than memory. So values are prefetched a tile ahead (unless short tiles
// are frequent), keys half a tile, and both again this many keys ahead, which costs little if they have arrived. With
// vectors of eight lanes, and in scores_row_vectors.h, only rows of float32 are prefetched again: others take longer to
// multiply than to read.
template <class F> constexpr std::int64_t again_keys = F::depth == 1 ? lanes : 2 * lanes;
template <class F> constexpr std::int64_t again_values = F::depth == 1 ? 32 : 16;
template <class F> constexpr bool slower_in_memory = F::elements == 1;

// Prefetches into the second-level cache.
FUSION_INLINE void fetch_line(const char *at) { __builtin_prefetch(at, 0, 2); }
FUSION_INLINE void fetch_line(const char *row, std::int64_t byte) {
#if defined(__x86_64__)
    __asm__ volatile("prefetcht1 (%0,%1)" : : "r"(row), "r"(byte));  // gcc would add both with a separate instruction
#else
    fetch_line(row + byte);
#endif
}

// Prefetches of rows that later loops read, in the order of memory, which is fastest. Not a PrefetchQueue, because rows
// of pages are given by addresses, and this runs in the loop over words of a key.
class LinePrefetch {
public:
    LinePrefetch() = default;
    // Bytes [from, to) of `count` rows with stride `step` (0: none), while rows of `met` bytes are multiplied;
    // converted rows are longer than stored ones.
    LinePrefetch(const char *const *rows, std::int64_t count, std::int64_t step, std::int64_t from, std::int64_t to,
                 std::int64_t met)
        : first_(rows), rows_(rows + 1), last_(rows + count), from_(from), size_(to - from) {
        if (size_ <= 0) return;
        every_ = most<std::int64_t>(met / size_, 1), wait_ = 0;
        if (from == 0 && step == to) rows_ = last_, size_ *= count;  // contiguous rows
        at_ = rows[0] + from, end_ = at_ + size_;
    }

    bool any() const { return at_ != nullptr; }
    const char *row(std::int64_t i) const { return first_[i] + from_; }
    // Prefetches the next N lines if they are due; after the last line, that one again.
    template <int N> FUSION_INLINE void fetch() {
        if (wait_-- > 0) return;
        wait_ = every_ - 1;
        FUSION_UNROLL for (int i = 0; i < N; ++i) step();
    }
    FUSION_INLINE void fetch(std::int64_t count) {
        if (!at_) return;
        const char *const from = at_;
        if (from + count * 64 >= end_) return void(fetch_each(count));
        at_ += count * 64;
        for (std::int64_t i = 0; i < count; ++i) fetch_line(from + 64 * i);
    }

    // Returns the address of the next `count` lines, which the caller prefetches. If they do not follow each other,
    // they are prefetched here, and the address of a later line is returned; at the end that of the last line.
    FUSION_INLINE const char *take(std::int64_t count) {
        const char *const from = at_;
        at_ += count * 64;
        if (at_ >= end_) {
            if (at_ > end_ || rows_ == last_) {
                at_ = from;
                return fetch_each(count);
            }
            at_ = *rows_++ + from_, end_ = at_ + size_;
        }
        return from;
    }

private:
    __attribute__((noinline)) const char *fetch_each(std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) step();
        return at_;
    }
    FUSION_INLINE void step() {
        fetch_line(at_);
        at_ += 64;
        if (__builtin_expect(at_ < end_, 1)) return;
        if (rows_ < last_) at_ = *rows_++ + from_, end_ = at_ + size_;
        else at_ -= 64;
    }

    const char *at_ = nullptr, *end_ = nullptr;  // null: none
    const char *const *first_ = nullptr, *const *rows_ = nullptr, *const *last_ = nullptr;
    std::int64_t from_ = 0, size_ = 0, every_ = 1, wait_ = std::int64_t{1} << 62;
};

// Repeated prefetches of the rows that are read next, in the order of reads.
struct RepeatPrefetch {
    const char *const *rows = nullptr;  // null: none
    std::int64_t to = 0;

    template <int N> FUSION_INLINE void fetch(std::int64_t row, std::int64_t byte) const {
        if (!rows || byte >= to) return;
        FUSION_UNROLL for (int i = 0; i < N; ++i) fetch_line(rows[row + i], byte);
    }
    // Prefetches while P words of each of `lanes` rows are multiplied.
    template <int P> FUSION_INLINE void follow(std::int64_t step) const {
        if constexpr (lanes == 16) {
            fetch<P>(step * P % 16, step * P / 16 * 64);
        } else if (step * P % 16 == 0) {
            fetch<lanes>(0, step * P / 16 * 64);
        }
    }
};

// Prefetches the number of lines that P words of each of N rows occupy, while these are multiplied.
template <int P, int N> FUSION_INLINE void follow(LinePrefetch &ahead, std::int64_t step) {
    if constexpr (P * N >= 16) ahead.fetch<P * N / 16>();
    else if (step * P * N % 16 == 0) ahead.fetch<1>();
}

// The repeated prefetches of the keys that are read next; after the last keys, the first values.
template <class F>
FUSION_INLINE RepeatPrefetch repeat_for(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                        const LinePrefetch &ahead, std::int64_t key) {
    const std::int64_t upcoming = key + again_keys<F> - t.count;
    if (b.row == 0 && w.sizes.direct_keys && upcoming < 0)
        return {w.s.key_rows + key + again_keys<F>, row_bytes(w.p.storage, w.p.dim_qk)};
    if (upcoming >= 0 && t.count == decode_tile && ahead.any() && !w.p.shares_kv) {
        return {w.s.value_rows + upcoming, row_bytes(w.p.storage, w.p.dim_v)};
    }
    return {};
}

}  // namespace decode
}  // namespace
}  // namespace fusion
