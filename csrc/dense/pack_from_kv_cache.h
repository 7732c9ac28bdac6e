// Packing of keys and values of a cache for the forward: rows at addresses or in pages, some of them shared by all
// sequences. A panel whose rows have a constant stride is packed in place; rows of others are first copied together, a
// few columns at a time.

#pragma once

#include "data/decode.h"
#include "decode/rows.h"
#include "dense/pack.h"

namespace fusion {
namespace {

// Rows of one operand (keys, values or rope) of a sequence and key/value head in a cache.
struct StoredRows {
    const Cache &separate, &common;
    std::int64_t common_keys, seq, head;

    // Address of the row of a key, which may consist of fragments.
    const char *row(std::int64_t key) const {
        return key < common_keys ? decode::cache_row(common, 0, head, key)
                                 : decode::cache_row(separate, seq, head, key - common_keys);
    }
    const Cache &cache(std::int64_t key) const { return key < common_keys ? common : separate; }
    // True if `count` rows from a key on are stride_token apart.
    bool even(std::int64_t key, std::int64_t count) const {
        const Cache &c = cache(key);
        if (c.fragment || (key < common_keys && key + count > common_keys)) return false;
        const std::int64_t token = key < common_keys ? key : key - common_keys;
        return !c.table || token % c.page_size + count <= c.page_size;
    }
    // Copies elements [d, d + n) of a row.
    void copy(std::int64_t key, std::int64_t d, std::int64_t n, void *to) const {
        const Cache &c = cache(key);
        const char *const from = row(key);
        if (!c.fragment) {
            std::memcpy(to, from + d * c.item, n * c.item);
            return;
        }
        for (std::int64_t at = d, count; at < d + n; at += count) {
            count = least(c.fragment - at % c.fragment, d + n - at);
            const std::int64_t place = at / c.fragment * c.stride_fragment + at % c.fragment;
            std::memcpy(static_cast<char *>(to) + (at - d) * c.item, from + place * c.item, count * c.item);
        }
    }
};

inline StoredRows stored_keys(const Job &job, std::int64_t seq, std::int64_t head) {
    return {job.cache->keys, job.cache->common_keys, job.common_keys, seq, head};
}
inline StoredRows stored_values(const Job &job, std::int64_t seq, std::int64_t head) {
    return {job.cache->values, job.cache->common_values, job.common_keys, seq, head};
}

constexpr std::int64_t staged_columns = 64;
static_assert(staged_columns % panel == 0 && staged_columns % (2 * lanes) == 0);

// Calls pack(first row, stride, column, columns) for `here` rows of n elements, all columns at once or a few at a time.
template <class T, class Pack>
FUSION_INLINE void by_columns(const StoredRows &rows, std::int64_t key, std::int64_t here, std::int64_t n, Pack pack) {
    if (rows.even(key, here)) {
        return pack(reinterpret_cast<const T *>(rows.row(key)), rows.cache(key).stride_token, std::int64_t{0}, n);
    }
    alignas(64) T staged[panel * staged_columns];
    for (std::int64_t d = 0; d < n; d += staged_columns) {
        const std::int64_t count = least(staged_columns, n - d);
        for (std::int64_t i = 0; i < here; ++i) rows.copy(key + i, d, count, staged + i * staged_columns);
        pack(static_cast<const T *>(staged), staged_columns, d, count);
    }
}

template <class Format, class T>
void pack_stored_keys(const StoredRows &rows, std::int64_t key, std::int64_t here, std::int64_t n, std::int64_t words,
                      typename Format::Word *to) {
    by_columns<T>(rows, key, here, n,
                  [&](const T *first, std::int64_t stride, std::int64_t d, std::int64_t count)
                      __attribute__((always_inline)) {
                          const std::int64_t from = d / Format::depth;
                          const std::int64_t size = d + count < n ? count / Format::depth : words - from;
                          pack_keys<Format>(first, stride, here, count, size, to + from * panel);
                      });
}

// pack_panels() for keys and values in a cache.
template <class Format, class T>
void pack_stored_panels(const Job &job, const Unit &unit, std::int64_t first, std::int64_t end) {
    const Problem &p = *job.problem;
    const Sequence &seq = job.sequences[unit.seq];
    const Sizes<Format> sizes(p);
    const Packed<Format> packed(sizes, unit);
    const StoredRows keys = stored_keys(job, unit.seq, unit.head), values = stored_values(job, unit.seq, unit.head);
    const StoredRows ropes = {job.cache->key_ropes, job.cache->key_ropes, 0, unit.seq, unit.head};
    const std::int64_t deep = packed.keys / Format::depth;
    for (std::int64_t i = first; i < end; ++i) {
        const std::int64_t at = i * panel, key = unit.key_begin + at;
        const std::int64_t here = least<std::int64_t>(panel, seq.kv_len - key);
        auto *const to = packed.k + at * sizes.words;
        pack_stored_keys<Format, T>(keys, key, here, p.dim_qk, sizes.main_words, to);
        if (p.dim_rope) {
            pack_stored_keys<Format, T>(ropes, key, here, p.dim_rope, sizes.words - sizes.main_words,
                                        to + sizes.main_words * panel);
        }
        bool nonfinite = false;
        by_columns<T>(values, key, here, p.dim_v,
                      [&](const T *row, std::int64_t stride, std::int64_t d, std::int64_t count)
                          __attribute__((always_inline)) {
                              nonfinite |= pack_values<Format>(row, stride, here, count, deep, at, packed.v + d * deep);
                          });
        packed.nonfinite[i] = nonfinite;
    }
}

}  // namespace
}  // namespace fusion
