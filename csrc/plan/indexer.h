// The lightning indexer's forward on given lengths: its choice, or (select_count 0) its softmax statistics. A row's
// result depends on its own keys alone, in one order, so how work is cut changes nothing.
//
// Compiled for the baseline instruction set.

#pragma once

#include "data/variant_sparse.h"

#include <vector>

namespace fusion {

struct Team;

class IndexerPlan {
public:
    // Throws std::invalid_argument where sizes do not fit together.
    IndexerPlan(const SparseVariant &variant, const SparseProblem &problem, std::vector<Sequence> sequences);

    // What run() takes besides operands and results; threads: as given to run().
    std::size_t workspace_bytes(int threads) const;

    // Throws std::bad_alloc before anything is written.
    void run(const SparseOperands &operands, int threads) const;

    const SparseProblem &problem() const { return problem_; }
    std::size_t sequences() const { return sequences_.size(); }

private:
    struct Wave {  // sequences whose keys are packed together
        std::size_t first, end;
        std::int64_t rows;
        std::int64_t longest;
    };
    struct Tile {  // rows that one thread chooses for
        std::int64_t seq, row0, row1;
    };
    std::vector<Tile> cut(const Wave &wave, int threads) const;
    const char *keys_of(std::int64_t b, const char *packed) const;  // of a sequence, or null: packed by who meets them
    bool shares_rows(const Wave &wave, int threads) const;
    std::size_t scores_bytes(int threads) const;
    void pack(const Team &team, const Wave &wave, const SparseJob &job, char *packed) const;
    void choose(const Team &team, const std::vector<Tile> &tiles, const SparseJob &job, const char *packed,
                char *scratch) const;
    void choose_together(const Team &team, const Wave &wave, const std::vector<Tile> &tiles, const SparseJob &job,
                         const char *packed, float *scores, char *scratch) const;

    const SparseKernels &kernels_;
    std::int64_t panel_;
    SparseProblem problem_;
    std::vector<Sequence> sequences_;
    std::vector<std::int64_t> first_row_;  // of each sequence, counted over all
    std::vector<std::size_t> offset_;      // of its keys in the wave's memory, where they are packed beforehand
    std::vector<Wave> waves_;
    std::size_t packed_bytes_ = 0, scratch_bytes_ = 0;
};

}  // namespace fusion
