// What a decode reads besides the operands that every forward has: keys and values at addresses or in pages, perhaps as
// stored integers. Plain data, shared by the baseline code and every variant.

#pragma once

#include "data/problem.h"

namespace fusion {

enum class Storage : int { float32, float16, bfloat16, int8, int4 };  // int4: the even element in a byte's low half
enum class Dequant : int { none, channel, token };
enum class Rounding : int { none, even, away };  // of an int8 result: halves to even, or away from zero

// Rows of neighbouring elements. Token t of (sequence b, head h) starts at element
//   address[b] + h * stride_head[b] + t * stride_token                            where table is null, else
//   table[b * table_stride + t / page_size] * stride_page + h * page_stride_head + t % page_size * stride_token
// Where piece is not 0, only so many are neighbours, and such pieces of a row lie stride_piece elements apart.
struct Cache {
    const char *base = nullptr;
    std::int64_t item = 0;  // bytes of an element
    const std::int64_t *address = nullptr, *stride_head = nullptr;
    const std::int32_t *table = nullptr;
    std::int64_t table_stride = 0, page_size = 0, stride_page = 0, page_stride_head = 0;
    std::int64_t stride_token = 0;
    std::int64_t piece = 0, stride_piece = 0;
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
    std::int64_t common_keys = 0;  // first keys of every sequence that are the same rows of memory
};

struct DecodeOperands : Operands {  // k, v and k_rope of the base are not used
    Cache keys, values, key_ropes;
    Quantised quantised_keys, quantised_values;
    PerChannel out_scale, out_offset;
    Cache common_keys = {}, common_values = {};  // of a sequence 0; keys and values hold what comes behind them
};

// Rows of a sequence and key/value head are counted token by token, and within a token by query head of the group. A
// unit is rows [row0, row1) of `heads` heads from `head` on and keys [begin, end), which lie in one leaf. Where it
// meets common keys, tokens are counted over all sequences, and `tokens` says whose each is.
struct DecodeToken {
    std::int64_t seq, token;
};
struct DecodeUnit {
    std::int64_t seq, head, heads, row0, row1, begin, end;
    bool placed;  // the unit before it on this scratch memory has left there what it needs of the same rows
    const DecodeToken *tokens = nullptr;
    std::int64_t first_own = 0;  // the key that is the first one of the cache
};

struct DecodeRows {  // rows whose partial results are merged: `count` of them, `stride` floats apart
    std::int64_t seq, head, row0, row1, place, stride, count;
};

struct DecodeJob {
    const DecodeProblem *problem;
    const DecodeOperands *operands;
    const Sequence *sequences;
};

constexpr std::int64_t decode_tile = 128;   // keys whose scores are weighed together
constexpr std::int64_t decode_rows = 64;    // rows of a head of a unit, at most
constexpr std::int64_t decode_slots = 128;  // and of a unit, each head's rounded up to slots_of()

// Keys are cut into leaves, so that one sequence gives many cores work, and a partial result begins with each. Those of
// a run are merged before those of different runs are. Both are cut at multiples of these, whatever else is computed.
constexpr std::int64_t decode_leaf = 512, decode_run = 4096;

constexpr std::int64_t slots_of(std::int64_t rows) { return (rows + 15) / 16 * 16; }

}  // namespace fusion
