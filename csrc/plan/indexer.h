// The plan of the lightning indexer's forward with given lengths: its selection, or (select_count 0) its softmax
// statistics. A row's result depends on its keys only, in a fixed order, and not on the division of work.
//
// Compiled for the baseline instruction set.

#pragma once

#include "data/variant_sparse.h"

#include <vector>

namespace fusion {

struct Team;

class IndexerPlan {
public:
    // Throws std::invalid_argument if sizes do not fit together.
    IndexerPlan(const SparseVariant &variant, const SparseProblem &problem, std::vector<Sequence> sequences);

    // Bytes of scratch of run() with this number of threads.
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
    struct Tile {  // rows whose keys one thread selects
        std::int64_t seq, row0, row1;
    };
    std::vector<Tile> divide(const Wave &wave, int threads) const;
    const char *keys_of(std::int64_t b, const char *packed) const;  // packed keys of a sequence; null: not packed
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
    std::vector<std::int64_t> first_row_;  // first row of each sequence, counted over all
    std::vector<std::size_t> offset_;      // per sequence: offset of its packed keys in the memory of its wave
    std::vector<Wave> waves_;
    std::size_t packed_bytes_ = 0, scratch_bytes_ = 0;
};

}  // namespace fusion
