#include "plan/decode.h"

#include "plan/arena.h"
#include "plan/schedule.h"
#include "plan/team.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace fusion {
namespace {

// Multiply-adds per thread from which one more thread pays off, at the rate at which memory is read.
constexpr double work_per_thread = 1 << 16;
// Items of work per thread from which the length of the last one does not matter.
constexpr std::int64_t fair_share = 32;
constexpr std::int64_t run_leaves = decode_run / decode_leaf;

constexpr Require require{"decode"};

using Counter = std::atomic<std::int32_t>;

}  // namespace

struct DecodePlan::State {
    DecodeJob job;
    int members;
    float *partials = nullptr;  // partial results of runs, if a block has several
    float *split = nullptr;     // partial results of leaves of shared runs, from leaf `split_from` on
    std::int64_t split_from = 0, leaf_floats = 0;
    Counter *left_of_run = nullptr, *left_of_rows = nullptr;  // unfinished: [run][head] leaves, [block][head] runs
    std::atomic<std::int64_t> taken = 0, empty = 0;
};

DecodePlan::DecodePlan(const Variant &variant, const DecodeProblem &problem, std::vector<Sequence> sequences)
    : variant_(variant), problem_(problem), sequences_(std::move(sequences)) {
    const DecodeProblem &p = problem_;
    require.problem(p, sequences_);
    require(p.dropout == Dropout::none, "dropout is none of its features");
    require(!p.has_blocked_tiles, "blocked tiles are none of its features");
    require(p.common_keys >= 0, "the number of common keys is negative");
    require(p.common_keys == 0 || p.dim_rope == 0, "common keys have no ropes");
    attend_ = variant_.decode.attend_of(format_of(p));
    row_floats_ = variant_.decode.partial_floats(problem_);
    // Per thread: scratch of kernels, the merged result of its leaves, and the result of the current leaf.
    scratch_bytes_ = variant_.decode.scratch_bytes(problem_) + 2 * row_floats_ * decode_slots * sizeof(float);
    cut_runs();
}

void DecodePlan::update(const std::int64_t *kv_len, const std::int64_t *lo, const std::int64_t *hi) {
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        sequences_[b].kv_len = kv_len[b];
        sequences_[b].lo = lo[b];
        sequences_[b].hi = hi[b];
    }
    cut_runs();
}

void DecodePlan::cut_runs() {
    const std::int64_t group = group_of(problem_);
    blocks_.clear();
    runs_.clear();
    partial_floats_ = common_blocks_ = 0;
    leaves_ = most_rows_ = pairs_ = 0;
    for (const Sequence &seq : sequences_) require.lengths(seq);
    if (problem_.common_keys) cut_common();
    std::int64_t before = 0;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        const std::int64_t rows = sequences_[b].q_len * group;
        for (std::int64_t row = 0; row < rows; row += decode_rows) {
            cut_rows(static_cast<std::int64_t>(b), row, std::min(row + decode_rows, rows), before + row);
        }
        before += rows;
    }
}

// Adds blocks of rows of all sequences with the common keys, rounded to tiles; the keys of a tile that are hidden from
// a row do not change its result.
void DecodePlan::cut_common() {
    tokens_.clear();
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        for (std::int64_t t = 0; t < sequences_[b].q_len; ++t) tokens_.push_back({static_cast<std::int64_t>(b), t});
    }
    const std::int64_t group = group_of(problem_), keys = problem_.common_keys;
    const std::int64_t rows = static_cast<std::int64_t>(tokens_.size()) * group;
    for (std::int64_t row = 0; row < rows; row += decode_rows) {
        const std::int64_t stop = std::min(row + decode_rows, rows);
        std::int64_t begin = keys, end = 0;
        for (std::int64_t t = row / group; t <= (stop - 1) / group; ++t) {
            const Sequence &seq = sequences_[tokens_[t].seq];
            const std::int64_t first = std::max<std::int64_t>(tokens_[t].token + seq.lo, 0);
            const std::int64_t last = std::min({std::max(tokens_[t].token + seq.hi, seq.prefix), seq.kv_len, keys});
            if (first >= last) continue;
            begin = std::min(begin, first / decode_tile * decode_tile);
            end = std::max(end, std::min(round_up(last, decode_tile), keys));
        }
        add_block({-1, row, stop, 0, 0, 0, 0, row}, std::min(begin, end), end, 0);
    }
    common_blocks_ = blocks_.size();
}

void DecodePlan::cut_rows(std::int64_t b, std::int64_t row0, std::int64_t row1, std::int64_t row) {
    const Sequence &seq = sequences_[b];
    const std::int64_t group = group_of(problem_), common = problem_.common_keys;
    const std::int64_t first = row0 / group, last = (row1 - 1) / group, keys = std::max(seq.kv_len, common);
    const bool sees = seq.hi > seq.lo || seq.prefix > 0;
    const std::int64_t begin = std::clamp<std::int64_t>(first + seq.lo, common, keys);
    const std::int64_t end = sees ? std::clamp(std::max(last + seq.hi, seq.prefix), begin, keys) : begin;
    add_block({b, row0, row1, 0, 0, 0, 0, row}, begin, end, common);
}

// Divides the keys [begin, end) of a block into runs, whose leaves are counted from key cache_first on.
void DecodePlan::add_block(Block block, std::int64_t begin, std::int64_t end, std::int64_t cache_first) {
    const std::int64_t heads = problem_.heads_kv, from = begin - cache_first, to = end - cache_first;
    const std::int64_t run0 = from / decode_run, count = std::max<std::int64_t>(ceil_div(to, decode_run) - run0, 1);
    refuse_endless(count * heads);
    pairs_ += (to - from) * (block.row1 - block.row0) * heads;
    most_rows_ = std::max(most_rows_, block.row1 - block.row0);
    for (std::int64_t c = 0; c < count; ++c) {
        const std::int64_t first = std::max(from, (run0 + c) * decode_run);
        const std::int64_t last = std::min(to, (run0 + c + 1) * decode_run);
        const std::int64_t leaves = std::max<std::int64_t>(ceil_div(last, decode_leaf) - first / decode_leaf, 1);
        runs_.push_back({blocks_.size(), c, cache_first + first, cache_first + last, leaves, leaves_});
        leaves_ += leaves * heads;
    }
    block.runs = block.results = block.parts = count;
    if (problem_.common_keys && block.seq >= 0) {
        block.results += 1;
        block.parts += (block.row + block.row1 - block.row0 - 1) / decode_rows - block.row / decode_rows + 1;
    }
    block.place = static_cast<std::int64_t>(partial_floats_);
    blocks_.push_back(block);
    if (block.results > 1) partial_floats_ += static_cast<std::size_t>(block.results * heads * floats_of(block));
}

// Floats of the partial result of a head of a block.
std::int64_t DecodePlan::floats_of(const Block &block) const {
    return static_cast<std::int64_t>(row_floats_) * (block.row1 - block.row0);
}

int DecodePlan::team(int threads) const {
    return team_size(team_by_work(threads, all_work(), work_per_thread), leaves_);
}

// The number of last leaves whose runs several threads may share.
std::int64_t DecodePlan::split_leaves(int team) const {
    return team == 1 ? 0 : std::min<std::int64_t>(leaves_, (2 * team + 1) * run_leaves);
}

std::size_t DecodePlan::workspace_bytes(int threads) const {
    if (runs_.empty()) return 0;
    const int members = team(threads);
    const auto leaf_floats = static_cast<std::size_t>(most_rows_) * row_floats_;
    const std::size_t split = static_cast<std::size_t>(split_leaves(members)) * leaf_floats;
    const std::size_t counters = (runs_.size() + blocks_.size()) * static_cast<std::size_t>(problem_.heads_kv);
    return scratch_bytes_ * static_cast<std::size_t>(members) +
           round_up((partial_floats_ + split) * sizeof(float) + counters * sizeof(Counter), cache_line);
}

// Takes the next work: all leaves of some heads, which are adjacent in a page, or some leaves of one head when little
// is left, so that the last tasks are short.
DecodePlan::Task DecodePlan::take(State &state) const {
    const auto behind = [](std::int64_t leaf, const Run &run) { return leaf < run.first; };
    std::int64_t first = state.taken.load(std::memory_order_relaxed), count;
    Task task;
    do {
        if (first >= leaves_) return {nullptr, 0, 0, 0, 0};
        const Run &run = *(std::upper_bound(runs_.begin(), runs_.end(), first, behind) - 1);
        const Block &block = blocks_[run.block];
        const std::int64_t head = (first - run.first) / run.leaves, leaf = (first - run.first) % run.leaves;
        const std::int64_t least = leaves_ / (fair_share * state.members);
        const std::int64_t quota =
            state.members == 1 ? leaves_ : std::max(ceil_div(leaves_ - first, 2 * state.members), least);
        if (leaf == 0 && quota >= run.leaves) {
            const std::int64_t fit = decode_slots / slots_of(block.row1 - block.row0);
            task = {&run, head, std::min({quota / run.leaves, problem_.heads_kv - head, fit}), 0, run.leaves};
        } else {  // every thread takes the same number
            const auto even = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(quota)));
            task = {&run, head, 1, leaf, std::min(leaf + even, run.leaves)};
        }
        count = task.heads * (task.end - task.leaf);
    } while (!state.taken.compare_exchange_weak(first, first + count, std::memory_order_relaxed));
    return task;
}

DecodeUnit DecodePlan::unit_of(const Task &task, std::int64_t leaf) const {
    const Run &run = *task.run;
    const Block &block = blocks_[run.block];
    const std::int64_t offset = block.seq < 0 ? 0 : problem_.common_keys;
    const std::int64_t first = offset + ((run.begin - offset) / decode_leaf + leaf) * decode_leaf;
    const std::int64_t begin = std::max(run.begin, first), end = std::min(run.end, first + decode_leaf);
    const std::int64_t seq = std::max<std::int64_t>(block.seq, 0);
    DecodeUnit unit = {seq, task.head, task.heads, block.row0, block.row1, begin, end, false};
    unit.tokens = block.seq < 0 ? tokens_.data() : nullptr;
    unit.cache_first = offset;
    return unit;
}

// Called by every thread of a team: takes and computes work until none is left.
void DecodePlan::work(State &state, const Team &team, char *memory) const {
    for (Task task = take(state), next; task.heads && !team.cancelled(); task = next) {
        next = {};
        if (task.end - task.leaf == task.run->leaves) attend_run(state, task, next, memory);
        else attend_leaves(state, task, next, memory);
        if (!next.heads) next = take(state);
    }
}

// Computes a leaf. Before the last leaf of a task, takes the next task for prefetches if enough are left for the other
// threads.
bool DecodePlan::attend_leaf(State &state, const Task &task, std::int64_t leaf, bool placed, Task &next, char *memory,
                             float *output) const {
    DecodeUnit unit = unit_of(task, leaf), then;
    unit.placed = placed;
    const bool last = leaf + 1 == task.end;
    const bool plenty = state.taken.load(std::memory_order_relaxed) + 2 * state.members <= leaves_;
    if (last && plenty) next = take(state);
    if (!last) then = unit_of(task, leaf + 1);
    else if (next.heads) then = unit_of(next, next.leaf);
    char *const scratch = memory + 2 * row_floats_ * decode_slots * sizeof(float);
    return attend(state.job, unit, !last || next.heads ? &then : nullptr, scratch, output);
}

// Computes a unit, and those of its rows again that are not finite. Returns true if the prepared rows are still valid
// in scratch.
bool DecodePlan::attend(const DecodeJob &job, const DecodeUnit &unit, const DecodeUnit *then, void *scratch,
                        float *output) const {
    const DecodeNonfinite nonfinite = attend_(job, unit, then, scratch, output, false);
    const std::int64_t rows = unit.row1 - unit.row0, step = unit.tokens ? 1 : rows;  // other sequences' rows are valid
    bool finite = true;
    for (std::int64_t head = 0; head < unit.heads; ++head) {
        if (!nonfinite.rows[head]) continue;
        finite = false;
        DecodeUnit one = unit;
        one.head += head, one.heads = 1, one.placed = false;
        for (std::int64_t row = 0; row < rows; row += step) {
            if (unit.tokens && !(nonfinite.rows[head] >> row & 1)) continue;
            one.row0 = unit.row0 + row, one.row1 = one.row0 + step;
            float *const to = output + (head * rows + row) * static_cast<std::int64_t>(row_floats_);
            variant_.decode.attend_of(DecodeFormat::floats)(job, one, nullptr, scratch, to, true);
        }
    }
    return finite;
}

// Computes all leaves of some heads; their partial results stay in the cache of this thread.
void DecodePlan::attend_run(State &state, const Task &task, Task &next, char *memory) const {
    auto *const sum = reinterpret_cast<float *>(memory);
    const auto apart = static_cast<std::int64_t>(row_floats_) * decode_slots;
    const Block &block = blocks_[task.run->block];
    const std::int64_t rows = task.heads * (block.row1 - block.row0);
    bool placed = false;
    for (std::int64_t leaf = 0; leaf < task.end; ++leaf) {
        placed = attend_leaf(state, task, leaf, placed, next, memory, leaf ? sum + apart : sum);
        if (leaf) variant_.decode.merge(state.job, {block.seq, task.head, 0, rows, 0, apart, 2}, sum);
    }
    for (std::int64_t i = 0; i < task.heads; ++i) {
        deliver(state, *task.run, task.head + i, sum + i * floats_of(block));
    }
}

// Computes some leaves of a head, of which other threads compute the others.
void DecodePlan::attend_leaves(State &state, const Task &task, Task &next, char *memory) const {
    auto *const output = reinterpret_cast<float *>(memory);
    const Run &run = *task.run;
    const Block &block = blocks_[run.block];
    float *const leaves = state.split + (run.first + task.head * run.leaves - state.split_from) * state.leaf_floats;
    bool placed = false;
    for (std::int64_t leaf = task.leaf; leaf < task.end; ++leaf) {
        placed = attend_leaf(state, task, leaf, placed, next, memory, output);
        // Computed in this thread's cache and then copied, because another thread may have written the target last.
        std::memcpy(leaves + leaf * state.leaf_floats, output,
                    static_cast<std::size_t>(floats_of(block)) * sizeof(float));
    }
    Counter &left = state.left_of_run[(&run - runs_.data()) * problem_.heads_kv + task.head];
    const auto done = static_cast<std::int32_t>(task.end - task.leaf);
    if (left.fetch_sub(done, std::memory_order_acq_rel) != done) return;
    for (std::int64_t leaf = 1; leaf < run.leaves; ++leaf) {
        const DecodeRows rows = {block.seq, task.head, block.row0, block.row1, 0, leaf * state.leaf_floats, 2};
        variant_.decode.merge(state.job, rows, leaves);
    }
    deliver(state, run, task.head, leaves);
}

// Stores the result of a finished run of a head; the last run of a block calls finish().
void DecodePlan::deliver(State &state, const Run &run, std::int64_t head, float *output) const {
    const Block &block = blocks_[run.block];
    const std::int64_t floats = floats_of(block), apart = problem_.heads_kv * floats;
    if (block.results > 1) {
        float *const partials = state.partials + block.place + head * floats;
        const std::int64_t result = run.index + block.results - block.runs;
        std::memcpy(partials + result * apart, output, static_cast<std::size_t>(floats) * sizeof(float));
        if (!is_last(state, block, head)) return;
        output = partials;
    }
    finish(state, block, head, output);
}

bool DecodePlan::is_last(State &state, const Block &block, std::int64_t head) const {
    Counter &left = state.left_of_rows[(&block - blocks_.data()) * problem_.heads_kv + head];
    return left.fetch_sub(1, std::memory_order_acq_rel) == 1;
}

// Merges the partial results of a block and head; writes out and statistics, or passes results of common keys on.
void DecodePlan::finish(State &state, const Block &block, std::int64_t head, float *results) const {
    const std::int64_t apart = problem_.heads_kv * floats_of(block);
    const DecodeRows rows = {block.seq, head, block.row0, block.row1, 0, apart, block.results};
    if (block.seq < 0) {
        if (rows.count > 1) variant_.decode.merge(state.job, rows, results);
        distribute(state, block, head, results);
    } else {
        state.empty += variant_.decode.finish(state.job, rows, results);
    }
}

// Copies the partial results of common keys to the blocks of each sequence.
void DecodePlan::distribute(State &state, const Block &common, std::int64_t head, const float *output) const {
    const auto behind = [](std::int64_t row, const Block &block) { return row < block.row; };
    const auto stride = static_cast<std::int64_t>(row_floats_);
    auto block = std::upper_bound(blocks_.begin() + common_blocks_, blocks_.end(), common.row0, behind) - 1;
    for (; block != blocks_.end() && block->row < common.row1; ++block) {
        const std::int64_t from = std::max(common.row0, block->row);
        const std::int64_t to = std::min(common.row1, block->row + block->row1 - block->row0);
        float *const results = state.partials + block->place + head * floats_of(*block);
        std::memcpy(results + (from - block->row) * stride, output + (from - common.row0) * stride,
                    static_cast<std::size_t>((to - from) * stride) * sizeof(float));
        if (is_last(state, *block, head)) finish(state, *block, head, results);
    }
}

std::int64_t DecodePlan::run(const DecodeOperands &operands, int threads) const {
    if (runs_.empty()) return 0;
    const Lease memory = lease_for(threads, [&](int n) { return workspace_bytes(n); });
    const int members = team(threads);
    char *const scratch = memory.data();
    auto *const partials = reinterpret_cast<float *>(scratch + scratch_bytes_ * static_cast<std::size_t>(members));
    State state{.job = {&problem_, &operands, sequences_.data()}, .members = members, .partials = partials};
    const std::int64_t split = split_leaves(members);
    state.split = partials + partial_floats_;
    state.split_from = leaves_ - split;
    state.leaf_floats = most_rows_ * static_cast<std::int64_t>(row_floats_);
    state.left_of_run = reinterpret_cast<Counter *>(state.split + split * state.leaf_floats);
    Counter *counter = state.left_of_run;
    const auto begin = [&](std::int64_t left) {  // the counters of all heads
        for (std::int64_t h = 0; h < problem_.heads_kv; ++h) new (counter++) Counter(static_cast<std::int32_t>(left));
    };
    for (const Run &run : runs_) begin(run.leaves);
    state.left_of_rows = counter;
    for (const Block &block : blocks_) begin(block.parts);
    run_team(members, time_alone(all_work(), work_per_thread),
             [&](const Team &team) { work(state, team, scratch + scratch_bytes_ * team.thread); });
    return state.empty;
}

}  // namespace fusion
