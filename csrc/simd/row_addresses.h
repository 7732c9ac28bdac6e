// Address arithmetic and key intervals of the structs of data/problem.h, local to each variant.

#pragma once

#include "data/variant.h"
#include "simd/vec.h"

namespace fusion {
namespace {

template <class T> constexpr T round_up(T n, T to) { return (n + to - 1) / to * to; }

template <class T> FUSION_INLINE T *row_of(const Rows &rows, std::int64_t b, std::int64_t head, std::int64_t token) {
    return static_cast<T *>(rows.base) + rows.address[b] + head * rows.stride_head[b] + token * rows.stride_token;
}

FUSION_INLINE std::int64_t row_of(const Matrix &m, std::int64_t b, std::int64_t head, std::int64_t row) {
    return m.address[b] + head * m.stride_head[b] + row * m.stride_row[b];
}

// Calls body(T{}) with the storage type of a dtype.
template <class Body> FUSION_INLINE void by_dtype(Dtype dtype, Body body) {
    switch (dtype) {
        case Dtype::float32: return body(float{});
        case Dtype::float16: return body(Half{});
        case Dtype::bfloat16: return body(Brain{});
    }
}

// Prefetches n elements; invalid addresses are harmless.
template <int locality = 3, class T> FUSION_INLINE void prefetch(const T *from, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(from + i, 0, locality);
}

FUSION_INLINE std::uint64_t low_bits(std::int64_t n) {
    return n <= 0 ? 0 : n >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1;
}

FUSION_INLINE std::int64_t first_key(const Sequence &seq, std::int64_t row) {
    return most<std::int64_t>(row + seq.lo, 0);
}

FUSION_INLINE std::int64_t end_key(const Sequence &seq, std::int64_t row) {
    return least(most(row + seq.hi, seq.prefix), seq.kv_len);
}

// The number of keys of both sources of a sequence.
FUSION_INLINE std::int64_t all_keys(const Sequence &seq) { return seq.kv_len + seq.compressed_len; }

}  // namespace
}  // namespace fusion
