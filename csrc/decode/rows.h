// Addresses of the rows of a tile of keys, and their conversion to float32 if the kernel cannot multiply them in place.

#pragma once

#include "data/decode.h"
#include "simd/row_addresses.h"

namespace fusion {
namespace {
namespace decode {

inline std::int64_t row_bytes(Storage storage, std::int64_t n) {
    switch (storage) {
        case Storage::float32: return n * 4;
        case Storage::int8: return n;
        case Storage::int4: return (n + 1) / 2;
        default: return n * 2;
    }
}

FUSION_INLINE const char *cache_row(const Cache &c, std::int64_t b, std::int64_t head, std::int64_t token) {
    const std::int64_t at = c.table ? c.table[b * c.table_stride + token / c.page_size] * c.stride_page +
                                          head * c.page_stride_head + token % c.page_size * c.stride_token
                                    : c.address[b] + head * c.stride_head[b] + token * c.stride_token;
    return c.base + at * c.item;
}

// Keys [first, first + count) of a (sequence, head), of which only [begin, end) may be read: a row outside is replaced
// by the nearest row inside, and its results are ignored.
struct KeySpan {
    std::int64_t seq, head, first, count, begin, end;
};

// Finds the addresses of rows; returns their stride in bytes, or 0 if it is not constant.
inline std::int64_t find_rows(const Cache &c, const KeySpan &s, const char **to) {
    std::int64_t i = most<std::int64_t>(s.begin - s.first, 0);
    const std::int64_t stop = least(s.end - s.first, s.count), step = c.stride_token * c.item;
    bool even = i == 0 && stop == s.count;
    for (std::int64_t j = 0; j < i; ++j) to[j] = cache_row(c, s.seq, s.head, s.begin);
    while (i < stop) {
        const std::int64_t token = s.first + i, left = c.table ? c.page_size - token % c.page_size : stop;
        const char *row = cache_row(c, s.seq, s.head, token);
        const std::int64_t count = least(stop - i, left);
        even = even && count == s.count;
        for (std::int64_t j = 0; j < count; ++j, row += step) to[i + j] = row;
        i += count;
    }
    for (; i < s.count; ++i) to[i] = to[stop - 1];
    return even ? step : 0;
}

// Reads one float per row, such as a scale.
inline void find_values(const Cache &c, const KeySpan &s, const char **rows, float *to) {
    find_rows(c, s, rows);
    for (std::int64_t i = 0; i < s.count; ++i) std::memcpy(to + i, rows[i], 4);
}

inline bool all_finite(const float *values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        if (values[i] - values[i] != 0.0f) return false;
    }
    return true;
}

inline bool any_negative(const float *values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        if (values[i] < 0.0f) return true;
    }
    return false;
}

template <class T> FUSION_INLINE void widen_row(const char *row, std::int64_t n, float *to) {
    const T *from = reinterpret_cast<const T *>(row);
    for (std::int64_t d = 0; d < n; d += lanes) store_floats(to + d, load_floats(from + d, n - d), n - d);
}

inline void widen_row(Storage storage, const char *row, std::int64_t n, float *to) {
    const auto *bytes = reinterpret_cast<const std::int8_t *>(row);
    switch (storage) {
        case Storage::float32: return widen_row<float>(row, n, to);
        case Storage::float16: return widen_row<Half>(row, n, to);
        case Storage::bfloat16: return widen_row<Brain>(row, n, to);
        case Storage::int8:
            for (std::int64_t d = 0; d < n; ++d) to[d] = bytes[d];
            return;
        case Storage::int4:
            for (std::int64_t d = 0; d + 1 < n; d += 2) {
                const std::int8_t both = bytes[d / 2];
                to[d] = static_cast<std::int8_t>(static_cast<std::uint8_t>(both) << 4) >> 4;
                to[d + 1] = both >> 4;
            }
            if (n % 2) to[n - 1] = static_cast<std::int8_t>(static_cast<std::uint8_t>(bytes[n / 2]) << 4) >> 4;
    }
}

// Scales and offsets of the quantised integers of one operand, for one tile of keys.
struct Meaning {
    Dequant kind;
    const float *scale, *offset;  // channel: rows of dim; token: one per key of the tile; offset may be null

    FUSION_INLINE void apply(float *row, std::int64_t n, std::int64_t key) const {
        if (kind == Dequant::channel) {
            for (std::int64_t d = 0; d < n; ++d) row[d] = (row[d] + (offset ? offset[d] : 0.0f)) * scale[d];
        } else if (kind == Dequant::token) {
            const float plus = offset ? offset[key] : 0.0f, times = scale[key];
            for (std::int64_t d = 0; d < n; ++d) row[d] = (row[d] + plus) * times;
        }
    }
};

// Scales and offsets per channel, if any.
FUSION_INLINE Meaning channel_meaning(const Quantised &q, std::int64_t b, std::int64_t head) {
    if (q.kind != Dequant::channel) return {q.kind, nullptr, nullptr};
    const char *const scale = cache_row(q.scale, b, head, 0);
    const char *const offset = q.offset.base ? cache_row(q.offset, b, head, 0) : nullptr;
    return {q.kind, reinterpret_cast<const float *>(scale), reinterpret_cast<const float *>(offset)};
}

// The address of a contiguous row: a row of fragments is first copied to `to`.
FUSION_INLINE const char *whole_row(const Cache &c, const char *row, std::int64_t bytes, char *to) {
    if (!c.fragment) return row;
    const std::int64_t size = c.fragment * c.item;
    for (std::int64_t at = 0; at < bytes; at += size, row += c.stride_fragment * c.item) {
        std::memcpy(to + at, row, least(size, bytes - at));
    }
    return to;
}

// Converts rows of n elements to contiguous rows of `words` words, padded with zeros: dequantised to float32, or, with
// several elements per word, unchanged. line: memory for one row.
template <int Elements>
void stage_rows(const Cache &cache, const char **rows, std::int64_t count, Storage storage, const Meaning &meaning,
                std::int64_t n, std::int64_t words, char *to, char *line) {
    const std::int64_t size = words * 4, used = (n + Elements - 1) / Elements;
    for (std::int64_t i = 0; i < count; ++i, to += size) {
        const char *const from = whole_row(cache, rows[i], row_bytes(storage, n), line);
        if constexpr (Elements == 1) {
            float *row = reinterpret_cast<float *>(to);
            widen_row(storage, from, n, row);
            meaning.apply(row, n, i);
        } else {
            std::memset(to + used * 4 - 4, 0, 4);
            std::memcpy(to, from, Elements == 8 ? (n + 1) / 2 : n * (4 / Elements));
            if (Elements == 8 && n % 2) to[n / 2] &= 15;
        }
        std::memset(to + used * 4, 0, size - used * 4);
        rows[i] = to;
    }
}

}  // namespace decode
}  // namespace
}  // namespace fusion
