// Problems and operands of attention to selected keys and of the lightning indexer: plain data like data/problem.h.

#pragma once

#include "data/problem.h"

namespace fusion {

// Rows of keys. With a page table, token t is in slot t % page_size of page table[b * stride_table + t / page_size],
// and addresses and strides count from that page.
struct KeySource {
    Rows rows;
    const std::int32_t *table = nullptr;
    std::int64_t stride_table = 0, page_size = 0, stride_page = 0;
};

// One or two key sources. Keys of the second are numbered after those of the first: key j >= kv_len[b] of sequence b is
// key j - kv_len[b] of `compressed`.
struct Keys : KeySource {
    KeySource compressed = {};
    const std::int64_t *kv_len = nullptr;  // null: there is one source
};

// Attention to selected keys, or (weights_dtype is used, dim_v is 0) the lightning indexer.
struct SparseProblem {
    std::int64_t heads_q, heads_kv, dim_qk, dim_v, dim_rope;
    Dtype dtype;
    double scale;
    bool has_sink, shares_kv;
    std::int64_t select_count;  // entries of a row's list; 0: no list (two sources: all visible keys of the second)
    std::int64_t select_block;  // keys per entry
    bool indexes;               // true for the lightning indexer
    Dtype weights_dtype;        // of the indexer's weights
    bool wide_values = false;   // values of the indexer are float32 for every dtype
    // With a second key source, one more of its keys is visible every compressed_ratio rows; a row then reads its
    // complete band of the first source, and lists name keys of the second. 0: one source.
    std::int64_t compressed_ratio = 0;
    std::int64_t ratio = 1;      // with one source: one more key is visible every `ratio` rows
    std::int64_t most_keys = 0;  // the most keys that a row reads; computed by the plan
    bool unit_target = false;    // of a loss: the sum of a row's target is taken as 1
};

struct SparseOperands {
    Rows q, q_rope, indices;
    Keys k, k_rope, v;
    Rows out, max, sum;
    const float *sink = nullptr;                    // [heads_q]
    Rows weights, values;                           // of the indexer; values of a loss: y for every key read, or null
    Rows dout, dlse, dq, dq_rope, dk, dk_rope, dv;  // dout: of the indexer, dvalues; dlse: as in Gradients
    Rows dweights, dk_compressed, dv_compressed;
    Rows target;             // of a loss without an attention: float32, an element per entry of a list, or per key
    float *dsink = nullptr;  // [heads_q]
    bool wide_keys = false;  // dk, dk_rope, dv and those of a second source are float32 for every dtype
};

struct SparseJob {
    const SparseProblem *problem;
    const SparseOperands *operands;
    const Sequence *sequences;
    // The attention whose probabilities are the target of a loss; the problem of a loss is the indexer.
    const SparseProblem *attention = nullptr;
    const SparseOperands *attended = nullptr;
};

// Heads [head0, head0 + heads) of one row of a sequence; all of them read key head `head_kv`.
struct SparseItem {
    std::int64_t seq, head_kv, head0, heads, row;
};

// Order in which items of a loss over all keys add to shared rows of key gradients: an item reports the key up to which
// it has added, and waits for earlier items to finish keys [first, last]. False: the run was cancelled, which ends the
// item.
struct Turn {
    void *state;
    std::int64_t item;
    bool (*wait)(void *state, std::int64_t item, std::int64_t first, std::int64_t last);
    void (*done)(void *state, std::int64_t item, std::int64_t next, std::int64_t last);
};

// The contributions of an item with a list to the sums of keys, stored until they are added, a range of keys at a time.
// Ranges consist of strips of `strip_keys` contiguous keys.
struct Contributions {
    void *memory;
    std::int32_t *starts;  // [strips + 1]: number of keys of the list, in ascending order, before each strip
    std::int64_t strip_keys;
};

// Strips [first, end) of keys.
struct KeyRange {
    std::int64_t first, end;
};

// Gradients of the keys of one sequence and key head in float32, a row per key.
struct KeySums {
    float *memory;
};

constexpr std::int64_t loss_tile_rows = 144;  // rows per tile of a loss without selection
constexpr std::int64_t index_tile_rows = 8;   // rows per tile of the indexer

}  // namespace fusion
