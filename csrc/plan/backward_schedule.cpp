#include "plan/backward_schedule.h"

#include "data/variant.h"
#include "plan/schedule.h"

#include <algorithm>
#include <numeric>

namespace fusion {
namespace {

// Limit of the memory of packed rows of different units at a time: about a third-level cache, or more with many
// threads.
constexpr std::size_t least_bytes = std::size_t{32} << 20, bytes_per_thread = std::size_t{16} << 20;

std::size_t most_bytes(int team) { return std::max(least_bytes, bytes_per_thread * static_cast<std::size_t>(team)); }

struct Span {  // the elements of dbias that a head adds to lie in [first, last]
    std::int64_t first, last, stride_row;
    std::int64_t head;  // counted over all units
};

std::vector<Span> spans_of(const GradientUnits &units, const Matrix &dbias, bool table) {
    std::vector<Span> spans;
    for (std::size_t u = 0; u < units.size(); ++u) {
        const GradientUnit &unit = units[u];
        const Sequence &seq = units.sequences[unit.seq];
        if (!unit.row_tiles || !unit.key_tiles) continue;
        const std::int64_t rows = table ? table_rows : seq.q_len;
        const std::int64_t size = (rows - 1) * dbias.stride_row[unit.seq] + (seq.kv_len - 1) * dbias.stride_key;
        for (std::int64_t i = 0; i < units.group; ++i) {
            const std::int64_t first =
                dbias.address[unit.seq] + (unit.head * units.group + i) * dbias.stride_head[unit.seq];
            spans.push_back(
                {first, first + size, dbias.stride_row[unit.seq], static_cast<std::int64_t>(u) * units.group + i});
        }
    }
    std::stable_sort(spans.begin(), spans.end(), [](const Span &a, const Span &b) { return a.first < b.first; });
    return spans;
}

// Sets of units, joined two by two; a set is named by its first unit.
class Sets {
public:
    explicit Sets(std::size_t count) : above_(count) { std::iota(above_.begin(), above_.end(), std::size_t{0}); }

    std::size_t find(std::size_t unit) {
        while (above_[unit] != unit) unit = above_[unit] = above_[above_[unit]];
        return unit;
    }
    void join(std::size_t a, std::size_t b) {
        a = find(a), b = find(b);
        above_[std::max(a, b)] = std::min(a, b);
    }

private:
    std::vector<std::size_t> above_;
};

}  // namespace

MetKeys::MetKeys(const Sequence &seq, std::int64_t row_tile, std::int64_t tile_keys) {
    const std::int64_t row0 = row_tile * gradient_rows, row1 = std::min(row0 + gradient_rows, seq.q_len);
    const std::int64_t begin_key = std::max<std::int64_t>(row0 + seq.lo, 0);
    const std::int64_t end_key = std::min(std::max(row1 - 1 + seq.hi, seq.prefix), seq.kv_len);
    first = std::min(begin_key / tile_keys, ceil_div(seq.kv_len, tile_keys));
    end = begin_key < end_key ? ceil_div(end_key, tile_keys) : first;
}

BiasOrder::BiasOrder(const GradientUnits &units, const Matrix &dbias, bool table) {
    const std::vector<Span> spans = spans_of(units, dbias, table);
    before.assign(units.size() * units.group, -1);
    Sets sets(units.size());
    bool chained = table || dbias.stride_key == 0;
    std::int64_t reach = -1;
    for (std::size_t i = 0; i < spans.size(); reach = std::max(reach, spans[i++].last)) {
        if (i == 0 || spans[i].first > reach) continue;
        before[spans[i].head] = spans[i - 1].head;
        sets.join(spans[i].head / units.group, spans[i - 1].head / units.group);
        chained |= spans[i].first != spans[i - 1].first || spans[i].stride_row != spans[i - 1].stride_row;
    }
    if (!chained) return;
    before.clear();
    std::vector<std::size_t> chain_of(units.size());
    for (std::size_t u = 0; u < units.size(); ++u) {
        const std::size_t first = sets.find(u);
        if (first == u) {
            chain_of[u] = chains.size();
            chains.emplace_back();
        }
        chains[chain_of[first]].push_back(u);
    }
}

BackwardSchedule::BackwardSchedule(const GradientUnits &units, int threads, const BiasOrder &order) : team(threads) {
    if (order.chains.empty()) {
        share_units(units, order.holds());
    } else {
        share_chains(units, order);
    }
    single_tasks = single_ends_.size();
}

std::size_t BackwardSchedule::bytes(const GradientUnits &units) const {
    return slot_bytes * slots + (single_bytes + units.key_bytes) * static_cast<std::size_t>(team);
}

// Assigns each chain to one thread; if chains take much memory, fewer threads are used.
void BackwardSchedule::share_chains(const GradientUnits &units, const BiasOrder &order) {
    position.assign(units.size(), 0);
    for (const GradientUnit &unit : units.units) single_bytes = std::max(single_bytes, unit.single.bytes);
    const std::size_t fitting = single_bytes ? most_bytes(team) / single_bytes : order.chains.size();
    team = team_size(team, static_cast<std::int64_t>(std::min(fitting, order.chains.size())));
    for (const std::vector<std::size_t> &chain : order.chains) {
        single_units_.insert(single_units_.end(), chain.begin(), chain.end());
        single_ends_.push_back(single_units_.size());
    }
}

// A thread computes a unit alone, in its cache, while enough work is left for the other threads; all threads share the
// remaining units. Shared units run in parallel, as many as there are slots and threads, because two tiles of keys of
// one unit would wait for each other.
void BackwardSchedule::share_units(const GradientUnits &units, bool ordered) {
    const auto threads = static_cast<std::size_t>(team);
    double left = 0;
    for (const GradientUnit &unit : units.units) left += unit.work;
    for (std::size_t u = 0; u < units.size(); ++u) {
        const GradientUnit &unit = units[u];
        position.push_back(shared.size());
        // If units wait for earlier ones, they must keep their order in the list.
        const bool late = ordered && !shared.empty();
        if (!late && unit.work * (team + 1) <= left && unit.single.bytes * threads <= most_bytes(team)) {
            single_bytes = std::max(single_bytes, unit.single.bytes);
            left -= unit.work;
            single_units_.push_back(u);
            single_ends_.push_back(single_units_.size());
        } else {
            shared.push_back(u);
            slot_bytes = std::max(slot_bytes, unit.shared.bytes);
        }
    }
    if (shared.empty()) return;
    const std::size_t fitting = std::max<std::size_t>(slot_bytes ? most_bytes(team) / slot_bytes : threads, 1);
    // Rounds of equal size, so that the last round does not have few units for all threads.
    slots = ceil_div(shared.size(), ceil_div(shared.size(), std::min(threads, fitting)));
}

void BackwardSchedule::list_items(const GradientUnits &units) {
    std::size_t at = 0, count = 0;
    for (const GradientUnit &unit : units.units) count += units.group * unit.row_tiles + unit.key_tiles;
    items.reserve(count);
    tasks.reserve(count);
    packed_.resize(slots);
    for (const std::size_t end : single_ends_) {
        const std::size_t first = items.size();
        for (; at < end; ++at) add_items(units, &single_units_[at], 1);
        std::size_t last = items.size();
        while (last > first && items[last - 1].packs) --last;
        tasks.push_back({first, items.size(), last - 1, true});
    }
    for (std::size_t first = 0; first < shared.size(); first += slots) {
        std::size_t item = items.size();
        add_items(units, &shared[first], std::min(slots, shared.size() - first));
        for (; item < items.size(); ++item) tasks.push_back({item, item + 1, item, false});
    }
}

// Adds the items of units that run in parallel. Rows are packed just before their first tile of keys.
void BackwardSchedule::add_items(const GradientUnits &all, const std::size_t *first, std::size_t count) {
    std::int64_t tiles = 0;
    for (std::size_t i = 0; i < count; ++i) {
        tiles = std::max(tiles, all[first[i]].key_tiles);
        packed_[i] = 0;
    }
    for (std::int64_t t = 0; t <= tiles; ++t) {
        for (std::size_t i = 0; i < count; ++i) {
            const GradientUnit &unit = all[first[i]];
            for (std::int64_t &next = packed_[i]; next < unit.row_tiles && all.met(first[i], next).first <= t; ++next) {
                for (std::int64_t head = 0; head < all.group; ++head) {
                    items.push_back({first[i], head * unit.row_tiles + next, true});
                }
            }
        }
        for (std::size_t i = 0; i < count; ++i) {
            if (t < all[first[i]].key_tiles) items.push_back({first[i], t, false});
        }
    }
}

}  // namespace fusion
