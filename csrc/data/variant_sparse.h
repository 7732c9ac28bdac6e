// Tables of the functions of one instruction-set variant for selected keys and the lightning indexer; data/variant.h
// has those for dense attention and decode.

#pragma once

#include "data/sparse.h"

namespace fusion {

struct SparseKernels {  // sizes are bytes and multiples of 64
    std::int64_t panel;
    std::size_t (*scratch_bytes)(const SparseProblem &, std::int64_t heads);
    std::int64_t (*attend)(const SparseJob &, const SparseItem &,
                           void *scratch);  // returns 1 if the row has no visible key
    // The backward, and the loss with lists: contributions of an item to sums of keys are stored, and added by
    // add_keys, a range of keys at a time, which also prefetches the contributions that are added next, unless they are
    // null.
    std::size_t (*gradient_bytes)(const SparseProblem &, std::int64_t heads);
    std::size_t (*contribution_bytes)(const SparseProblem &, std::int64_t heads);  // without Contributions::starts
    std::int64_t (*sum_columns)(const SparseProblem &);                            // floats per row of KeySums
    // dsink_share: [heads of the item], the row's contribution to dsink.
    void (*gradient)(const SparseJob &, const SparseItem &, const Contributions &, float *dsink_share, void *scratch);
    void (*list_loss)(const SparseJob &, const SparseItem &, const Contributions &, double *loss, void *scratch);
    void (*add_keys)(const SparseJob &, const SparseItem &, const Contributions &, const Contributions *next,
                     const KeyRange &, const KeySums &, void *scratch);
    void (*store_keys)(const SparseJob &, std::int64_t seq, std::int64_t head_kv, const KeySums &, std::int64_t first,
                       std::int64_t end);
    std::size_t (*loss_bytes)(const SparseProblem &attention, const SparseProblem &index);
    // The loss without selection for loss_tile_rows rows, beginning with the row of an item.
    void (*tile_loss)(const SparseJob &, const SparseItem &, const Turn &, const KeySums &, double *loss,
                      void *scratch);
    // The indexer's forward; keys are packed once for all rows of a sequence, or, if `packed` is null, panel by panel.
    std::size_t (*index_packed_bytes)(const SparseProblem &, std::int64_t keys);
    // Packs panels [first, end) of keys.
    void (*index_pack)(const SparseJob &, std::int64_t seq, std::int64_t first, std::int64_t end, char *packed);
    std::size_t (*index_scratch_bytes)(const SparseProblem &, std::int64_t rows);
    // Writes the softmax statistics of rows [row0, row1), at most index_tile_rows.
    void (*index_stats)(const SparseJob &, std::int64_t seq, std::int64_t row0, std::int64_t row1, const char *packed,
                        void *scratch);
    // index_rows selects keys for rows [row0, row1). index_scores only writes scores of keys [first, end), at most
    // index_chunk, with rows `pitch` floats apart, for index_choose; `later` is the first key that this thread may read
    // next.
    void (*index_rows)(const SparseJob &, std::int64_t seq, std::int64_t row0, std::int64_t row1, const char *packed,
                       void *scratch);
    void (*index_scores)(const SparseJob &, std::int64_t seq, std::int64_t row0, std::int64_t row1, std::int64_t first,
                         std::int64_t end, std::int64_t later, const char *packed, float *scores, std::int64_t pitch,
                         void *scratch);
    void (*index_choose)(const SparseJob &, std::int64_t seq, std::int64_t row, const float *scores, void *scratch);
};

struct SparseVariant {
    SparseKernels as_float, as_pairs;  // as_pairs: null pointers where the instruction is missing

    const SparseKernels &kernels(Dtype dtype) const {
        return dtype == Dtype::bfloat16 && as_pairs.attend ? as_pairs : as_float;
    }
};

}  // namespace fusion
