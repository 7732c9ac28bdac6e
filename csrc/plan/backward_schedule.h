// The schedule of a backward for a number of threads: a list of tasks that threads take in order.
//
// A thread computes a unit (a sequence and a key/value head) alone while enough other units are left; all threads share
// the last ones, tile of keys by tile of keys. Every item waits only for earlier items of the list.

#pragma once

#include "data/problem.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fusion {

// The tiles of keys [first, end) with keys visible to some row of a tile of rows. `first` ascends from tile to tile,
// also for tiles of rows without visible keys.
struct MetKeys {
    std::int64_t first, end;

    MetKeys(const Sequence &seq, std::int64_t row_tile, std::int64_t tile_keys);
    bool has(std::int64_t key_tile) const { return key_tile >= first && key_tile < end; }
};

struct GradientUnit {
    struct Room {
        std::int64_t row_slots;  // slots for tiles of rows of a head: tile i is in slot i % row_slots
        std::size_t bytes;       // of all slots
    };
    std::int64_t seq, head;
    std::int64_t first_row_tile, first_key_tile;  // counted over all units; rows head after head
    std::int64_t row_tiles, key_tiles;            // row_tiles: per head
    double work;                                  // (row, key) pairs
    Room shared, single;                          // if shared by several threads, if computed by one
};

// Input of a schedule: the units of a backward and their memory.
struct GradientUnits {
    std::vector<Sequence> sequences;
    std::vector<GradientUnit> units;
    std::int64_t group, tile_keys;
    std::size_t key_bytes;  // memory of a thread without rows: a tile of keys and scratch

    std::size_t size() const { return units.size(); }
    const GradientUnit &operator[](std::size_t unit) const { return units[unit]; }
    MetKeys met(std::size_t unit, std::int64_t row_tile) const {
        return {sequences[units[unit].seq], row_tile, tile_keys};
    }
};

// The order in which heads add to shared elements of dbias. Heads are counted over all units, in order.
struct BiasOrder {
    std::vector<std::int64_t> before;  // per head: the last earlier head with the same elements, or -1
    // Chains of units that one thread computes one after the other, because keys of a row share an element or heads
    // share some of their elements. Else empty.
    std::vector<std::vector<std::size_t>> chains;

    BiasOrder() = default;
    BiasOrder(const GradientUnits &units, const Matrix &dbias, bool table);
    bool holds() const { return !before.empty() || !chains.empty(); }
};

struct GradientItem {
    std::size_t unit;
    std::int64_t tile;
    bool packs;  // true: packs a tile of rows; false: computes a tile of keys
};

struct GradientTask {  // consecutive items of one thread: complete units, or a single item of a shared unit
    std::size_t first, end, last_keys;  // last_keys: its last tile of keys
    bool single;
};

class BackwardSchedule {
public:
    int team;
    std::vector<std::size_t> shared;               // units
    std::vector<std::size_t> position;             // per unit: number of shared units before it
    std::size_t slots = 1;                         // rows of the i-th shared unit are in slot i % slots
    std::size_t slot_bytes = 0, single_bytes = 0;  // memory of a slot; of a thread for units that it computes alone
    std::vector<GradientItem> items;
    std::vector<GradientTask> tasks;  // units computed by one thread come first
    std::size_t single_tasks = 0;

    // A schedule without items.
    BackwardSchedule(const GradientUnits &units, int threads, const BiasOrder &order);

    std::size_t bytes(const GradientUnits &units) const;  // of all memory
    void list_items(const GradientUnits &units);

private:
    void share_chains(const GradientUnits &units, const BiasOrder &order);
    void share_units(const GradientUnits &units, bool ordered);
    void add_items(const GradientUnits &all, const std::size_t *first, std::size_t count);

    std::vector<std::size_t> single_units_, single_ends_;  // units computed by one thread, task after task
    std::vector<std::int64_t> packed_;                     // while listing parallel units: their packed tiles of rows
};

}  // namespace fusion
