// What one instruction-set variant offers for selected keys and for the lightning indexer, and the data of both: plain,
// shared by the baseline code and every variant. Lengths, strides and addresses have been checked when they arrive
// here.
//
// variant_sparse.cpp is compiled once per instruction set, as variant.cpp is.

#pragma once

#include "data/problem.h"

namespace fusion {

// Rows of keys: where `table` is given, token t lies in slot t % page_size of page table[b * stride_table +
// t / page_size], and addresses and strides count from that page.
struct Keys {
    Rows rows;
    const std::int32_t *table = nullptr;
    std::int64_t stride_table = 0, page_size = 0, stride_page = 0;
};

// Attention to selected keys, or (weights_dtype is used, dim_v is 0) the lightning indexer.
struct SparseProblem {
    std::int64_t heads_q, heads_kv, dim_qk, dim_v, dim_rope;
    Dtype dtype;
    double scale;
    bool has_sink, shares_kv;
    std::int64_t select_count,
        select_block;     // entries of a row's list (0: no list), and the keys that an entry stands for
    bool indexes;         // the lightning indexer
    Dtype weights_dtype;  // of its weights
};

struct SparseOperands {
    Rows q, q_rope, indices;
    Keys k, k_rope, v;
    Rows out, max, sum;
    const float *sink = nullptr;              // [heads_q]
    Rows weights, values;                     // of the indexer
    Rows dout, dq, dq_rope, dk, dk_rope, dv;  // dout: of the indexer, dvalues
    Rows dweights;
    float *dsink = nullptr;  // [heads_q]
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

// Items of the backward add to shared rows of key gradients in their order: an item says up to where it is done and
// waits for earlier items that are not yet done with keys [first, last].
struct Turn {
    void *state;
    std::int64_t item;
    void (*wait)(void *state, std::int64_t item, std::int64_t first, std::int64_t last);
    void (*done)(void *state, std::int64_t item, std::int64_t next, std::int64_t last);
};

// Gradients of the keys of one sequence and key head in float32, a row per key.
struct KeySums {
    float *memory;
};

struct SparseKernels {  // sizes are bytes and multiples of 64
    std::size_t (*scratch_bytes)(const SparseProblem &, std::int64_t heads, std::int64_t longest);
    std::int64_t (*attend)(const SparseJob &, const SparseItem &, void *scratch);  // returns 1 where no key is seen
    std::size_t (*gradient_bytes)(const SparseProblem &, std::int64_t heads, std::int64_t longest);
    std::int64_t (*sum_columns)(const SparseProblem &);  // floats of a row of KeySums
    // dsink_share: [heads of the item], what the row adds to dsink.
    void (*gradient)(const SparseJob &, const SparseItem &, const Turn &, const KeySums &, float *dsink_share,
                     void *scratch);
    void (*store_keys)(const SparseJob &, std::int64_t seq, std::int64_t head_kv, const KeySums &, std::int64_t first,
                       std::int64_t end);
    // The indexer's loss and its gradients. Without selection an item is the loss_tile_rows rows from it on; with lists
    // it is a row, and what it adds to sums of keys is noted, and added by add_list, a range of keys at a time.
    std::size_t (*loss_bytes)(const SparseProblem &attention, const SparseProblem &index, std::int64_t longest);
    void (*tile_loss)(const SparseJob &, const SparseItem &, const Turn &, const KeySums &, double *loss,
                      void *scratch);
    std::size_t (*list_notes_bytes)(const SparseProblem &index, std::int64_t longest);
    void (*list_loss)(const SparseJob &, const SparseItem &, void *notes, double *loss, void *scratch);
    void (*add_list)(const SparseJob &, const SparseItem &, void *notes, void *next_notes, std::int64_t range,
                     const KeySums &, void *scratch);
    // The indexer's forward: keys packed once for all rows of a sequence.
    std::size_t (*index_packed_bytes)(const SparseProblem &, std::int64_t keys);
    // Panels [first, end) of keys.
    void (*index_pack)(const SparseJob &, std::int64_t seq, std::int64_t first, std::int64_t end, char *packed);
    std::size_t (*index_scratch_bytes)(const SparseProblem &, std::int64_t rows);
    // Writes the softmax statistics of rows [row0, row1), as many as index_rows takes.
    void (*index_stats)(const SparseJob &, std::int64_t seq, std::int64_t row0, std::int64_t row1, const char *packed,
                        void *scratch);
    // Chooses for rows [row0, row1); or writes the scores of keys [first, end) and leaves choosing to index_choose.
    void (*index_rows)(const SparseJob &, std::int64_t seq, std::int64_t row0, std::int64_t row1, const char *packed,
                       void *scratch);
    void (*index_scores)(const SparseJob &, std::int64_t seq, std::int64_t row, std::int64_t first, std::int64_t end,
                         const char *packed, float *scores, void *scratch);
    void (*index_choose)(const SparseJob &, std::int64_t seq, std::int64_t row, const float *scores, void *scratch);
};

struct SparseVariant {
    SparseKernels as_float, as_pairs;  // as_pairs: null pointers where the instruction is missing
    std::int64_t panel;

    const SparseKernels &kernels(Dtype dtype) const {
        return dtype == Dtype::bfloat16 && as_pairs.attend ? as_pairs : as_float;
    }
};

constexpr std::int64_t loss_range_keys = 1024;  // keys of a loss over lists whose sums stay near a core meanwhile
constexpr std::int64_t loss_tile_rows = 144;    // rows of a loss without selection that read a block of keys together
constexpr std::int64_t index_tile_rows = 8;     // rows of the indexer that read a chunk of keys together

}  // namespace fusion

extern "C" {
const fusion::SparseVariant *fusion_variant_base_sparse();
const fusion::SparseVariant *fusion_variant_v3_sparse();
const fusion::SparseVariant *fusion_variant_v4_sparse();
const fusion::SparseVariant *fusion_variant_v4_avx512bf16_sparse();
}
