// Operands of decode in addition to those of every forward: keys and values at addresses or in pages, also quantised to
// integers. Plain data, shared by the baseline code and every variant.

#pragma once

#include "data/problem.h"

namespace fusion {

enum class Storage : int { float32, float16, bfloat16, int8, int4 };  // int4: the even element in a byte's low half
enum class Dequant : int { none, channel, token };
enum class Rounding : int { none, even, away };  // of an int8 result: halves to even, or away from zero

// Rows of contiguous elements. The row of token t of (sequence b, head h) starts at element
//   address[b] + h * stride_head[b] + t * stride_token                            if table is null, else
//   table[b * table_stride + t / page_size] * stride_page + h * page_stride_head + t % page_size * stride_token
// If fragment is not 0, a row consists of fragments of that many contiguous elements, stride_fragment elements apart.
struct Cache {
    const char *base = nullptr;
    std::int64_t item = 0;  // bytes of an element
    const std::int64_t *address = nullptr, *stride_head = nullptr;
    const std::int32_t *table = nullptr;
    std::int64_t table_stride = 0, page_size = 0, stride_page = 0, page_stride_head = 0;
    std::int64_t stride_token = 0;
    std::int64_t fragment = 0, stride_fragment = 0;
};

struct Quantised {  // value = (stored + offset) * scale; float32 rows of dim elements (channel) or of one (token)
    Dequant kind = Dequant::none;
    Cache scale, offset;  // offset.base null: 0
};

struct PerChannel {  // element (query head, d); null: 1 or 0
    const float *base = nullptr;
    std::int64_t stride_head = 0, stride = 0;
};

struct DecodeProblem : Problem {
    Storage storage;  // of k and v
    Rounding rounding;
    bool shares_kv;
    std::int64_t common_keys = 0;  // length of the prefix of keys that all sequences share in memory
};

struct DecodeOperands : Operands {  // k, v and k_rope of Operands are not used
    Cache keys, values, key_ropes;
    Quantised quantised_keys, quantised_values;
    PerChannel out_scale, out_offset;
    Cache common_keys = {}, common_values = {};  // the shared prefix, as sequence 0; keys and values hold the rest
};

// Rows of a sequence and key/value head are numbered token by token, and within a token by query head of the group. A
// unit consists of rows [row0, row1) of `heads` heads from `head` on and keys [begin, end) of one leaf. For common
// keys, tokens are numbered over all sequences, and `tokens` has the sequence of each.
struct DecodeToken {
    std::int64_t seq, token;
};
struct DecodeUnit {
    std::int64_t seq, head, heads, row0, row1, begin, end;
    bool placed;  // the previous unit on this scratch memory has prepared the same rows
    const DecodeToken *tokens = nullptr;
    std::int64_t cache_first = 0;  // number of the first key in the cache
};

struct DecodeRows {  // rows whose partial results are merged: `count` of them, `stride` floats apart
    std::int64_t seq, head, row0, row1, place, stride, count;
};

struct DecodeJob {
    const DecodeProblem *problem;
    const DecodeOperands *operands;
    const Sequence *sequences;
};

constexpr std::int64_t decode_tile = 128;   // keys per softmax step
constexpr std::int64_t decode_rows = 64;    // most rows of a head in a unit
constexpr std::int64_t decode_slots = 128;  // most rows of a unit, with those of each head rounded up to slots_of()

// Keys are divided into leaves, so that one sequence occupies many cores; each leaf has a partial result. Partial
// results of a run are merged before those of different runs. Both begin at multiples of these numbers for any batch.
constexpr std::int64_t decode_leaf = 512, decode_run = 4096;

// The kernels' formats of keys and values: float32, to which others are converted if there is no other kernel, and
// formats that are multiplied as they are stored. Integers have rows of a query in 16 bits, or, fine, in 24.
enum class DecodeFormat : int { floats, halves, brains, bytes, nibbles, fine_bytes, fine_nibbles, count };

constexpr std::int64_t fine_products = 256;  // number of products of 24-bit numbers whose sum fits into 32 bits

constexpr DecodeFormat format_of(const DecodeProblem &p) {
    const bool fine = p.dtype == Dtype::float32, integers = p.dim_rope == 0 && (!fine || p.dim_qk <= fine_products);
    switch (p.storage) {
        case Storage::float16: return DecodeFormat::halves;
        case Storage::bfloat16: return DecodeFormat::brains;
        case Storage::int8:
            if (integers) return fine ? DecodeFormat::fine_bytes : DecodeFormat::bytes;
            break;
        case Storage::int4:
            if (integers) return fine ? DecodeFormat::fine_nibbles : DecodeFormat::nibbles;
            break;
        case Storage::float32: break;
    }
    return DecodeFormat::floats;
}

// Rows of a unit with non-finite results, as bits per head.
struct DecodeNonfinite {
    std::uint64_t rows[decode_slots / 16] = {};
};
static_assert(decode_rows <= 64);

constexpr std::int64_t slots_of(std::int64_t rows) { return (rows + 15) / 16 * 16; }

}  // namespace fusion
