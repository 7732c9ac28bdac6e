// A software model of tile registers after Intel's manual: the instructions on tiles in C++, for processors without
// them. It counts instructions and aborts where a processor would raise a fault.

#pragma once

#include "data/amx_counts.h"
#include "simd/vec.h"

namespace fusion {
namespace {
namespace tiles {
namespace model {

struct Tile {
    int rows, bytes;  // of each row
    alignas(64) Words words[16];
};
thread_local Tile tiles[8];
thread_local bool configured;

FUSION_INLINE void require(bool holds) {
    if (!holds) __builtin_trap();
}

inline void configure(bool some, const std::uint16_t (&bytes)[16], const std::uint8_t (&rows)[16]) {
    configured = some;
    for (int i = 0; i < 8; ++i) {
        require(rows[i] <= 16 && bytes[i] <= 64);
        tiles[i] = {rows[i], bytes[i], {}};
    }
}

inline void describe(std::uint16_t (&bytes)[16], std::uint8_t (&rows)[16]) {
    for (int i = 0; i < 8; ++i) {
        bytes[i] = static_cast<std::uint16_t>(tiles[i].bytes);
        rows[i] = static_cast<std::uint8_t>(tiles[i].rows);
    }
}

inline Tile &ready(int i) {
    require(configured && tiles[i].rows > 0 && tiles[i].bytes > 0);
    return tiles[i];
}

inline void zero(int i) { std::memset(ready(i).words, 0, sizeof tiles[i].words); }

__attribute__((noinline)) inline void load(int i, const void *from, std::int64_t stride) {
    zero(i);
    ++tile_counts.loads;
    for (int r = 0; r < tiles[i].rows; ++r) {
        std::memcpy(tiles[i].words + r, static_cast<const char *>(from) + r * stride, tiles[i].bytes);
    }
}

__attribute__((noinline)) inline void store(int i, void *to, std::int64_t stride) {
    const Tile &tile = ready(i);
    ++tile_counts.stores;
    for (int r = 0; r < tile.rows; ++r) {
        std::memcpy(static_cast<char *>(to) + r * stride, tile.words + r, tile.bytes);
    }
}

// Replaces subnormal numbers by zero, as the processor does with operands and results.
FUSION_INLINE Floats flushed(Floats x) {
    const Words bits = bits_of(x);
    return floats_of((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}

// Adds the product of tiles a and b to tile `sums`. Products of two bfloat16 are exact in float32 within its range, so
// adding one rounds once, like the processor's multiply-add. Products of even and of odd elements are summed
// separately.
__attribute__((noinline)) inline void multiply(int sums, int a, int b) {
    Tile &to = ready(sums);
    const Tile &left = ready(a), &right = ready(b);
    require(to.rows == left.rows && to.bytes == right.bytes && left.bytes / 4 == right.rows && left.bytes % 4 == 0);
    require(sums != a && sums != b && a != b);
    ++tile_counts.products;
    Floats even[16], odd[16];
    for (int k = 0; k < right.rows; ++k) {
        even[k] = flushed(floats_of(right.words[k] << 16));
        odd[k] = flushed(floats_of(right.words[k] & 0xffff0000));
    }
    for (int m = 0; m < left.rows; ++m) {
        const Floats one = flushed(floats_of(left.words[m] << 16)),
                     two = flushed(floats_of(left.words[m] & 0xffff0000));
        Floats sum[2] = {};
        for (int k = 0; k < right.rows; ++k) {
            sum[0] = flushed(sum[0] + all(one[k]) * even[k]);
            sum[1] = flushed(sum[1] + all(two[k]) * odd[k]);
        }
        to.words[m] = bits_of(flushed(flushed(floats_of(to.words[m])) + flushed(sum[0] + sum[1])));
    }
}

}  // namespace model
}  // namespace tiles
}  // namespace
}  // namespace fusion
