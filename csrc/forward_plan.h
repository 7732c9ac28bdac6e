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
    // A range of units that are packed together, then read by all their tiles.
    struct Wave {
        std::size_t first, end;
        std::vector<std::int64_t> pack_start, tile_start;  // items before each unit, and in total
    };
    struct PlannedUnit {
        std::int64_t seq, head;
        std::size_t offset;  // in the wave's memory
    };

    void check() const;
    void cut_waves();
    void run_wave(const Wave &wave, const Job &job, char *packed, void *scratch, std::int64_t &empty) const;

    const Variant &variant_;
    const Kernels &kernels_;
    Problem problem_;
    std::vector<Sequence> sequences_;
    std::vector<Tile> tiles_;
    std::vector<std::size_t> first_tile_;  // of each sequence, and their number
    std::vector<PlannedUnit> units_;
    std::vector<Wave> waves_;
    std::size_t packed_bytes_ = 0, scratch_bytes_ = 0;
    std::int64_t most_items_ = 0;
};

}  // namespace fusion
