// Who computes what next in a loss over lists. Rows come in batches: when a batch's rows are computed, what they add to
// sums of keys is added, one range of keys at a time and row after row, so that a sum is formed in the order of rows
// whoever forms it. Meanwhile others begin the rows of the next batch, as far as there is memory for notes.

#pragma once

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace fusion {

class Batches {
public:
    enum class Kind { row, keys, wait, end };
    struct Task {
        Kind kind;
        std::int64_t batch, index;  // a row of all, or a range of the batch's keys
    };

    // ranges: of each batch, at least one; noted: rows whose notes have room, more than a batch has.
    Batches(std::int64_t rows, std::int64_t batch_rows, std::int64_t noted, std::vector<std::int64_t> ranges)
        : rows_(rows), batch_rows_(batch_rows), noted_(noted), ranges_(std::move(ranges)),
          unfinished_(ranges_.size(), batch_rows) {
        if (rows % batch_rows) unfinished_.back() = rows % batch_rows;
    }

    Task next() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (batch_ == size()) return {Kind::end, 0, 0};
        if (!unfinished_[batch_] && range_ < ranges_[batch_]) return {Kind::keys, batch_, range_++};
        if (row_ < rows_ && row_ < batch_ * batch_rows_ + noted_) {
            const std::int64_t row = row_++;
            return {Kind::row, row / batch_rows_, row};
        }
        return {Kind::wait, 0, 0};
    }

    void done(const Task &task) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (task.kind == Kind::row) --unfinished_[task.batch];
        if (task.kind != Kind::keys || ++added_ < ranges_[batch_]) return;
        ++batch_;
        range_ = added_ = 0;
    }

private:
    std::int64_t size() const { return static_cast<std::int64_t>(ranges_.size()); }

    std::mutex mutex_;
    const std::int64_t rows_, batch_rows_, noted_;
    const std::vector<std::int64_t> ranges_;
    std::vector<std::int64_t> unfinished_;  // rows of each batch
    std::int64_t row_ = 0;                  // the next one
    std::int64_t batch_ = 0;                // whose keys are next, from range_ on; added_ of its ranges are done
    std::int64_t range_ = 0, added_ = 0;
};

}  // namespace fusion
