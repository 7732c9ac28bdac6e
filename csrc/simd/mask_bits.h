// Rows of bits, one per key, least significant first: visible keys, or probabilities that dropout keeps.
//
// A row of bits starts at key `first`, a multiple of 8, and has `count` keys, a multiple of lanes and of 8; its memory
// consists of complete 64-bit words.

#pragma once

#include "simd/mask_tiles.h"

namespace fusion {
namespace {

FUSION_INLINE bool bit_of(const std::uint8_t *bits, std::int64_t c) { return bits[c / 8] >> (c % 8) & 1; }

// Sets the bits of keys [begin, end) and clears all others.
FUSION_INLINE void set_interval(std::uint8_t *bits, std::int64_t first, std::int64_t count, std::int64_t begin,
                                std::int64_t end) {
    for (std::int64_t at = 0; at < count; at += 64) {
        store(bits + at / 8, low_bits(end - first - at) & ~low_bits(begin - first - at));
    }
}

// Clears the bits of keys whose score is -inf: their weight is exactly 0, and 0 * NaN would be NaN.
inline void clear_unseen(std::uint8_t *bits, const float *scores, std::int64_t count) {
    for (std::int64_t at = 0; at < count; at += lanes) {
        if (!any((Words)(load<Floats>(scores + at) == all(-infinity)))) continue;
        for (std::int64_t c = at; c < at + lanes; ++c) {
            if (scores[c] == -infinity) bits[c / 8] = static_cast<std::uint8_t>(bits[c / 8] & ~(1 << c % 8));
        }
    }
}

// One bit for each of 64 bytes, set if the byte is not zero.
FUSION_INLINE std::uint64_t nonzero_bytes(const std::uint8_t *from) {
#if defined(__AVX512BW__)
    const __m512i x = _mm512_loadu_si512(from);
    return _mm512_test_epi8_mask(x, x);
#elif defined(__SSE2__)
    std::uint64_t zero = 0;
    for (int i = 0; i < 64; i += 16) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i));
        zero |= std::uint64_t(_mm_movemask_epi8(_mm_cmpeq_epi8(x, _mm_setzero_si128())) & 0xffff) << i;
    }
    return ~zero;
#else
    std::uint64_t out = 0;
    for (int i = 0; i < 64; ++i) out |= std::uint64_t{from[i] != 0} << i;
    return out;
#endif
}

// Clears the bits of keys whose byte in the mask is not zero; reads only the bytes of keys from blocked.first on and
// before kv_len.
inline void clear_blocked(std::uint8_t *bits, const Matrix &blocked, const Sequence &seq, std::int64_t b,
                          std::int64_t head, std::int64_t row, std::int64_t first, std::int64_t count) {
    const auto *bytes = static_cast<const std::uint8_t *>(blocked.base) + row_of(blocked, b, head, row);
    const std::int64_t clear = blocked.first ? blocked.first[b] - first : 0;  // keys that are not blocked
    if (blocked.stride_key == 0) {
        for (std::int64_t at = 0; *bytes && at < count; at += 64) {
            store(bits + at / 8, load<std::uint64_t>(bits + at / 8) & low_bits(clear - at));
        }
        return;
    }
    prefetch(bytes + first + block_rows * blocked.stride_row[b], count);  // the next block of rows reads these columns
    for (std::int64_t at = 0; at < count; at += 64) {
        const std::int64_t left = least<std::int64_t>(seq.kv_len - first - at, 64),
                           skip = most<std::int64_t>(clear - at, 0);
        std::uint8_t rest[64] = {};
        const std::uint8_t *from = bytes + first + at;
        if (left < 64 || skip > 0) {
            if (left > skip) std::memcpy(rest + skip, from + skip, left - skip);
            from = rest;
        }
        store(bits + at / 8, load<std::uint64_t>(bits + at / 8) & ~nonzero_bytes(from));
    }
}

// Copies bits of the caller's mask, which may start at any bit of a byte; reads only bytes with bits before kv_len.
inline void copy_keep_bits(std::uint8_t *bits, const Matrix &keep, const Sequence &seq, std::int64_t b,
                           std::int64_t head, std::int64_t row, std::int64_t first, std::int64_t count) {
    const std::int64_t start = row_of(keep, b, head, row) + first, end = start - first + seq.kv_len;
    const auto *bytes = static_cast<const std::uint8_t *>(keep.base);
    const int shift = static_cast<int>(start & 7);
    for (std::int64_t at = 0; at < count; at += 64) {
        const std::int64_t byte = (start + at) >> 3, left = ((end + 7) >> 3) - byte;
        std::uint8_t buffer[16] = {};
        if (left > 0) std::memcpy(buffer, bytes + byte, least<std::int64_t>(left, 9));
        const std::uint64_t low = load<std::uint64_t>(buffer) >> shift;
        store(bits + at / 8, shift ? low | std::uint64_t{buffer[8]} << (64 - shift) : low);
    }
}

// ------------------------------------------------------------------------------------------------------------ Philox

struct HighLow {
    Words high, low;
};

// The two 32-bit halves of factor * x, lane by lane.
FUSION_INLINE HighLow wide_product(std::uint32_t factor, Words x) {
#if defined(__AVX512F__)
    const __m512i f = (__m512i)all(factor), v = (__m512i)x;
    const __m512i even = _mm512_mul_epu32(v, f), odd = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), f);
    return {(Words)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd),
            (Words)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32))};
#elif defined(__AVX2__)
    const __m256i f = (__m256i)all(factor), v = (__m256i)x;
    const __m256i even = _mm256_mul_epu32(v, f), odd = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), f);
    return {(Words)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa),
            (Words)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa)};
#else
    const Words a = x & 0xffff, b = x >> 16;  // products of 16-bit halves fit into 32 bits
    const std::uint32_t f = factor & 0xffff, g = factor >> 16;
    const Words cross = a * g + (a * f >> 16), other = b * f + (cross & 0xffff);
    return {b * g + (cross >> 16) + (other >> 16), x * factor};
#endif
}

// Philox4x32-7 with counter (key / 8, row, stream, offset): one call gives eight 16-bit random numbers, little endian,
// for eight keys; each lane computes one call.
struct Philox {
    static constexpr std::uint32_t multiplier[2] = {0xD2511F53, 0xCD9E8D57}, weyl[2] = {0x9E3779B9, 0xBB67AE85};
    static constexpr int rounds = 7;

    std::uint32_t key[2], offset;
    std::int64_t keep_below;

    Philox(const Problem &p, const Operands &o)
        : key{static_cast<std::uint32_t>(o.seed), static_cast<std::uint32_t>(o.seed >> 32)}, offset(o.offset),
          keep_below(p.keep_below) {}

    void draw(std::uint8_t *bits, std::uint32_t stream, std::int64_t row, std::int64_t first,
              std::int64_t count) const {
        for (std::int64_t at = 0; at < count; at += 8 * lanes) {
            Words c0 = (Words)lane_numbers() + static_cast<std::uint32_t>((first + at) / 8);
            Words c1 = all(static_cast<std::uint32_t>(row)), c2 = all(stream), c3 = all(offset);
            std::uint32_t k0 = key[0], k1 = key[1];
            FUSION_UNROLL for (int i = 0; i < rounds; ++i) {
                const HighLow a = wide_product(multiplier[0], c0), b = wide_product(multiplier[1], c2);
                c0 = b.high ^ c1 ^ k0;
                c1 = b.low;
                c2 = a.high ^ c3 ^ k1;
                c3 = a.low;
                k0 += weyl[0];
                k1 += weyl[1];
            }
            Words retained = {};
            const Words draws[4] = {c0, c1, c2, c3};
            FUSION_UNROLL for (int i = 0; i < 4; ++i) {
                const Ints low = (Ints)(draws[i] & 0xffff), high = (Ints)(draws[i] >> 16);
                const Ints below = all(static_cast<std::int32_t>(keep_below));
                retained |= ((Words)(low < below) & (1u << 2 * i)) | ((Words)(high < below) & (2u << 2 * i));
            }
            store(bits + at / 8, __builtin_convertvector(retained, Bytes));
        }
    }
};

// Rows [row, row + rows) of a head and keys [first, first + count); rows of bits are `stride` bytes apart.
struct BitBlock {
    std::int64_t seq, head, row, rows, first, count, stride;
};

// Sets the bits of the keys that are visible to each row.
inline void mark_seen(std::uint8_t *bits, const BitBlock &b, const Problem &p, const Operands &o, const Sequence &seq) {
    for (std::int64_t row = b.row; row < b.row + b.rows; ++row, bits += b.stride) {
        set_interval(bits, b.first, b.count, first_key(seq, row), end_key(seq, row));
        if (p.has_blocked) clear_blocked(bits, o.blocked, seq, b.seq, b.head, row, b.first, b.count);
        if (p.has_blocked_tiles) clear_blocked_tiles(bits, o, b.seq, b.head, row, b.first, b.count);
    }
}

// Sets the bits of the probabilities that dropout keeps.
inline void mark_kept(std::uint8_t *bits, const BitBlock &b, const Problem &p, const Operands &o, const Sequence &seq) {
    const Philox philox(p, o);
    const auto stream = static_cast<std::uint32_t>(seq.stream + b.head);
    for (std::int64_t row = b.row; row < b.row + b.rows; ++row, bits += b.stride) {
        if (p.dropout == Dropout::philox) {
            philox.draw(bits, stream, seq.first_row + row, seq.first_key + b.first, b.count);
        } else {
            copy_keep_bits(bits, o.drop_bits, seq, b.seq, b.head, row, b.first, b.count);
        }
    }
}

}  // namespace
}  // namespace fusion
