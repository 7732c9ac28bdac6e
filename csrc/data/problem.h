// Problems and operands of attention as plain data, shared by the baseline code and every variant. No functions: each
// variant compiles its own (simd/row_addresses.h).
//
// Lengths, strides and addresses have been checked when they arrive here; kernels validate nothing.

#pragma once

#include <cstddef>
#include <cstdint>

namespace fusion {

enum class Dtype : int { float32, float16, bfloat16 };
enum class Bias : int { none, matrix, table, slopes, slopes_sqrt };
enum class Dropout : int { none, bits, philox };

constexpr std::int64_t table_rows = 1024;  // rows of a Bias::table: the last rows of each sequence

struct Problem {
    std::int64_t heads_q, heads_kv, dim_qk, dim_v, dim_rope;
    Dtype dtype;
    double scale;
    Bias bias;
    bool bias_scaled, has_blocked, has_sink;
    Dropout dropout;
    double keep_prob;
    std::int64_t keep_below;     // dropout keeps elements whose 16-bit random number is below this
    bool has_row_scale = false;  // products of each row are multiplied by its element of row_scale
    double softcap = 0.0;        // scaled products x become softcap * tanh(x / softcap), before any bias; 0: no cap
    bool has_blocked_tiles = false;
    bool wide_results = false;  // out, or the gradients of rows and keys, are float32, for later sums
};

// Rows of contiguous elements: the row of (sequence b, head h, token t) starts at element
// address[b] + h * stride_head[b] + t * stride_token.
struct Rows {
    void *base = nullptr;
    const std::int64_t *address = nullptr;
    const std::int64_t *stride_head = nullptr;
    std::int64_t stride_token = 0;
};

// A value or a bit per (sequence, head, row, key): that of (b, h, i, j) is at address[b] + h * stride_head[b] +
// i * stride_row[b] + j * stride_key. Broadcast axes have stride 0; stride_key is 0 or 1.
struct Matrix {
    const void *base = nullptr;
    const std::int64_t *address = nullptr;
    const std::int64_t *stride_head = nullptr;
    const std::int64_t *stride_row = nullptr;
    std::int64_t stride_key = 0;
    Dtype dtype = Dtype::float32;
    const std::int64_t *first = nullptr;  // of bits: first key with a bit; earlier keys are not blocked; null: 0
};

struct Operands {
    Rows q, k, v, out, max, sum, q_rope, k_rope;  // without max.base, the forward writes no statistics
    Matrix bias, blocked, drop_bits;
    const float *slopes = nullptr;  // [sequences, heads_q]
    const float *sink = nullptr;    // [heads_q]
    std::uint64_t seed = 0;
    std::uint32_t offset = 0;
    Rows row_scale = {};  // float32
    // A number per tile of 128 rows by 128 keys: -1 (all blocked), -2 (none blocked), or an index into an array of bits
    // of tiles: 128 rows of 16 bytes each, least significant bit first, set for blocked keys.
    Matrix blocked_tiles = {};
    const std::uint8_t *blocked_bits = nullptr;
    std::int64_t blocked_count = 0;
};

// Gradients that the backward reads and writes. dbias accumulates in float32 with the layout of the bias; or, if each
// element belongs to a single (row, key) pair, it is written once in its dtype, with zeros for hidden keys.
struct Gradients {
    Rows dout, dlse, dq, dk, dv, dq_rope, dk_rope;  // dlse: float32, for max + log(sum); optional
    Matrix dbias;
    float *dsink = nullptr;  // [heads_q]
    bool owns_dbias = false;
};

// Keys max(0, i + lo) <= j < min(kv_len, max(prefix, i + hi)) are visible to row i. A sequence may be a chunk of a
// longer one: dropout uses the positions of its first row and key there, and the random stream of head 0.
struct Sequence {
    std::int64_t q_len, kv_len, lo, hi, prefix, shift, first_row = 0, first_key = 0, stream = 0;
    // A second key source: its number of keys, of which the first (i + compressed_hi) / ratio are visible to row i.
    std::int64_t compressed_len = 0, compressed_hi = 0;
};

struct Tile {  // query rows [row0, row1) of a sequence and keys [begin, end), which contain their visible keys
    std::int64_t seq, row0, row1, begin, end;
};

// Keys and values [key_begin, key_end) of one sequence and key/value head, packed once for all tiles that read them.
struct Unit {
    std::int64_t seq, head, key_begin, key_end;  // complete panels; the last may end behind the sequence
    char *packed;
};

struct PrefetchRows {  // rows of memory that are read or written soon
    const char *first;
    std::int64_t stride, rows, bytes;  // stride of rows in bytes; number of rows; bytes of each
};

// Memory to prefetch while a tile is computed: operands that its thread reads next, and results of the backward that
// are stored soon. No result depends on it.
struct Prefetches {
    static constexpr int most = 16;  // keys, their gradients, and three of each of four tiles of rows
    PrefetchRows parts[most];
    int count = 0;

    void add(const PrefetchRows &range) {
        if (range.rows > 0) parts[count++] = range;
    }
};

struct RowTile {  // query rows [row0, row1) of one head, packed for the backward
    std::int64_t seq, head, row0, row1;
    void *memory;
    bool fresh = false;  // no tile of keys has been processed yet: dq in memory is undefined and counts as zero
};

// Order in which tiles of keys add to a tile of rows, a few rows at a time. wait() returns true when earlier tiles have
// added to dq and dbias of all rows before `row` of the tile, and false if the run was cancelled, which ends the tile;
// done() reports that this one has added. Null functions: no other thread adds to these rows.
struct RowTurn {
    void *state = nullptr;
    bool (*wait)(void *state, std::int64_t row) = nullptr;
    void (*done)(void *state, std::int64_t row) = nullptr;
};

struct KeyTile {  // keys [key0, key1) of one key/value head, and a thread's memory for their gradients
    std::int64_t seq, head, key0, key1;
    void *memory;
};

struct PackedRows {      // results of packing a tile of rows
    std::int64_t means;  // empty rows in mean form
    float dsink;
};

struct DecodeOperands;  // data/decode.h

struct Job {
    const Problem *problem;
    const Operands *operands;
    const Sequence *sequences;
    const Gradients *gradients = nullptr;  // of the backward only
    bool streamed = false;                 // results of the backward are written past the caches
    // The cache with the keys of the forward, if they are in one, and the length of their common prefix.
    const DecodeOperands *cache = nullptr;
    std::int64_t common_keys = 0;
};

}  // namespace fusion
