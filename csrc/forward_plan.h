// The forward of one problem on given lengths: what is packed when, what is computed by whom, and the memory for it.
//
// Compiled for the baseline instruction set. Which thread computes a tile never changes what is computed.

#pragma once

#include "variant.h"

#include <vector>

namespace fusion {

class ForwardPlan {
public:
    // Throws std::invalid_argument where sizes or intervals do not fit together. tiles: by sequence, rows ascending.
    ForwardPlan(const Variant &variant, const Problem &problem, std::vector<Sequence> sequences, std::vector<Tile> tiles);

    // What run() takes besides the operands; threads: as given to run().
    std::size_t workspace_bytes(int threads) const;

    // Computes out and statistics; returns the number of empty rows. Throws std::bad_alloc before anything is written.
    std::int64_t run(const Operands &operands, int threads) const;

    const Problem &problem() const { return problem_; }
    std::size_t sequences() const { return sequences_.size(); }
    const char *variant() const { return variant_.name; }

private:
    // One piece of work for one thread: a run of panels to pack, or a tile of one query head, which waits for the runs
    // [first, end) that hold its keys. `first` counts runs over the whole plan.
    struct Item {
        std::size_t unit;
        std::int64_t head;   // of the query; `packs` if the item packs
        std::size_t at;      // the tile, or the first panel
        std::size_t first, end;
    };
    static constexpr std::int64_t packs = -1;
    // A range of items whose units lie in memory together.
    struct Wave {
        std::size_t first, end;
    };
    struct PlannedUnit {
        std::int64_t seq, head;
        std::size_t offset;  // in the wave's memory
    };
    struct Threads;  // what those of one run share

    void check() const;
    void cut_waves();
    void add_items(std::size_t unit, const std::vector<std::size_t> &tiles);
    void pack_ahead(const Wave &wave);
    std::int64_t work(const Job &job, const Threads &shared, void *scratch) const;
    std::int64_t do_item(const Item &item, const Job &job, const Threads &shared, void *scratch) const;

    const Variant &variant_;
    const Kernels &kernels_;
    Problem problem_;
    std::vector<Sequence> sequences_;
    std::vector<Tile> tiles_;
    std::vector<PlannedUnit> units_;
    std::vector<Item> items_;
    std::vector<Wave> waves_;
    std::size_t packed_bytes_ = 0, scratch_bytes_ = 0, shared_bytes_ = 0, runs_ = 0, most_items_ = 0;
};

}  // namespace fusion
