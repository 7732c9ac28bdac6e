// The backward of one problem on given lengths: who computes what when, in which order sums are formed, and the memory.
//
// A unit is a sequence and a key/value head. A thread computes a unit alone while enough others are left, and asks for
// the memory of what it packs next while its products run; the last units all threads share.
//
// A tile of keys meets all query rows that see it, head after head of its group, and belongs to one thread, which adds
// up dk and dv. Rows' dq lies in memory; tiles of keys add to it in ascending order, one waiting for the other where it
// must, so every sum is formed in the same order for any number of threads. Rows are packed when the first tile of keys
// that they meet is next, into memory that rows which have met all theirs, or an earlier unit, have left: few rows at a
// time stay in a cache. Compiled for the baseline instruction set.

#pragma once

#include "data/variant.h"

#include <atomic>
#include <memory>
#include <vector>

namespace fusion {

struct Team;

class BackwardPlan {
public:
    // Throws std::invalid_argument where sizes do not fit together.
    BackwardPlan(const Variant &variant, const Problem &problem, std::vector<Sequence> sequences);

    // What run() takes besides operands and gradients; threads: as given to run().
    std::size_t workspace_bytes(int threads) const;

    // Computes the gradients; returns the number of rows in mean form, which it leaves out. Throws std::bad_alloc
    // before anything is written.
    std::int64_t run(const Operands &operands, const Gradients &gradients, int threads) const;

    const Problem &problem() const { return problem_; }
    std::size_t sequences() const { return sequences_.size(); }
    const char *variant() const { return variant_.name; }

private:
    struct Room {
        std::int64_t places;  // for row tiles of a head that are in memory together: tile i lies at i % places
        std::size_t bytes;    // of all places
    };
    struct PlannedUnit {
        std::int64_t seq, head;
        std::int64_t first_tile;            // of its tiles of rows among all, head after head
        std::int64_t row_tiles, key_tiles;  // per head
        double work;                        // in pairs of a row and a key
        Room shared, own;                   // among several threads, and of one alone
    };
    struct Item {  // a unit's tile of rows is packed (rank -1), or a tile of keys meets its rows
        std::size_t unit;
        std::int64_t tile, rank;  // rank: how many units come before it at such a tile of keys
    };
    struct Task {  // items that one thread computes in a row: of a unit of its own, or a single one of a shared unit
        std::size_t first, end;
        bool own;
    };
    struct Shares {
        std::vector<std::size_t> own, shared;  // units
        std::vector<std::size_t> position;     // per unit: how many shared ones come before it
        std::size_t slots;                     // the rows of the i-th shared unit lie in slot i % slots
        std::size_t slot_bytes, own_bytes;     // of a slot, of what a thread has for its own units
    };
    struct Upcoming {  // what a thread packs after a tile of keys, as far as its cache holds it
        static constexpr std::int64_t most = 4;
        static constexpr std::size_t farthest = 64;  // items of a list that units share, up to which it looks
        const Item *rows[most], *keys;
        std::int64_t count;  // of tiles of rows
    };
    struct State;  // of a run

    void check() const;
    void cut_units();
    std::int64_t places_of(const Sequence &seq, std::int64_t row_tiles, std::int64_t ahead) const;
    std::int64_t first_meeting(const Sequence &seq, std::int64_t row_tile, std::int64_t &end) const;
    double work_of(const Sequence &seq, std::int64_t row_tiles) const;
    RowTile row_tile(std::size_t unit, std::int64_t index, char *rows, std::int64_t places) const;
    Shares shares_of(int team, bool ordered) const;
    std::size_t bytes_of(const Shares &shares, int team) const;
    void cut_items(State &state, std::size_t abreast) const;
    void add_items(std::vector<Item> &items, const std::size_t *units, std::size_t count,
                   std::vector<std::int64_t> &ranks, std::vector<std::int64_t> &packed) const;
    void add_rows(std::vector<Item> &items, std::size_t unit, std::int64_t key_tile, std::int64_t &next) const;
    void work(State &state, const Team &team, char *own, void *scratch) const;
    void pack_rows(const Item &item, State &state, const Team &team, char *memory, std::int64_t places) const;
    void meet_keys(const Item &item, State &state, const Team &team, char *memory, std::int64_t places, void *scratch,
                   const Upcoming &upcoming) const;
    Upcoming upcoming_after(const State &state, std::size_t at, const Task &task, const Task *then) const;
    Prefetches ahead_of(const State &state, const Upcoming &upcoming, const KeyTile &keys, std::int64_t slice,
                        std::int64_t slices) const;
    void clear_dbias(const Matrix &dbias, const RowTile &rows, const KeyTile &keys) const;

    const Variant &variant_;
    const GradientKernels &kernels_;
    Problem problem_;
    std::vector<Sequence> sequences_;
    std::vector<PlannedUnit> units_;
    std::size_t key_bytes_ = 0, tile_bytes_ = 0;
    std::int64_t group_, row_tiles_ = 0, most_key_tiles_ = 0, items_ = 0;
    double result_bytes_ = 0;
};

}  // namespace fusion
