// Visible keys of a mask of tiles. Each tile of 128 rows by 128 keys is entirely blocked, entirely visible, or has a
// bit per pair, so that blocked tiles are skipped and visible tiles need no mask.

#pragma once

#include "simd/row_addresses.h"

#include <bit>

namespace fusion {
namespace {

constexpr std::int64_t mask_side = 128, mask_row = mask_side / 8;  // rows and keys of a tile, bytes of a row's bits
constexpr std::int32_t none_blocked = -2;

struct MaskTile {  // bits; or null, and `all` if the tile is entirely blocked
    const std::uint8_t *bits;
    bool all;

    const std::uint8_t *row(std::int64_t row) const { return bits + row % mask_side * mask_row; }
};

// The mask of the tile with (row, key). An invalid number blocks the tile: the table belongs to the caller, who may
// have changed it since it was checked.
FUSION_INLINE MaskTile mask_tile(const Operands &o, std::int64_t b, std::int64_t head, std::int64_t row,
                                 std::int64_t key) {
    const Matrix &m = o.blocked_tiles;
    const auto *numbers = static_cast<const std::int32_t *>(m.base) + row_of(m, b, head, row / mask_side);
    const std::int32_t number = numbers[key / mask_side * m.stride_key];
    if (0 <= number && number < o.blocked_count) return {o.blocked_bits + number * mask_side * mask_row, false};
    return {nullptr, number != none_blocked};
}

struct MaskRows {  // rows [row, row + rows) of a head
    std::int64_t seq, head, row, rows;
};

// A bit per key of a tile: visible to some of the rows, visible to every row.
struct SeenKeys {
    std::uint64_t some[2] = {}, every[2] = {~std::uint64_t{0}, ~std::uint64_t{0}};

    void add(std::uint64_t low, std::uint64_t high) {
        some[0] |= low, some[1] |= high;
        every[0] &= low, every[1] &= high;
    }
};

inline SeenKeys seen_keys(const Operands &o, const MaskRows &rows, std::int64_t key) {
    SeenKeys visible;
    for (std::int64_t row = rows.row, end = rows.row + rows.rows, next; row < end; row = next) {
        next = least(end, (row / mask_side + 1) * mask_side);
        const MaskTile tile = mask_tile(o, rows.seq, rows.head, row, key);
        if (!tile.bits) {
            const std::uint64_t left = tile.all ? 0 : ~std::uint64_t{0};
            visible.add(left, left);
            continue;
        }
        for (; row < next; ++row) {
            visible.add(~load<std::uint64_t>(tile.row(row)), ~load<std::uint64_t>(tile.row(row) + 8));
        }
    }
    return visible;
}

// A range of keys of consecutive tiles whose first and last key are visible to some row; empty if begin = end.
struct KeyRun {
    std::int64_t begin, end;
    bool partial;  // true if some key is hidden from some row
};

// The first run in keys [from, end) without a blocked tile between visible ones; `through`: runs continue through
// blocked tiles.
template <bool through = false>
KeyRun next_run(const Operands &o, const MaskRows &rows, std::int64_t from, std::int64_t end) {
    KeyRun run = {end, end, false};
    for (std::int64_t key = from, next; key < end; key = next) {
        const std::int64_t first = key / mask_side * mask_side;
        next = least(end, first + mask_side);
        const SeenKeys visible = seen_keys(o, rows, key);
        std::uint64_t some[2], missed = 0;
        for (int i = 0; i < 2; ++i) {
            const std::uint64_t here = low_bits(next - first - 64 * i) & ~low_bits(key - first - 64 * i);
            some[i] = visible.some[i] & here;
            missed |= here & ~visible.every[i];
        }
        if (!(some[0] | some[1])) {
            if (run.begin == end) continue;
            if (!through) break;
            run.partial = true;
            continue;
        }
        if (run.begin == end) {
            run.begin = first + (some[0] ? std::countr_zero(some[0]) : 64 + std::countr_zero(some[1]));
        }
        run.end = first + (some[1] ? 128 - std::countl_zero(some[1]) : 64 - std::countl_zero(some[0]));
        run.partial |= missed != 0;
    }
    return run;
}

// Clears the bits of keys that the mask of tiles blocks for a row.
inline void clear_blocked_tiles(std::uint8_t *bits, const Operands &o, std::int64_t b, std::int64_t head,
                                std::int64_t row, std::int64_t first, std::int64_t count) {
    for (std::int64_t key = first, next; key < first + count; key = next) {
        next = least(first + count, (key / mask_side + 1) * mask_side);
        const MaskTile tile = mask_tile(o, b, head, row, key);
        std::uint8_t *const here = bits + (key - first) / 8;
        const std::int64_t bytes = (next - key) / 8;
        if (!tile.bits) {
            if (tile.all) std::memset(here, 0, bytes);
            continue;
        }
        const std::uint8_t *const blocked = tile.row(row) + key % mask_side / 8;
        for (std::int64_t i = 0; i < bytes; ++i) here[i] = static_cast<std::uint8_t>(here[i] & ~blocked[i]);
    }
}

}  // namespace
}  // namespace fusion
