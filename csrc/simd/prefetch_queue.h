// A queue of prefetches, of which kernels issue a few cache lines at a time between products.
//
// Rows of one head are far apart in most layouts, where hardware prefetchers fail, and a core has few outstanding
// misses, so a burst of prefetches would stall. Lines are prefetched into the second-level cache, because the few miss
// buffers of the first-level cache are needed for the panels of the products.

#pragma once

#include "simd/row_addresses.h"

namespace fusion {
namespace {

// Rows [token, token + count) of n elements of a head as memory to prefetch; empty if the operand is missing.
template <class T>
FUSION_INLINE PrefetchRows prefetch_rows(const Rows &rows, std::int64_t b, std::int64_t head, std::int64_t token,
                                         std::int64_t count, std::int64_t n) {
    if (n <= 0 || count <= 0) return {};
    const auto *first = reinterpret_cast<const char *>(row_of<const T>(rows, b, head, token));
    return {first, rows.stride_token * static_cast<std::int64_t>(sizeof(T)), count,
            n * static_cast<std::int64_t>(sizeof(T))};
}

class PrefetchQueue {
public:
    void add(const PrefetchRows &range) {
        if (range.rows <= 0) return;
        PrefetchRows &added = parts_[count_++] = range;
        if (range.stride == range.bytes) added = {range.first, 0, 1, range.rows * range.bytes};
        lines_ += added.rows * ((added.bytes + line - 1) / line);
    }
    void add(const void *first, std::int64_t bytes) { add({static_cast<const char *>(first), 0, 1, bytes}); }

    // Distributes all lines over a number of steps.
    void spread(std::int64_t steps) { pace_ = least((lines_ + steps - 1) / steps, most_lines); }

    FUSION_INLINE void step() {
        const char *at = at_;
        for (std::int64_t left = pace_; left > 0; --left, at += line) {
            if (at >= end_) {
                if (--left_ > 0) {
                    at = row_ += stride_;
                    end_ = at + bytes_;
                } else if (!(at = next_part())) {
                    return;
                }
            }
            __builtin_prefetch(at, 0, 2);
        }
        at_ = at;
    }

private:
    static constexpr std::int64_t line = 64, most_lines = 1024;  // bytes of a line, most lines per step

    // The address of the next rows; null after the last ones, and later steps then do nothing. Not inlined, because the
    // calling loop over panels needs its registers.
    __attribute__((noinline)) const char *next_part() {
        if (current_ == count_) {
            pace_ = 0;
            return nullptr;
        }
        const PrefetchRows &range = parts_[current_++];
        row_ = range.first, stride_ = range.stride, left_ = range.rows, bytes_ = range.bytes;
        end_ = row_ + bytes_;
        return row_;
    }

    PrefetchRows parts_[Prefetches::most];
    const char *at_ = nullptr, *end_ = nullptr, *row_ = nullptr;  // of the current row
    std::int64_t stride_ = 0, bytes_ = 0, left_ = 0;              // of the current range; left_: remaining rows
    std::int64_t lines_ = 0, pace_ = 0;
    int count_ = 0, current_ = 0;
};

}  // namespace
}  // namespace fusion
