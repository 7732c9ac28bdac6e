// The plan of a decode with given lengths: work list of threads, order of merges, and scratch memory.
//
// Keys are divided into leaves, and consecutive leaves into runs, independently of the number of threads, sequences or
// pages, so that results do not depend on the thread that computes a leaf. A thread takes complete runs while there are
// many, because prepared rows serve all leaves of a run, and fewer leaves when little is left. The last thread of a run
// merges it, and the last thread of a block of rows finishes it, so no thread waits. Compiled for the baseline
// instruction set.
//
// A prefix of keys that all sequences share is processed with rows of all sequences together, in separate blocks, whose
// partial results are merged with those of each sequence. Leaves of the remaining keys are counted from the end of the
// prefix, so that a row's result does not depend on the other sequences.

#pragma once

#include "data/variant.h"
#include "plan/schedule.h"

#include <atomic>
#include <vector>

namespace fusion {

struct Team;

class DecodePlan {
public:
    // Throws std::invalid_argument if sizes do not fit together. Sequences without rows are ignored.
    DecodePlan(const Variant &variant, const DecodeProblem &problem, std::vector<Sequence> sequences);

    // Changes lengths and bands of the same sequences.
    void update(const std::int64_t *kv_len, const std::int64_t *lo, const std::int64_t *hi);

    std::size_t workspace_bytes(int threads) const;

    // Computes out and statistics; returns the number of empty rows. Throws std::bad_alloc before anything is written.
    std::int64_t run(const DecodeOperands &operands, int threads) const;

    const DecodeProblem &problem() const { return problem_; }
    std::size_t sequences() const { return sequences_.size(); }
    const char *variant() const { return variant_.name; }

private:
    // Rows of a sequence that are processed with the same keys; for common keys, rows of all sequences (seq < 0).
    struct Block {
        std::int64_t seq, row0, row1;
        std::int64_t place;          // offset in floats of its partial results, [result][head][row]
        std::int64_t runs, results;  // numbers of runs and of partial results; result 0 is that of common keys, if any
        std::int64_t parts;          // number of runs and of blocks of common keys that contribute results
        std::int64_t row;            // first row, counted over all sequences
    };
    struct Run {  // keys [begin, end) of a block, of all heads
        std::size_t block;
        std::int64_t index, begin, end, leaves;  // index: in its block
        std::int64_t first;                      // first leaf, counted over all runs: [head][leaf]
    };
    struct Task {  // work that a thread takes from a run: all leaves of some heads, or some leaves of one head
        const Run *run;
        std::int64_t head, heads, leaf, end;  // heads 0: nothing is left
    };
    struct State;  // of a run

    void cut_runs();
    void cut_common();
    void cut_rows(std::int64_t b, std::int64_t row0, std::int64_t row1, std::int64_t row);
    void add_block(Block block, std::int64_t begin, std::int64_t end, std::int64_t cache_first);
    double all_work() const { return static_cast<double>(pairs_) * pair_work(problem_); }  // of a run
    int team(int threads) const;
    std::int64_t split_leaves(int team) const;
    std::int64_t floats_of(const Block &block) const;
    Task take(State &state) const;
    DecodeUnit unit_of(const Task &task, std::int64_t leaf) const;
    void work(State &state, const Team &team, char *memory) const;
    bool attend(const DecodeJob &job, const DecodeUnit &unit, const DecodeUnit *then, void *scratch,
                float *output) const;
    bool attend_leaf(State &state, const Task &task, std::int64_t leaf, bool placed, Task &next, char *memory,
                     float *output) const;
    void attend_run(State &state, const Task &task, Task &next, char *memory) const;
    void attend_leaves(State &state, const Task &task, Task &next, char *memory) const;
    void deliver(State &state, const Run &run, std::int64_t head, float *output) const;
    void distribute(State &state, const Block &common, std::int64_t head, const float *output) const;
    bool is_last(State &state, const Block &block, std::int64_t head) const;
    void finish(State &state, const Block &block, std::int64_t head, float *results) const;

    const Variant &variant_;
    DecodeKernels::Attend *attend_ = nullptr;
    DecodeProblem problem_;
    std::vector<Sequence> sequences_;
    std::vector<DecodeToken> tokens_;  // of all sequences, if they share keys
    std::vector<Block> blocks_;        // blocks of common keys first
    std::size_t common_blocks_ = 0;
    std::vector<Run> runs_;
    std::size_t row_floats_ = 0, scratch_bytes_ = 0, partial_floats_ = 0;
    std::int64_t leaves_ = 0, most_rows_ = 0;
    std::int64_t pairs_ = 0;  // number of (row, key) pairs
};

}  // namespace fusion
