#include "plan/pool.h"

#include "plan/arena.h"
#include "plan/schedule.h"
#include "plan/team.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace fusion {
namespace {

constexpr Require require{"pooling"};

constexpr std::int64_t item_bytes = 64 << 10;  // of rows that an item reads, about
constexpr double bytes_per_thread = 64 << 10;  // 10 us
// Larger results are written past the caches: block by block, or window by window if the rows of a window are so many
// that the lines of a block are far apart, and a cache holds the gradients of a window.
constexpr double streamed_bytes = 8 << 20;
constexpr std::int64_t streamed_rows = 16, gathered_bytes = 1 << 20;
// Sums of dbias begin anew after a number of windows, so that threads can share the work: 64 sums, each of at least 4
// windows, whose rows take as much memory, and of at most 256, so that rounding errors stay small.
constexpr std::int64_t most_sums = 64, least_windows = 4, most_windows = 256;

std::int64_t size_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// The division of all windows, counted over sequences and heads, into equal items.
struct Division {
    const PoolCall &call;
    std::vector<std::int64_t> first;  // first window of each sequence, and their number
    std::int64_t bytes, per_item = 1;

    explicit Division(const PoolCall &of) : call(of) {
        const PoolProblem &p = call.problem;
        std::int64_t windows = 0;
        for (const PoolSequence &seq : call.sequences) {
            first.push_back(windows);
            windows += seq.results * p.heads;
        }
        first.push_back(windows);
        bytes = p.ratio * p.channels() * 2 * size_of(p.dtype);
    }

    std::int64_t windows() const { return first.back(); }
    std::int64_t scratch() const { return windows() ? pool_block * call.problem.window_rows() : 0; }  // floats
    std::int64_t items() const { return ceil_div(windows(), per_item); }
    int team(int threads) const {
        return team_by_work(threads, static_cast<double>(windows() * bytes), bytes_per_thread);
    }
    Alone alone() const { return time_alone(static_cast<double>(windows() * bytes), bytes_per_thread); }

    // Calls body(results) for the results of item i, one head of a sequence at a time.
    template <class Body> void each(std::int64_t i, Body body) const {
        const std::int64_t end = std::min((i + 1) * per_item, windows());
        for (std::int64_t w = i * per_item; w < end;) {
            const std::int64_t b = sequence_of(first, w), results = call.sequences[b].results;
            const std::int64_t head = (w - first[b]) / results, at = (w - first[b]) % results;
            const std::int64_t count = std::min(results - at, end - w);
            body(PoolItem{b, head, at, at + count});
            w += count;
        }
    }
};

// Clears channels [from, to) of rows [begin, end) of a head.
void clear(const Rows &rows, Dtype dtype, std::int64_t seq, std::int64_t head, std::int64_t begin, std::int64_t end,
           std::int64_t from, std::int64_t to) {
    const std::int64_t size = size_of(dtype);
    for (std::int64_t t = begin; t < end; ++t) {
        const std::int64_t at = rows.address[seq] + head * rows.stride_head[seq] + t * rows.stride_token + from;
        std::memset(static_cast<char *>(rows.base) + at * size, 0, static_cast<std::size_t>((to - from) * size));
    }
}

}  // namespace

void PoolCall::check() const {
    require(problem.heads > 0 && problem.dim > 0 && problem.ratio > 0, "a size is not positive");
    for (const PoolSequence &seq : sequences) {
        require(seq.results >= 0 && seq.before >= 0 && seq.before <= (problem.overlap ? 1 : 0) &&
                    seq.room >= seq.results && (seq.results ? seq.results + seq.before : 0) <= seq.rows / problem.ratio,
                "a sequence has fewer rows than its windows");
    }
}

void PoolCall::forward(const PoolOperands &operands, int threads) const {
    Division division(*this);
    refuse_endless(division.windows());
    division.per_item = std::max<std::int64_t>(item_bytes / division.bytes, 1);
    const PoolJob job = {&problem, &operands, sequences.data()};
    const std::int64_t scratch = division.scratch();
    int size = division.team(threads);
    const Lease memory = lease_for(size, [&](int n) { return sizeof(float) * static_cast<std::size_t>(scratch * n); });
    run_team(size, division.alone(), [&](const Team &team) {
        float *const thread_scratch = reinterpret_cast<float *>(memory.data()) + scratch * team.thread;
        team.distribute(division.items(), [&](std::int64_t i) {
            division.each(i, [&](const PoolItem &item) { kernels.forward(job, item, thread_scratch); });
        });
        team.distribute(sequences.size(), [&](std::size_t b) {
            for (std::int64_t h = 0; h < problem.heads; ++h) {
                clear(operands.out, problem.dtype, static_cast<std::int64_t>(b), h, sequences[b].results,
                      sequences[b].room, 0, problem.dim);
            }
        });
    });
}

namespace {

// Clears the gradients of elements that belong to no window: rows behind the last one, the first half of its rows'
// channels, which a later window would pool, and the second half of those before the first result.
void clear_unpooled(const PoolProblem &p, const PoolSequence &seq, const PoolOperands &o, std::int64_t b) {
    const std::int64_t windows = seq.results ? seq.results + seq.before : 0, end = windows * p.ratio;
    for (const Rows &rows : {o.dkv, o.dgate}) {
        for (std::int64_t h = 0; h < p.heads; ++h) {
            clear(rows, p.dtype, b, h, end, seq.rows, 0, p.channels());
            if (!p.overlap || !windows) continue;
            clear(rows, p.dtype, b, h, end - p.ratio, end, 0, p.dim);
            if (seq.before) clear(rows, p.dtype, b, h, 0, p.ratio, p.dim, p.channels());
        }
    }
}

// dbias of a position: the sum over items in order, a cache line at a time, since the lines of items conflict with each
// other in a cache. sums: [items][ratio][1 or 2][padded].
void add_sums(const PoolProblem &p, const float *sums, std::int64_t items, std::int64_t position, float *dbias) {
    const std::int64_t halves = p.overlap ? 2 : 1, padded = round_up(p.dim, pool_padding);
    for (std::int64_t half = 0; half < halves; ++half) {
        for (std::int64_t d = 0; d < p.dim; d += pool_padding) {
            double total[pool_padding] = {};
            for (std::int64_t i = 0; i < items; ++i) {
                const float *const from = sums + ((i * p.ratio + position) * halves + half) * padded + d;
                for (std::int64_t lane = 0; lane < pool_padding; ++lane) total[lane] += from[lane];
            }
            std::copy_n(total, std::min(pool_padding, p.dim - d), dbias + position * p.channels() + half * p.dim + d);
        }
    }
}

}  // namespace

void PoolCall::backward(PoolOperands operands, int threads) const {
    Division division(*this);
    refuse_endless(division.windows());
    const std::int64_t padded = round_up(problem.dim, pool_padding);
    std::int64_t scratch = division.scratch();
    const std::int64_t sums = operands.dbias ? problem.ratio * (problem.overlap ? 2 : 1) * padded : 0;
    division.per_item = operands.dbias
                            ? std::clamp(ceil_div(division.windows(), most_sums), least_windows, most_windows)
                            : std::max<std::int64_t>(item_bytes / division.bytes, 1);
    const bool large = static_cast<double>(division.windows() * division.bytes) > streamed_bytes;
    const std::int64_t gathered = 2 * problem.window_rows() * problem.gathered_row() * size_of(problem.dtype);
    operands.streamed = large && problem.window_rows() <= streamed_rows;
    operands.gathered = large && !operands.streamed && gathered <= gathered_bytes;
    if (operands.gathered) scratch += ceil_div(gathered, static_cast<std::int64_t>(sizeof(float)));
    const PoolJob job = {&problem, &operands, sequences.data()};
    const std::int64_t items = division.items();
    int size = division.team(threads);
    const Lease memory =
        lease_for(size, [&](int n) { return sizeof(float) * static_cast<std::size_t>(scratch * n + sums * items); });
    run_team(size, division.alone(), [&](const Team &team) {
        float *const shared = reinterpret_cast<float *>(memory.data()), *const thread_scratch = shared + sums * items +
                                                                                                scratch * team.thread;
        team.distribute(items, [&](std::int64_t i) {
            float *const dbias = operands.dbias ? shared + sums * i : nullptr;
            std::fill_n(dbias, dbias ? sums : 0, 0.0f);
            division.each(i, [&](const PoolItem &item) { kernels.backward(job, item, dbias, thread_scratch); });
        });
        team.distribute(sequences.size(), [&](std::size_t b) {
            clear_unpooled(problem, sequences[b], operands, static_cast<std::int64_t>(b));
        });
        team.distribute(operands.dbias ? problem.ratio : 0,
                        [&](std::int64_t position) { add_sums(problem, shared, items, position, operands.dbias); });
#if defined(__x86_64__)
        _mm_sfence();  // other threads read results that were written past the caches
#endif
    });
}

}  // namespace fusion
