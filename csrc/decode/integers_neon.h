// The formats of integers_avx512.h for Arm with dot products of bytes.
//
// Both operands of SDOT are signed, so bytes need no offset. There is no dot product of 16-bit numbers; a word of
// weights is multiplied by the elements of one key and those of the next in two products.

#pragma once

#include "decode/operand_formats.h"

namespace fusion {
namespace {
namespace decode {

struct Integer {
    using Sum = Ints;
    using Weight = std::uint32_t;
    using Digit = std::int8_t;
    static constexpr int depth = 2, digits = 2;
    static constexpr float most_weight = 32767.0f;
    static constexpr bool integer = true, separate = false, signed_weights = true;

    // b: four columns of a key, and of the next key.
    static FUSION_INLINE Ints weigh(Ints sum, Weight a, Words b) {
        const auto weights = (int16x8_t)all(a), values = (int16x8_t)b;
        const int32x4_t first = vmlal_laneq_s16((int32x4_t)sum, vget_low_s16(values), weights, 0);
        return (Ints)vmlal_high_laneq_s16(first, values, weights, 1);
    }
    static FUSION_INLINE Ints dot(Ints sum, Words elements, Words digits) {
        return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)elements, (int8x16_t)digits);
    }
    // Combines the sums of a row's digits, `apart` vectors from each other, to that of its numbers, in units of `unit`.
    static constexpr float unit = 1.0f;
    static constexpr std::int32_t rounding = 0;  // added to the lowest sum
    static FUSION_INLINE Ints joined(const Ints *digits, int apart) { return (digits[0] << 8) + digits[apart]; }
    static FUSION_INLINE Floats total(Ints sum) { return __builtin_convertvector(sum, Floats); }
    static FUSION_INLINE Ints rounded(Floats x) { return (Ints)vcvtnq_s32_f32((float32x4_t)x); }
    static FUSION_INLINE void store_elements(Weight *row, std::int64_t at, Floats low, Floats high) {
        store(row + at / 2, vcombine_s16(vmovn_s32((int32x4_t)rounded(low)), vmovn_s32((int32x4_t)rounded(high))));
    }
};

struct Byte : Integer {
    static constexpr int elements = 4, parts = 1;
    static constexpr Storage stored = Storage::int8;
    static constexpr int largest = 128, raised = 0;
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns; }

    static FUSION_INLINE void split(Words x, Words (&slice)[parts]) { slice[0] = x; }
    static FUSION_INLINE void columns(const char *const *rows, std::int64_t from, Words &x, Words &y) {
        const int16x8_t a = vmovl_s8(load<int8x8_t>(rows[0] + from)), b = vmovl_s8(load<int8x8_t>(rows[1] + from));
        x = (Words)vzip1q_u64((uint64x2_t)a, (uint64x2_t)b);
        y = (Words)vzip2q_u64((uint64x2_t)a, (uint64x2_t)b);
    }
    static FUSION_INLINE void order(Floats &, Floats &) {}
};

struct Nibble : Integer {
    static constexpr int elements = 8, parts = 2;
    static constexpr Storage stored = Storage::int4;
    static constexpr int largest = 8, raised = 8;
    static constexpr std::int64_t bytes(std::int64_t columns) { return columns / 2; }

    static FUSION_INLINE void split(Words x, Words (&slice)[parts]) {
        const Words positive = x ^ 0x88888888u;
        slice[0] = positive & 0x0f0f0f0fu;
        slice[1] = positive >> 4 & 0x0f0f0f0fu;
    }
    static FUSION_INLINE void columns(const char *const *rows, std::int64_t from, Words &x, Words &y) {
        const std::uint64_t next = load<std::uint32_t>(rows[1] + from);
        const int16x8_t widened = vmovl_s8(vcreate_s8(load<std::uint32_t>(rows[0] + from) | next << 32));
        x = (Words)vshrq_n_s16(vshlq_n_s16(widened, 12), 12);
        y = (Words)vshrq_n_s16(widened, 4);
    }
    static FUSION_INLINE void order(Floats &x, Floats &y) { order_turns<1>(x, y); }
};

}  // namespace decode
}  // namespace
}  // namespace fusion
