// A decode on given lengths: which rows meet which keys when, and the memory for it.
//
// Keys are cut into leaves, neighbouring leaves into runs, whatever the number of threads, sequences or pages: which
// thread computes a leaf never changes a bit. A thread takes whole runs while there are many, since what it has
// prepared for a run's rows serves all its leaves, and fewer leaves when little is left. The last thread of a run
// merges it, the last one of some rows finishes them: no thread waits. Compiled for the baseline
// instruction set.
//
// Keys that all sequences have in common are met by rows of all of them together, in blocks of their own, whose partial
// results join those of each sequence's own keys. Leaves of own keys are counted from the first of these, so that a
// row's bits depend on neither.

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
    // Rows of a sequence that meet the same keys together; of all sequences (seq < 0), where those are common ones.
    struct Block {
        std::int64_t seq, row0, row1;
        std::int64_t place;          // of partial results: [result][head][row], in floats
        std::int64_t runs, results;  // how many of either; the first result of own keys' rows is that of common keys
        std::int64_t parts;          // how many runs, and blocks of common keys, bring some of its results
        std::int64_t row;            // of its first row, counted over all sequences
    };
    struct Run {  // keys [begin, end) of a block, of all heads
        std::size_t block;
        std::int64_t index, begin, end, leaves;  // index: in its block
        std::int64_t first;                      // leaf of all: [head][leaf]
    };
    struct Piece {                            // of a run, what a thread computes in a row: all leaves of some heads,
        const Run *run;                       // or some leaves of one
        std::int64_t head, heads, leaf, end;  // heads 0: nothing is left
    };
    struct State;  // of a run

    void cut_runs();
    void cut_common();
    void cut_rows(std::int64_t b, std::int64_t row0, std::int64_t row1, std::int64_t row);
    void add_block(Block block, std::int64_t begin, std::int64_t end, std::int64_t first_own);
    double all_work() const;  // of a run
    int team(int threads) const;
    std::int64_t split_leaves(int team) const;
    std::int64_t floats_of(const Block &block) const;
    Piece take(State &state) const;
    DecodeUnit unit_of(const Piece &piece, std::int64_t leaf) const;
    void work(State &state, const Team &team, char *own) const;
    bool attend_leaf(State &state, const Piece &piece, std::int64_t leaf, bool placed, Piece &next, char *own,
                     float *found) const;
    void attend_run(State &state, const Piece &piece, Piece &next, char *own) const;
    void attend_leaves(State &state, const Piece &piece, Piece &next, char *own) const;
    void deliver(State &state, const Run &run, std::int64_t head, float *found) const;
    void distribute(State &state, const Block &common, std::int64_t head, const float *found) const;
    bool is_last(State &state, const Block &block, std::int64_t head) const;
    void finish(State &state, const Block &block, std::int64_t head, float *results) const;

    const Variant &variant_;
    DecodeProblem problem_;
    std::vector<Sequence> sequences_;
    std::vector<DecodeToken> tokens_;  // of all sequences, where they have keys in common
    std::vector<Block> blocks_;        // those of common keys first
    std::size_t common_blocks_ = 0;
    std::vector<Run> runs_;
    std::size_t row_floats_ = 0, scratch_bytes_ = 0, partial_floats_ = 0;
    std::int64_t leaves_ = 0, most_rows_ = 0;
    std::int64_t pairs_ = 0;  // of rows and keys: how much work it is
};

}  // namespace fusion
