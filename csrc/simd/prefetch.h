// Memory that is asked for while a tile is computed, a few lines at a time: its results', and what the thread reads
// next.
//
// Rows of one head lie far apart in most layouts, where no hardware prefetcher follows. Asked for in one burst they
// would wait for each other, so products of panels of keys take turns with a few lines. They come as near as they can:
// hints that name the second-level cache bring fewer of them there (a fortieth of the time of a narrow band).

#pragma once

#include "data/problem.h"
#include "simd/vec.h"

namespace fusion {
namespace {

class Errands {
public:
    void add(const Ahead::Part &part) {
        if (part.rows <= 0) return;
        Ahead::Part &added = parts_[count_++] = part;
        if (part.stride == part.bytes) added = {part.first, 0, 1, part.rows * part.bytes};
        lines_ += added.rows * ((added.bytes + line - 1) / line);
    }

    // Over so many turns.
    void spread(std::int64_t turns) { pace_ = least((lines_ + turns - 1) / turns, most_lines); }

    FUSION_INLINE void run() {
        const char *at = at_;
        for (std::int64_t left = pace_; left > 0; --left, at += line) {
            if (at >= end_ && !(at = next_row())) return;
            __builtin_prefetch(at);
        }
        at_ = at;
    }

private:
    static constexpr std::int64_t line = 64, most_lines = 64;

    // Where the next row begins; null behind the last one, and then no turn has anything to do. Out of line: the loop
    // over panels that asks needs its registers.
    __attribute__((noinline)) const char *next_row() {
        if (end_ && ++row_ == parts_[part_].rows) {
            row_ = 0;
            ++part_;
        }
        if (part_ == count_) {
            pace_ = 0;
            return nullptr;
        }
        const char *const at = parts_[part_].first + row_ * parts_[part_].stride;
        end_ = at + parts_[part_].bytes;
        return at;
    }

    Ahead::Part parts_[GradientAhead::most];
    const char *at_ = nullptr, *end_ = nullptr;  // of the present row
    std::int64_t lines_ = 0, pace_ = 0, row_ = 0;
    int count_ = 0, part_ = 0;
};

}  // namespace
}  // namespace fusion
