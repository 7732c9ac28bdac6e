// What the core computes and where it lies in memory: plain data, shared by the baseline code and every variant.
// No functions: each variant compiles its own (simd/rows.h).
//
// Lengths, strides and addresses have been checked when they arrive here; kernels validate nothing.

#pragma once

#include <cstddef>
#include <cstdint>

namespace fusion {

enum class Dtype : int { float32, float16, bfloat16 };
enum class Bias : int { none, matrix, table, slopes, slopes_sqrt };
enum class Dropout : int { none, bits, philox };

constexpr std::int64_t table_rows = 1024;  // of a Bias::table, the last rows of each sequence

struct Problem {
    std::int64_t heads_q, heads_kv, dim_qk, dim_v, dim_rope;
    Dtype dtype;
    double scale;
    Bias bias;
    bool bias_scaled, has_blocked, has_sink;
    Dropout dropout;
    double keep_prob;
    std::int64_t keep_below;     // a 16-bit draw below this is kept
    bool has_row_scale = false;  // products of a row are multiplied by a factor of its own
    double softcap = 0.0;        // scaled products x become softcap * tanh(x / softcap), before any bias; 0: they stay
    bool has_blocked_tiles = false;
    bool wide_results = false;  // out, or the gradients of rows and keys, are float32, to be added up
};

// Rows of neighbouring elements: (sequence b, head h, token t) starts at element
// address[b] + h * stride_head[b] + t * stride_token.
struct Rows {
    void *base = nullptr;
    const std::int64_t *address = nullptr;
    const std::int64_t *stride_head = nullptr;
    std::int64_t stride_token = 0;
};

// A value per (head, row, key) of each sequence, or a bit: (b, h, i, j) lies at address[b] + h * stride_head[b] +
// i * stride_row[b] + j * stride_key. Broadcast axes have stride 0; stride_key is 0 or 1.
struct Matrix {
    const void *base = nullptr;
    const std::int64_t *address = nullptr;
    const std::int64_t *stride_head = nullptr;
    const std::int64_t *stride_row = nullptr;
    std::int64_t stride_key = 0;
    Dtype dtype = Dtype::float32;
    const std::int64_t *first = nullptr;  // of bits: keys before it have none, and are not blocked; null: 0
};

struct Operands {
    Rows q, k, v, out, max, sum, q_rope, k_rope;  // no forward writes statistics where max has no base
    Matrix bias, blocked, drop_bits;
    const float *slopes = nullptr;  // [sequences, heads_q]
    const float *sink = nullptr;    // [heads_q]
    std::uint64_t seed = 0;
    std::uint32_t offset = 0;
    Rows row_scale = {};  // float32
    // A number per tile of 128 rows by 128 keys, counted in tiles: -1 (all is blocked), -2 (nothing is), or whose
    // bits, of so many tiles: 128 rows of 16 bytes each, least significant bit first, set where a key is not seen.
    Matrix blocked_tiles = {};
    const std::uint8_t *blocked_bits = nullptr;
    std::int64_t blocked_count = 0;
};

// What the backward reads and writes. dbias is added to, in float32, where the bias was read; or, where each of its
// elements belongs to one pair of a row and a key alone, it is written in its own dtype, with zeros for pairs that are
// not seen.
struct Gradients {
    Rows dout, dlse, dq, dk, dv, dq_rope, dk_rope;  // dlse: float32, of max + log(sum); no base: there is none
    Matrix dbias;
    float *dsink = nullptr;  // [heads_q]
    bool owns_dbias = false;
};

// Row i sees the keys max(0, i + lo) <= j < min(kv_len, max(prefix, i + hi)). Of a part of a longer sequence: where its
// first row and key stand there, as dropout counts them, and the stream that dropout draws of for head 0.
struct Sequence {
    std::int64_t q_len, kv_len, lo, hi, prefix, shift, first_row = 0, first_key = 0, stream = 0;
    // Of a second key source: how many keys it has, and that row i sees the first (i + compressed_hi) / ratio of them.
    std::int64_t compressed_len = 0, compressed_hi = 0;
};

struct Tile {  // query rows [row0, row1) of a sequence, which meet keys [begin, end)
    std::int64_t seq, row0, row1, begin, end;
};

// Keys and values [key_begin, key_end) of one sequence and key/value head, packed once for all that read them.
struct Unit {
    std::int64_t seq, head, key_begin, key_end;  // whole panels; the last may end behind the sequence
    char *packed;
};

struct PrefetchRows {  // rows of memory that are read or written soon
    const char *first;
    std::int64_t stride, rows, bytes;  // from row to row; how many; of each
};

// What is asked for while a tile is computed: what its thread reads next, and the backward's results that are stored
// soon. Nothing depends on it.
struct Prefetches {
    static constexpr int most = 16;  // keys, their gradients, and three of each of four tiles of rows
    PrefetchRows parts[most];
    int count = 0;

    void add(const PrefetchRows &part) {
        if (part.rows > 0) parts[count++] = part;
    }
};

struct RowTile {  // query rows [row0, row1) of one head, packed for the backward
    std::int64_t seq, head, row0, row1;
    void *memory;
    bool fresh = false;  // they have met no keys: their dq is zero, whatever lies there
};

// Tiles of keys add to a tile of rows in their order, a few rows at a time: wait() returns when it is this one's turn
// to add to dq and dbias of the rows before `row` of the tile, false: the run is given up, and so is the tile; done()
// says that it has. Without functions no one else does.
struct RowTurn {
    void *state = nullptr;
    bool (*wait)(void *state, std::int64_t row) = nullptr;
    void (*done)(void *state, std::int64_t row) = nullptr;
};

struct KeyTile {  // keys [key0, key1) of one key/value head, and a thread's memory for their gradients
    std::int64_t seq, head, key0, key1;
    void *memory;
};

struct RowNotes {        // what packing found in a tile of rows
    std::int64_t means;  // empty rows in mean form
    float dsink;
};

struct DecodeOperands;  // data/decode.h

struct Job {
    const Problem *problem;
    const Operands *operands;
    const Sequence *sequences;
    const Gradients *gradients = nullptr;  // the backward's
    bool streamed = false;                 // results of the backward are written past the caches
    // Where the forward's keys lie, if that is a cache, and how many of them all sequences have in common.
    const DecodeOperands *cache = nullptr;
    std::int64_t common_keys = 0;
};

}  // namespace fusion
