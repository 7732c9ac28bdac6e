// Who does what when where items note what they add to sums of keys. Items of a unit come in batches: when all of a
// batch have left their notes, these are added to the sums, one range of keys at a time and item after item, so that a
// sum is formed in the order of items whoever forms it.
//
// Tasks stand in one list and threads take them in its order. A batch's ranges come `lag` items behind its last item,
// which is computed by then, and a range of the batch before a whole batch earlier, so threads hardly ever wait. They
// wait for earlier tasks alone: the first unfinished one never does.

#pragma once

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
        std::int64_t items;  // of a batch, at most
        std::int64_t lag;
        std::int64_t slots;  // items whose notes have room: at least items + lag, and more let threads run ahead
    };
    struct Unit {
        std::int64_t items, ranges;
    };
    struct Batch {
        std::size_t unit;
        std::int64_t first, end;              // items
        std::int64_t number;                  // of the unit's batches
        std::int64_t ranges, first_progress;  // first_progress: of the unit's ranges
    };

    Batches(const std::vector<Unit> &units, const Pace &pace) : slots_(pace.slots) {
        std::int64_t items = 0, ranges = 0;
        for (std::size_t u = 0; u < units.size(); ++u) {
            const std::int64_t end = items + units[u].items;
            for (std::int64_t number = 0; items < end; ++number) {
                const std::int64_t stop = std::min(items + pace.items, end);
                batches_.push_back({u, items, stop, number, units[u].ranges, ranges});
                items = stop;
            }
            ranges += units[u].ranges;
        }
        list_tasks(items, pace.lag);
        left_ = std::make_unique<Left[]>(batches_.size());
        for (std::size_t b = 0; b < batches_.size(); ++b) {
            left_[b].items = batches_[b].end - batches_[b].first;
            left_[b].ranges = batches_[b].ranges;
        }
        progress_ = std::make_unique<std::atomic<std::int64_t>[]>(static_cast<std::size_t>(ranges));
    }

    // One thread's part: note(item, slot) leaves an item's notes in a slot; add(batch, range) adds a batch's.
    template <class Note, class Add> void work(const Note &note, const Add &add) {
        for (std::int64_t task; (task = taken_.fetch_add(1)) < tasks_;) {
            const auto after = [](std::int64_t t, const Segment &segment) { return t < segment.task; };
            const Segment &found = *(std::upper_bound(segments_.begin(), segments_.end(), task, after) - 1);
            const std::int64_t index = task - found.task;
            if (found.adds) add_range(found.first, index, add);
            else note_item(found.first + index, note);
        }
    }

private:
    struct Segment {  // of the list: items from `first` on, or the ranges of batch `first`
        std::int64_t task, first;
        bool adds;
    };
    struct Left {  // of a batch, to be done
        std::atomic<std::int64_t> items, ranges;
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

    std::size_t batch_of(std::int64_t item) const {
        const auto after = [](std::int64_t i, const Batch &batch) { return i < batch.first; };
        return static_cast<std::size_t>(std::upper_bound(batches_.begin(), batches_.end(), item, after) -
                                        batches_.begin() - 1);
    }

    template <class Note> void note_item(std::int64_t item, const Note &note) {
        if (item >= slots_) {  // the slot's last notes have been added
            const std::atomic<std::int64_t> &ranges = left_[batch_of(item - slots_)].ranges;
            wait_until([&] { return ranges.load(std::memory_order_acquire) == 0; });
        }
        note(item, item % slots_);
        left_[batch_of(item)].items.fetch_sub(1, std::memory_order_acq_rel);
    }

    template <class Add> void add_range(std::int64_t b, std::int64_t range, const Add &add) {
        const Batch &batch = batches_[b];
        std::atomic<std::int64_t> &before = progress_[batch.first_progress + range];
        wait_until([&] { return left_[b].items.load(std::memory_order_acquire) == 0; });
        wait_until([&] { return before.load(std::memory_order_acquire) == batch.number; });
        add(batch, range);
        before.store(batch.number + 1, std::memory_order_release);
        left_[b].ranges.fetch_sub(1, std::memory_order_acq_rel);
    }

    const std::int64_t slots_;
    std::vector<Batch> batches_;
    std::vector<Segment> segments_;
    std::int64_t tasks_ = 0;
    std::atomic<std::int64_t> taken_ = 0;
    std::unique_ptr<Left[]> left_;
    std::unique_ptr<std::atomic<std::int64_t>[]> progress_;  // [range of all units], batches that are added
};

}  // namespace fusion
