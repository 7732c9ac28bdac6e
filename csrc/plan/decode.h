// A decode on given lengths: which rows meet which keys when, and the memory for it.
//
// Compiled for the baseline instruction set. Keys are cut at multiples of decode_chunk(), whatever the number of
// threads, sequences or pages, and partial results are merged in order: which thread computes a unit never changes a
// bit.

#pragma once

#include "data/variant.h"

#include <atomic>
#include <vector>

namespace fusion {

struct Team;

class DecodePlan {
public:
    // Throws std::invalid_argument where sizes do not fit together. Sequences without rows are not touched.
    DecodePlan(const Variant &variant, const DecodeProblem &problem, std::vector<Sequence> sequences);

    // Other lengths and bands for the same sequences.
    void update(const std::int64_t *kv_len, const std::int64_t *lo, const std::int64_t *hi);

    std::size_t workspace_bytes(int threads) const;

    // Computes out and statistics; returns the number of empty rows. Throws std::bad_alloc before anything is written.
    std::int64_t run(const DecodeOperands &operands, int threads) const;

    const DecodeProblem &problem() const { return problem_; }
    std::size_t sequences() const { return sequences_.size(); }
    const char *variant() const { return variant_.name; }

private:
    void cut_units();
    void cut_rows(std::int64_t b, std::int64_t row0, std::int64_t row1);
    int team(int threads) const;
    DecodeUnit take(std::atomic<std::size_t> &taken, int members) const;
    std::int64_t attend_units(const DecodeJob &job, const Team &team, char *own, float *partials,
                              std::atomic<std::size_t> &taken, int members) const;

    const Variant &variant_;
    DecodeProblem problem_;
    std::vector<Sequence> sequences_;
    std::vector<DecodeUnit> units_;
    std::vector<DecodeRows> merges_;
    std::size_t row_floats_ = 0, scratch_bytes_ = 0, partial_floats_ = 0;
    std::int64_t pairs_ = 0;  // of rows and keys: how much work it is
};

}  // namespace fusion
