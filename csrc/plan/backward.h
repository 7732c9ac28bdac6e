// The plan of the backward of a problem with given lengths: work list of threads, order of sums, and scratch memory.
//
// A unit is a sequence and a key/value head; plan/backward_schedule.h assigns its work to threads. A thread prefetches
// the memory that it packs next while it computes products.
//
// A tile of keys is processed by one thread with all query rows for which it has visible keys, head after head of its
// group; this thread sums dk and dv. dq is in memory, and tiles of keys add to it in ascending order, each a few rows
// behind the previous one, so every sum is formed in the same order for any number of threads; so are sums of heads
// that share elements of dbias. Rows are packed just before their first tile of keys, into memory of rows that have
// finished all theirs or of an earlier unit, so that the few rows in use stay in a cache. Compiled for the baseline
// instruction set.

#pragma once

#include "data/variant.h"
#include "plan/backward_schedule.h"
#include "plan/schedule.h"

#include <atomic>
#include <memory>
#include <vector>

namespace fusion {

struct Team;

class BackwardPlan {
public:
    // Throws std::invalid_argument if sizes do not fit together.
    BackwardPlan(const Variant &variant, const Problem &problem, std::vector<Sequence> sequences);

    ~BackwardPlan();
    BackwardPlan(const BackwardPlan &) = delete;
    BackwardPlan &operator=(const BackwardPlan &) = delete;

    // Bytes of scratch of run() with this number of threads.
    std::size_t workspace_bytes(int threads) const;

    // Computes the gradients; returns the number of empty rows that return the mean of values, whose gradients it
    // omits. Throws std::bad_alloc before anything is written.
    std::int64_t run(const Operands &operands, const Gradients &gradients, int threads) const;

    const Problem &problem() const { return problem_; }
    std::size_t sequences() const { return units_.sequences.size(); }
    const char *variant() const { return variant_.name; }

private:
    struct Upcoming {  // memory that a thread packs after a tile of keys, as much as its cache holds
        static constexpr std::int64_t most = 4;
        static constexpr std::size_t farthest = 64;  // most items of the list of shared units to look ahead
        const GradientItem *rows[most], *keys;
        std::int64_t count;  // tiles of rows
    };
    struct State;    // of a run
    struct Before {  // a tile that adds first: it has added to row r when its counter is at least first + r
        const std::atomic<std::int64_t> *rows = nullptr;
        std::int64_t first = 0;
    };
    struct Turn;
    struct Memory {
        char *rows;
        std::int64_t row_slots;  // slots for tiles of rows of each head
    };

    void cut_units();
    std::int64_t places_of(const Sequence &seq, std::int64_t row_tiles, std::int64_t ahead) const;
    double work_of(const Sequence &seq, std::int64_t row_tiles) const;
    double all_work() const { return work_ * pair_work(problem_); }
    int team(int threads) const;
    std::unique_ptr<const BackwardSchedule> take_schedule(int size, const BiasOrder &order) const;
    RowTile row_tile(std::size_t unit, std::int64_t index, Memory memory) const;
    std::size_t take_early(State &state) const;
    void work(State &state, const Team &team, char *single_memory, void *scratch) const;
    Memory memory_of(const State &state, const Team &team, const GradientItem &item) const;
    bool pack_rows(const GradientItem &item, State &state, const Team &team, Memory memory) const;
    Before bias_before(const State &state, const GradientItem &item, std::int64_t index) const;
    bool meet_keys(const GradientItem &item, State &state, const Team &team, Memory memory, void *scratch, bool single,
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
    mutable std::atomic<const BackwardSchedule *> last_schedule_ = nullptr;  // of the last run, unless one is running
};

}  // namespace fusion
