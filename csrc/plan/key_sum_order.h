// The order of work of items whose contributions to sums of keys are stored. Items of a unit are grouped into batches.
// When all items of a batch have stored their contributions, its keys are divided into ranges of equal work, and they
// are added range by range, item after item: a sum has the order of items for any thread and any division of keys.
//
// Tasks are in one list, and threads take them in order. The ranges of a batch follow `lag` items after its last item,
// which is usually computed by then, and the same range of the previous batch is a complete batch earlier, so threads
// rarely wait. They wait for earlier tasks only, so the first unfinished one never waits.

#pragma once

#include "data/sparse.h"
#include "plan/team.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace fusion {

class Batches {
public:
    struct Pace {
        std::int64_t items;  // most items of a batch
        std::int64_t lag;
        std::int64_t slots;  // items with memory for contributions: at least items + lag; more let threads run ahead
        std::int64_t least_keys;  // least average number of keys of an item in a range
    };
    struct Unit {
        std::int64_t items, strips, ranges;  // ranges: most ranges of a batch
    };
    struct Batch {
        std::size_t unit;
        std::int64_t first, end;  // items
        std::int64_t number;      // index of the batch in its unit
        std::int64_t strips, ranges;
        std::int64_t first_strip, first_edge;  // the unit's first strip in progress_; the batch's first edge in edges_
    };

    Batches(const std::vector<Unit> &units, const Pace &pace) : slots_(pace.slots), least_keys_(pace.least_keys) {
        std::int64_t items = 0, strips = 0, edges = 0;
        for (std::size_t u = 0; u < units.size(); ++u) {
            const Unit &unit = units[u];
            for (std::int64_t number = 0, end = items + unit.items; items < end; ++number) {
                const std::int64_t stop = std::min(items + pace.items, end);
                batches_.push_back({u, items, stop, number, unit.strips, unit.ranges, strips, edges});
                items = stop;
                edges += unit.ranges + 1;
            }
            strips += unit.strips;
        }
        list_tasks(items, pace.lag);
        edges_.resize(static_cast<std::size_t>(edges));
        progress_ = std::make_unique<std::atomic<std::int64_t>[]>(static_cast<std::size_t>(strips));
        left_ = std::make_unique<Left[]>(batches_.size());
        for (std::size_t b = 0; b < batches_.size(); ++b) {
            left_[b].items = batches_[b].end - batches_[b].first;
            left_[b].ranges = batches_[b].ranges;
        }
    }

    // The work of one thread. compute(item) stores the contributions of an item, add(batch, range) adds those of a
    // batch, and starts_of(item) returns Contributions::starts. capacity: private memory of this thread for one more
    // number than a unit has strips, which compute and add may use too.
    template <class Compute, class StartsOf, class Add>
    void work(const Team &team, const Compute &compute, const StartsOf &starts_of, const Add &add,
              std::int64_t *capacity) {
        for (std::int64_t task; (task = team.take(taken_)) < tasks_;) {
            const auto after = [](std::int64_t t, const Segment &segment) { return t < segment.task; };
            const Segment &segment = *(std::upper_bound(segments_.begin(), segments_.end(), task, after) - 1);
            const std::int64_t index = task - segment.task;
            if (segment.adds) add_range(team, segment.first, index, add);
            else compute_item(team, segment.first + index, compute, starts_of, capacity);
        }
    }

private:
    struct Segment {  // a section of the list: items from `first` on, or the ranges of batch `first`
        std::int64_t task, first;
        bool adds;
    };
    struct Left {  // of a batch: unfinished items and ranges, and true if its keys are divided into ranges
        std::atomic<std::int64_t> items, ranges;
        std::atomic<bool> divided;
    };

    void list_tasks(std::int64_t items, std::int64_t lag) {
        std::int64_t item = 0;
        for (std::size_t b = 0; b < batches_.size(); ++b) {
            const std::int64_t due = std::min(batches_[b].end + lag, items);
            if (item < due) {
                segments_.push_back({tasks_, item, false});
                tasks_ += due - item;
                item = due;
            }
            segments_.push_back({tasks_, static_cast<std::int64_t>(b), true});
            tasks_ += batches_[b].ranges;
        }
    }

    std::int64_t batch_of(std::int64_t item) const {
        const auto after = [](std::int64_t i, const Batch &batch) { return i < batch.first; };
        return std::upper_bound(batches_.begin(), batches_.end(), item, after) - batches_.begin() - 1;
    }

    template <class Compute, class StartsOf>
    void compute_item(const Team &team, std::int64_t item, const Compute &compute, const StartsOf &starts_of,
                      std::int64_t *capacity) {
        if (item >= slots_) {  // waits until the previous contributions of its slot have been added
            const std::atomic<std::int64_t> &ranges = left_[batch_of(item - slots_)].ranges;
            if (!team.wait_until([&] { return ranges.load(std::memory_order_acquire) == 0; })) return;
        }
        compute(item);
        const std::int64_t b = batch_of(item);
        if (left_[b].items.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        divide(batches_[b], starts_of, capacity);
        left_[b].divided.store(true, std::memory_order_release);
    }

    // Range r ends at the first strip with (r + 1) / ranges of all keys before it.
    template <class StartsOf>
    void divide(const Batch &batch, const StartsOf &starts_of, std::int64_t *before) {
        std::fill_n(before, batch.strips + 1, 0);
        for (std::int64_t i = batch.first; i < batch.end; ++i) {
            const std::int32_t *const starts = starts_of(i);
            for (std::int64_t strip = 0; strip <= batch.strips; ++strip) before[strip] += starts[strip];
        }
        const std::int64_t keys = before[batch.strips], items = batch.end - batch.first;
        const std::int64_t quota = std::max(keys / batch.ranges + 1, least_keys_ * items);
        std::int64_t *const edges = &edges_[batch.first_edge], strip = 0;
        for (std::int64_t range = 0; range < batch.ranges; ++range) {
            while (strip < batch.strips && before[strip] < range * quota) ++strip;
            edges[range] = strip;
        }
        edges[batch.ranges] = batch.strips;
    }

    template <class Add> void add_range(const Team &team, std::int64_t b, std::int64_t index, const Add &add) {
        const Batch &batch = batches_[b];
        if (!team.wait_until([&] { return left_[b].divided.load(std::memory_order_acquire); })) return;
        const std::int64_t *const edges = &edges_[batch.first_edge + index];
        const KeyRange range = {edges[0], edges[1]};
        std::atomic<std::int64_t> *const progress = &progress_[batch.first_strip];
        for (std::int64_t strip = range.first; strip < range.end; ++strip) {
            const auto added = [&] { return progress[strip].load(std::memory_order_acquire) == batch.number; };
            if (!team.wait_until(added)) return;
        }
        if (range.first < range.end) add(batch, range);
        for (std::int64_t strip = range.first; strip < range.end; ++strip) {
            progress[strip].store(batch.number + 1, std::memory_order_release);
        }
        left_[b].ranges.fetch_sub(1, std::memory_order_acq_rel);
    }

    const std::int64_t slots_, least_keys_;
    std::vector<Batch> batches_;
    std::vector<Segment> segments_;
    std::vector<std::int64_t> edges_;  // per batch: first strip of each range, and the end
    std::int64_t tasks_ = 0;
    std::atomic<std::int64_t> taken_ = 0;
    std::unique_ptr<Left[]> left_;
    std::unique_ptr<std::atomic<std::int64_t>[]> progress_;  // per strip of all units: number of batches added
};

}  // namespace fusion
