// Pooling of windows of rows to compressed keys: plain data like data/problem.h, and the table of its kernels.

#pragma once

#include "data/problem.h"

namespace fusion {

// Windows of `ratio` rows of `channels` elements, which a softmax per channel pools to one row of `dim`. With overlap
// (channels = 2 dim) a window also pools the rows of the window before it: those by their first dim elements, its own
// rows by their last.
struct PoolProblem {
    std::int64_t heads, dim, ratio;
    bool overlap;
    Dtype dtype;

    std::int64_t channels() const { return overlap ? 2 * dim : dim; }
    std::int64_t window_rows() const { return overlap ? 2 * ratio : ratio; }
    // Elements of a row of gathered gradients: an odd number of cache lines, so that a column of a window takes all
    // sets of a cache.
    std::int64_t gathered_row() const {
        const std::int64_t line = dtype == Dtype::float32 ? 16 : 32;
        return ((dim + line - 1) / line | 1) * line;
    }
};

// Results of a sequence and its rows in memory, which begin with the rows of a window. `before`: the first window in
// memory is only the one before the first result. `room`: rows of out in memory; those behind the results are zero.
struct PoolSequence {
    std::int64_t rows, results, before, room;
};

struct PoolOperands {
    Rows kv, gate, out;           // of the forward
    const float *bias = nullptr;  // [ratio, channels], added to gates; null: none
    Rows dout, dkv, dgate;        // of the backward
    float *dbias = nullptr;       // [ratio, channels]; null: not wanted
    bool streamed = false;        // dkv and dgate are written past the caches, block by block
    bool gathered = false;        // they are gathered in scratch, and written past the caches window by window
};

struct PoolJob {
    const PoolProblem *problem;
    const PoolOperands *operands;
    const PoolSequence *sequences;
};

struct PoolItem {  // results [first, end) of one head of a sequence
    std::int64_t seq, head, first, end;
};

constexpr std::int64_t pool_padding = 16;  // rows of sums are padded to a multiple of this number of floats
constexpr std::int64_t pool_block = 32;    // channels that are pooled together, at most

struct PoolKernels {
    // scratch: pool_block floats for each row of a window.
    void (*forward)(const PoolJob &, const PoolItem &, float *scratch);
    // Writes the gradients of the rows of these results, and adds to dbias of the thread: [ratio][1 or 2][padded dim]
    // floats, null: not wanted. scratch: if gathered, also 2 * gathered_row() elements for each row of a window.
    void (*backward)(const PoolJob &, const PoolItem &, float *dbias, float *scratch);
};

struct PoolVariant {
    PoolKernels kernels[3];  // of each dtype
};

}  // namespace fusion
