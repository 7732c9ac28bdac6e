// Who computes what when in a backward: a list of tasks that threads take in order, made for a number of threads.
//
// A thread computes a unit (a sequence and a key/value head) alone while enough others are left; the last ones all
// threads share, tile of keys by tile of keys. Whatever an item waits for comes before it in the list.

#pragma once

#include "data/problem.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fusion {

// The tiles of keys [first, end) that some row of a tile may see. The first ascends from tile to tile, also among those
// that meet nothing.
struct MetKeys {
    std::int64_t first, end;

    MetKeys(const Sequence &seq, std::int64_t row_tile, std::int64_t tile_keys);
    bool has(std::int64_t key_tile) const { return key_tile >= first && key_tile < end; }
};

struct GradientUnit {
    struct Room {
        std::int64_t places;  // for row tiles of a head that are in memory together: tile i lies at i % places
        std::size_t bytes;    // of all places
    };
    std::int64_t seq, head;
    std::int64_t first_row_tile, first_key_tile;  // among those of all units; rows head after head
    std::int64_t row_tiles, key_tiles;            // of rows per head
    double work;                                  // in pairs of a row and a key
    Room shared, own;                             // among several threads, and of one alone
};

// What a schedule is made from.
struct GradientUnits {
    std::vector<Sequence> sequences;
    std::vector<GradientUnit> units;
    std::int64_t group, tile_keys;
    std::size_t key_bytes;  // of a tile of keys, and of all that a thread needs beside rows

    std::size_t size() const { return units.size(); }
    const GradientUnit &operator[](std::size_t unit) const { return units[unit]; }
    MetKeys met(std::size_t unit, std::int64_t row_tile) const {
        return {sequences[units[unit].seq], row_tile, tile_keys};
    }
};

// In which order heads add to elements of dbias that they share. Heads are counted over all units, in their order.
struct BiasOrder {
    std::vector<std::int64_t> before;  // of a head: the last earlier one with the same elements, or -1
    // Where a row's keys share an element, or heads share some of their elements: units that one thread computes one
    // after the other. Else empty.
    std::vector<std::vector<std::size_t>> chains;

    BiasOrder() = default;
    BiasOrder(const GradientUnits &units, const Matrix &dbias, bool table);
    bool holds() const { return !before.empty() || !chains.empty(); }
};

struct GradientItem {
    std::size_t unit;
    std::int64_t tile;
    bool packs;  // a tile of rows; else a tile of keys meets its rows
};

struct GradientTask {  // items that one thread computes in a row: units of its own, or a single item of a shared one
    std::size_t first, end, last_keys;  // last_keys: its last tile of keys
    bool own;
};

class BackwardSchedule {
public:
    int team;
    std::vector<std::size_t> shared;            // units
    std::vector<std::size_t> position;          // per unit: how many shared ones come before it
    std::size_t slots = 1;                      // the rows of the i-th shared unit lie in slot i % slots
    std::size_t slot_bytes = 0, own_bytes = 0;  // of a slot, of what a thread has for its own units
    std::vector<GradientItem> items;
    std::vector<GradientTask> tasks;  // threads' own units come first
    std::size_t own_tasks = 0;

    // Has no items yet.
    BackwardSchedule(const GradientUnits &units, int threads, const BiasOrder &order);

    std::size_t bytes(const GradientUnits &units) const;  // of all memory
    void list_items(const GradientUnits &units);

private:
    void share_chains(const GradientUnits &units, const BiasOrder &order);
    void share_units(const GradientUnits &units, bool ordered);
    void add_items(const GradientUnits &all, const std::size_t *first, std::size_t count);

    std::vector<std::size_t> own_, own_ends_;  // units of threads' own, task after task
    std::vector<std::int64_t> packed_;         // of units that go abreast: tiles of rows that are packed, while listing
};

}  // namespace fusion
