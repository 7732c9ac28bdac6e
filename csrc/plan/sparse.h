// The plan of attention to selected keys with given lengths: work list of threads, order of sums of key gradients, and
// scratch memory.
//
// An item is a row and some or all heads that share a key head; in a loss without selection, a tile of rows. In the
// backward, items of one sequence and key head add to the same sums of key gradients, always in the same order, so
// results do not depend on the number of threads. Items store their contributions to sums of keys, which are added
// batch by batch (plan/key_sum_order.h), because a row selects keys anywhere in a sequence and would wait for all
// earlier rows. Tiles of a loss without selection process keys in order and wait for their turn. Compiled for the
// baseline instruction set.

#pragma once

#include "data/variant_sparse.h"
#include "plan/key_sum_order.h"

#include <optional>
#include <vector>

namespace fusion {

class SparsePlan {
public:
    // Throws std::invalid_argument if sizes do not fit together.
    SparsePlan(const SparseVariant &variant, const SparseProblem &problem, std::vector<Sequence> sequences,
               bool backward);

    // The indexer's loss and its gradients. `problem` is the indexer; if `attention` has no heads, the caller passes
    // the target.
    SparsePlan(const SparseVariant &variant, const SparseProblem &problem, std::vector<Sequence> sequences,
               const SparseProblem &attention);

    // Bytes of scratch of run() with this number of threads.
    std::size_t workspace_bytes(int threads) const;

    // Throws std::bad_alloc before anything is written.
    void run(const SparseOperands &given, int threads) const;
    void run(const SparseOperands &operands, const SparseOperands &attended, float *loss, int threads) const;

    const SparseProblem &problem() const { return problem_; }
    const std::optional<SparseProblem> &attention() const { return attention_; }
    bool given_target() const { return attention_ && !attention_->heads_q; }
    std::int64_t target_width() const { return problem_.select_count ? problem_.select_count : longest_; }
    std::size_t sequences() const { return sequences_.size(); }
    bool backward() const { return backward_; }

private:
    struct Unit {                                            // a sequence and a key head
        std::int64_t seq, head_kv, first_item, items, tile;  // tile: heads of an item
        std::size_t offset;                                  // offset of its sums in the memory of its wave
    };
    struct Wave {  // units whose sums are in memory together
        std::size_t first, end;
        std::int64_t items;
    };
    struct Layout {  // of the workspace
        std::size_t sums = 0, shares = 0, progress = 0, scratch = 0;
        std::size_t contributions = 0, starts = 0;  // bytes per item: all contributions, and Contributions::starts
        int team = 1;
        std::int64_t strip_keys = 1;
        Batches::Pace pace{};
    };
    struct State;  // of a run

    void divide();
    std::int64_t most_keys_of(const Sequence &seq) const;
    std::int64_t forward_tile(int threads) const;
    void run_backward(const SparseJob &job, int threads, float *loss) const;
    Layout layout(int threads) const;
    SparseItem item_at(const Unit &unit, std::int64_t index) const;
    const Unit &unit_of(const Wave &wave, std::int64_t item) const;
    void attend(const SparseJob &job, char *scratch, std::int64_t tile, const Layout &at) const;
    bool in_turns() const { return attention_ && !problem_.select_count; }
    std::vector<Batches::Unit> work_of(const Wave &wave, const Layout &at) const;
    void descend_tiles(const Team &team, const Wave &wave, State &state, char *scratch) const;
    void descend_lists(const Team &team, const Wave &wave, State &state, Batches &batches, const Layout &at,
                       char *scratch) const;
    template <class Body> void share_keys(const Team &team, const Wave &wave, const State &state, Body body) const;

    const SparseKernels &kernels_;
    SparseProblem problem_;
    std::optional<SparseProblem> attention_;  // of a loss
    std::vector<Sequence> sequences_;
    std::vector<std::int64_t> kv_len_;  // keys of the first source per sequence, if there are two sources
    bool backward_;
    std::int64_t tile_rows_ = 1;  // rows of an item
    std::int64_t rows_ = 0, longest_ = 0, most_items_ = 0, most_heads_ = 0;
    std::vector<std::int64_t> first_row_;  // first row of each sequence, counted over all
    std::vector<Unit> units_;
    std::vector<Wave> waves_;
    std::size_t sums_bytes_ = 0;
};

}  // namespace fusion
