// What selections of keys and the lightning indexer compute and where it lies in memory: plain data, as data/problem.h.

#pragma once

#include "data/problem.h"

namespace fusion {

// Rows of keys: where `table` is given, token t lies in slot t % page_size of page table[b * stride_table +
// t / page_size], and addresses and strides count from that page.
struct KeySource {
    Rows rows;
    const std::int32_t *table = nullptr;
    std::int64_t stride_table = 0, page_size = 0, stride_page = 0;
};

// Where a problem has two key sources, those of the second are numbered behind the first's: key j of sequence b is key
// j - kv_len[b] of `compressed` from kv_len[b] on.
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
    std::int64_t select_count;  // entries of a row's list; 0: no list (two sources: all of the second that it sees)
    std::int64_t select_block;  // keys that an entry stands for
    bool indexes;               // the lightning indexer
    Dtype weights_dtype;        // of its weights
    bool wide_values = false;   // its values are float32, whatever dtype is
    // Rows for which one key of a second source is added to those that a row sees: it reads its whole band of the first
    // source, and lists name keys of the second. 0: one source.
    std::int64_t compressed_ratio = 0;
    std::int64_t ratio = 1;      // rows for which one key is added to those that a row sees (of one source)
    std::int64_t most_keys = 0;  // that a row reads, at most: a plan finds it
    bool unit_target = false;    // of a loss: its given target counts as one that sums to 1
};

struct SparseOperands {
    Rows q, q_rope, indices;
    Keys k, k_rope, v;
    Rows out, max, sum;
    const float *sink = nullptr;                    // [heads_q]
    Rows weights, values;                           // of the indexer; values of a loss: y, where rows read, or null
    Rows dout, dlse, dq, dq_rope, dk, dk_rope, dv;  // dout: of the indexer, dvalues; dlse: as in Gradients
    Rows dweights, dk_compressed, dv_compressed;
    Rows target;             // of a loss without an attention: float32, an element per entry of a list, or per key
    float *dsink = nullptr;  // [heads_q]
    bool wide_keys = false;  // dk, dk_rope, dv and those of a second source are float32, whatever dtype is
};

struct SparseJob {
    const SparseProblem *problem;
    const SparseOperands *operands;
    const Sequence *sequences;
    // Of a loss, whose problem is the indexer: the attention that the indexer learns from.
    const SparseProblem *attention = nullptr;
    const SparseOperands *attended = nullptr;
};

// Heads [head0, head0 + heads) of one row of a sequence; all of them read key head `head_kv`.
struct SparseItem {
    std::int64_t seq, head_kv, head0, heads, row;
};

// Items of a loss over all keys add to shared rows of key gradients in their order: an item says up to where it is done
// and waits for earlier items that are not yet done with keys [first, last]; false: the run is given up, and so is the
// item.
struct Turn {
    void *state;
    std::int64_t item;
    bool (*wait)(void *state, std::int64_t item, std::int64_t first, std::int64_t last);
    void (*done)(void *state, std::int64_t item, std::int64_t next, std::int64_t last);
};

// What an item of a list adds to sums of keys, kept until it is added, a range of keys at a time. Ranges consist of
// strips of `strip_keys` neighbouring keys.
struct Notes {
    void *memory;
    std::int32_t *starts;  // [strip + 1]: how many keys of the list, which are in ascending order, lie before a strip
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

constexpr std::int64_t loss_tile_rows = 144;  // rows of a loss without selection that read a block of keys together
constexpr std::int64_t index_tile_rows = 8;   // rows of the indexer that read a chunk of keys together

}  // namespace fusion
