// The backward of one problem on given lengths: who computes what when, in which order sums are formed, and the memory.
//
// A unit is a sequence and a key/value head; plan/backward_schedule.h says which thread computes which part of it. A
// thread asks for the memory of what it packs next while its products run.
//
// A tile of keys meets all query rows that see it, head after head of its group, and belongs to one thread, which adds
// up dk and dv. Rows' dq lies in memory; tiles of keys add to it in ascending order, each a few rows behind the one
// before it, so every sum is formed in the same order for any number of threads; heads that share elements of dbias
// likewise. Rows are packed when the first tile of keys that they meet is next, into memory that rows which have met
// all theirs, or an earlier unit, have left: few rows at a time stay in a cache. Compiled for the baseline instruction
// set.

#pragma once

#include "data/variant.h"
#include "plan/backward_schedule.h"

#include <atomic>
#include <memory>
#include <vector>

namespace fusion {

struct Team;

class BackwardPlan {
public:
    // Throws std::invalid_argument where sizes do not fit together.
    BackwardPlan(const Variant &variant, const Problem &problem, std::vector<Sequence> sequences);

    ~BackwardPlan();
    BackwardPlan(const BackwardPlan &) = delete;
    BackwardPlan &operator=(const BackwardPlan &) = delete;

    // What run() takes besides operands and gradients; threads: as given to run().
    std::size_t workspace_bytes(int threads) const;

    // Computes the gradients; returns the number of rows in mean form, which it leaves out. Throws std::bad_alloc
    // before anything is written.
    std::int64_t run(const Operands &operands, const Gradients &gradients, int threads) const;

    const Problem &problem() const { return problem_; }
    std::size_t sequences() const { return units_.sequences.size(); }
    const char *variant() const { return variant_.name; }

private:
    struct Upcoming {  // what a thread packs after a tile of keys, as far as its cache holds it
        static constexpr std::int64_t most = 4;
        static constexpr std::size_t farthest = 64;  // items of a list that units share, up to which it looks
        const GradientItem *rows[most], *keys;
        std::int64_t count;  // of tiles of rows
    };
    struct State;    // of a run
    struct Before {  // who adds to rows of a tile before another: when its counter is that much farther than the row
        const std::atomic<std::int64_t> *rows = nullptr;
        std::int64_t first = 0;
    };
    struct Turn;
    struct Memory {
        char *rows;
        std::int64_t places;  // of rows of each head
    };

    void check() const;
    void cut_units();
    std::int64_t places_of(const Sequence &seq, std::int64_t row_tiles, std::int64_t ahead) const;
    double work_of(const Sequence &seq, std::int64_t row_tiles) const;
    double all_work() const;
    int team(int threads) const;
    std::unique_ptr<const BackwardSchedule> take_schedule(int size, const BiasOrder &order) const;
    RowTile row_tile(std::size_t unit, std::int64_t index, Memory memory) const;
    std::size_t take_early(State &state) const;
    void work(State &state, const Team &team, char *own, void *scratch) const;
    Memory memory_of(const State &state, const Team &team, const GradientItem &item) const;
    bool pack_rows(const GradientItem &item, State &state, const Team &team, Memory memory) const;
    Before bias_before(const State &state, const GradientItem &item, std::int64_t index) const;
    bool meet_keys(const GradientItem &item, State &state, const Team &team, Memory memory, void *scratch, bool own,
                   const Upcoming &upcoming) const;
    Upcoming upcoming_after(const State &state, std::size_t at, const GradientTask &task,
                            const GradientTask *then) const;
    Prefetches ahead_of(const State &state, const Upcoming &upcoming, const KeyTile &keys, std::int64_t slice,
                        std::int64_t slices) const;
    void clear_dbias(const Matrix &dbias, const RowTile &rows, const KeyTile &keys) const;

    const Variant &variant_;
    const GradientKernels &kernels_;
    Problem problem_;
    GradientUnits units_;
    std::size_t tile_bytes_ = 0;
    std::int64_t row_tiles_ = 0, key_tiles_ = 0;
    double work_ = 0, result_bytes_ = 0;
    mutable std::atomic<const BackwardSchedule *> kept_ = nullptr;  // of the last run, unless one is running
};

}  // namespace fusion
