// What every plan cuts its work with.

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

// Refuses what does not fit together: bugs of the Python side, which checks what users give.
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
};

// No memory holds the keys of longer lists of work: refused before they are made, which would take much memory itself.
inline void refuse_endless(std::int64_t items) {
    if (items > std::int64_t{1} << 26) throw std::bad_alloc();
}

// How many threads share `pieces` of work.
constexpr int team_size(int threads, std::int64_t pieces) {
    return static_cast<int>(std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(pieces, 1)));
}

// The same by how much work there is, of which one thread more needs so much to bring more than it costs.
inline int team_by_work(int threads, double work, double work_per_thread) {
    return static_cast<int>(std::clamp(1 + work / work_per_thread, 1.0, static_cast<double>(std::max(threads, 1))));
}

// How long one thread takes for it, roughly: as much work as is worth a thread counts as 10 us.
inline std::chrono::duration<double, std::micro> time_alone(double work, double work_per_thread) {
    return std::chrono::microseconds(10) * (work / work_per_thread);
}

// The sequence of a row, where rows are counted over all sequences; first_row: of each, and behind the last.
inline std::int64_t sequence_of(const std::vector<std::int64_t> &first_row, std::int64_t row) {
    return std::upper_bound(first_row.begin(), first_row.end() - 1, row) - first_row.begin() - 1;
}

// Rows [from, to) of a head, to be asked for.
inline PrefetchRows part_of(const Rows &rows, Dtype dtype, std::int64_t seq, std::int64_t head, std::int64_t from,
                            std::int64_t to, std::int64_t dim) {
    if (to <= from) return {};  // perhaps there is no memory at all
    const std::int64_t size = dtype == Dtype::float32 ? 4 : 2;
    const std::int64_t at = rows.address[seq] + head * rows.stride_head[seq] + from * rows.stride_token;
    return {static_cast<const char *>(rows.base) + at * size, rows.stride_token * size, to - from, dim * size};
}

}  // namespace fusion
