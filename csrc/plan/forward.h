// The plan of the forward of a problem with given lengths: work list of threads, packing of keys, and scratch memory.
//
// Compiled for the baseline instruction set. Results do not depend on the thread that computes a tile.

#pragma once

#include "data/variant.h"
#include "plan/schedule.h"

#include <atomic>
#include <utility>
#include <vector>

namespace fusion {

struct Team;

class ForwardPlan {
public:
    // Throws std::invalid_argument if sizes or intervals do not fit together. tiles: by sequence, rows ascending.
    ForwardPlan(const Variant &variant, const Problem &problem, std::vector<Sequence> sequences,
                std::vector<Tile> tiles);

    // Bytes of scratch of run() with this number of threads.
    std::size_t workspace_bytes(int threads) const;

    // Computes out and statistics; returns the number of empty rows. Throws std::bad_alloc before anything is written.
    std::int64_t run(const Operands &operands, int threads) const;

    // The same with keys and values in a cache of the problem's dtype.
    std::int64_t run(const DecodeProblem &problem, const DecodeOperands &operands, int threads) const;

    const Problem &problem() const { return problem_; }
    std::size_t sequences() const { return sequences_.size(); }
    const char *variant() const { return variant_.name; }

private:
    // Tiles [first, end) of tiles_ of one key/value head, and their keys.
    struct PlannedUnit {
        Unit unit;
        std::size_t first, end;
        std::size_t bytes = 0, offset = 0;  // size of its packed keys; offset in the memory of its wave
        std::size_t runs = 0;               // number of runs of earlier units
        std::int64_t longest = 0;           // most keys of a tile
        double work = 0, before = 0;        // (row, key) pairs; those of all earlier units
        std::size_t chain = 1, left = 1;    // consecutive units of its chain; those from this one on
        std::int64_t capacity = 0;          // keys of the longest unit of the chain
    };
    // An item of work: a run of panels to pack, or a tile of one query head, which waits for the runs [first, end) with
    // its keys. Runs are counted over the whole plan.
    struct Item {
        std::size_t unit;
        std::int64_t head;  // query head; `packs` if the item packs
        std::size_t at;     // the tile, or the first panel
        std::size_t first, end;
    };
    static constexpr std::int64_t packs = -1;
    struct Shared {  // by the threads of a run
        const Job &job;
        char *packed;
        std::size_t team, segment = 1;              // threads; consecutive units of a chain that a thread takes
        std::atomic<std::size_t> next = 0;          // the first unit or item that no thread has taken
        std::atomic<std::int64_t> *left = nullptr;  // per wave: unfinished items
        std::atomic<bool> *ready = nullptr;         // per run of panels: true if packed
    };

    struct Bundle {  // units that a thread has taken together and not begun
        std::size_t first = 0, end = 0;
    };

    std::int64_t run(const Job &job, int threads) const;
    void pack(const Job &job, const Unit &unit, std::int64_t first, std::int64_t end) const;
    void check() const;
    void cut_units();
    PlannedUnit cut_piece(std::size_t first) const;
    void add_chains(std::vector<PlannedUnit> &pieces, std::vector<std::pair<double, PlannedUnit>> &placed) const;
    void list_items();
    std::size_t runs_of(const PlannedUnit &u) const;
    void add_items(std::size_t first, std::size_t end);
    bool alone(int threads) const;
    double all_work() const { return work_ * pair_work(problem_); }
    std::size_t team(int threads) const;
    std::size_t slots() const;
    std::size_t segment(std::size_t team) const;
    std::size_t bundle(const PlannedUnit &u, const Shared &shared) const;
    std::size_t take(Shared &shared, Bundle &taken) const;
    bool plenty(const PlannedUnit &u, const Shared &shared) const;
    std::int64_t begin_unit(const PlannedUnit &next, bool goes_on, char *packed, Unit &unit, std::int64_t done) const;
    std::int64_t work_alone(Shared &shared, const Team &team, char *packed, void *scratch) const;
    std::int64_t work_together(Shared &shared, const Team &team, void *scratch) const;
    std::int64_t do_item(const Item &item, std::size_t wave, Shared &shared, const Team &team, void *scratch) const;

    const Variant &variant_;
    const Kernels &kernels_;
    Problem problem_;
    std::vector<Sequence> sequences_;
    std::vector<Tile> tiles_;
    std::vector<PlannedUnit> units_;
    std::vector<double> works_;  // work of the units, most first
    std::vector<Item> items_;
    std::vector<std::size_t> wave_ends_;  // end of the items of each wave, whose units are in memory together
    // Units up to this size are packed and computed by one thread, in its second-level cache, without waiting. Larger
    // ones are shared by all threads.
    std::size_t small_unit_;
    std::size_t scratch_bytes_ = 0, wave_bytes_ = 0, unit_bytes_ = 0, runs_ = 0, longest_chain_ = 1;
    double work_ = 0;  // of all units
};

}  // namespace fusion
