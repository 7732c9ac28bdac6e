// Functions that all plans use to check sizes, to divide work, and to choose the number of threads.

#pragma once

#include "data/problem.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace fusion {

constexpr std::size_t cache_line = 64;  // bytes

template <class T> constexpr T ceil_div(T n, std::type_identity_t<T> size) { return (n + size - 1) / size; }

template <class T> constexpr T round_up(T n, std::type_identity_t<T> multiple) {
    return ceil_div(n, multiple) * multiple;
}

// Throws std::invalid_argument if sizes do not fit together. These are bugs of the Python side, which checks arguments.
struct Require {
    const char *plan;

    void operator()(bool holds, const char *what) const {
        if (!holds) throw std::invalid_argument(std::string("fusion_attention: native ") + plan + ": " + what);
    }

    template <class AnyProblem> void heads(const AnyProblem &p) const {
        (*this)(p.heads_q > 0 && p.heads_kv > 0 && p.heads_q % p.heads_kv == 0, "heads_q is no multiple of heads_kv");
    }

    void dims(bool hold) const { (*this)(hold, "a head dim is not positive"); }

    void lengths(const Sequence &seq) const { (*this)(seq.q_len >= 0 && seq.kv_len >= 0, "a length is negative"); }

    void problem(const Problem &p, const std::vector<Sequence> &sequences) const {
        heads(p);
        dims(p.dim_qk > 0 && p.dim_v > 0 && p.dim_rope >= 0);
        (*this)(p.keep_below >= 0 && p.keep_below <= 65536, "the threshold of dropout is outside 0 ... 65536");
        for (const Sequence &seq : sequences) lengths(seq);
    }
};

// Multiply-adds of a (row, key) pair.
constexpr double pair_work(const Problem &p) { return static_cast<double>(p.dim_qk + p.dim_rope + p.dim_v); }

constexpr std::int64_t group_of(const Problem &p) { return p.heads_q / p.heads_kv; }

// Throws for work lists that would not fit into memory, before they are made.
inline void refuse_endless(std::int64_t items) {
    if (items > std::int64_t{1} << 26) throw std::bad_alloc();
}

// The number of threads for `pieces` items of work.
constexpr int team_size(int threads, std::int64_t pieces) {
    return static_cast<int>(std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(pieces, 1)));
}

// The number of threads for an amount of work, if each additional thread must have at least work_per_thread.
inline int team_by_work(int threads, double work, double work_per_thread) {
    return static_cast<int>(std::clamp(1 + work / work_per_thread, 1.0, static_cast<double>(std::max(threads, 1))));
}

// Estimated time of one thread: 10 us per work_per_thread.
inline std::chrono::duration<double, std::micro> time_alone(double work, double work_per_thread) {
    return std::chrono::microseconds(10) * (work / work_per_thread);
}

// The sequence of a row that is counted over all sequences; first_row: first row of each sequence, and the end.
inline std::int64_t sequence_of(const std::vector<std::int64_t> &first_row, std::int64_t row) {
    return std::upper_bound(first_row.begin(), first_row.end() - 1, row) - first_row.begin() - 1;
}

// Rows [from, to) of a head as memory to prefetch.
inline PrefetchRows part_of(const Rows &rows, Dtype dtype, std::int64_t seq, std::int64_t head, std::int64_t from,
                            std::int64_t to, std::int64_t dim) {
    if (to <= from) return {};  // the operand may have no memory
    const std::int64_t size = dtype == Dtype::float32 ? 4 : 2;
    const std::int64_t at = rows.address[seq] + head * rows.stride_head[seq] + from * rows.stride_token;
    return {static_cast<const char *>(rows.base) + at * size, rows.stride_token * size, to - from, dim * size};
}

}  // namespace fusion
