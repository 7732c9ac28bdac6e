#include "plan/sparse.h"

#include "plan/arena.h"
#include "plan/schedule.h"
#include "plan/team.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <new>
#include <utility>

namespace fusion {
namespace {

// Most bytes of sums of key gradients in memory at a time, unless one sequence takes more.
constexpr std::size_t wave_bytes = std::size_t{256} << 20;
constexpr std::int64_t keys_per_item = 64;
// Items of a batch, unless the team is larger; sums of a range are loaded into a cache once per batch.
constexpr std::int64_t least_batch = 32;
// Most bytes of contributions in memory, unless those of one item take more; a larger team has more items in progress.
constexpr std::size_t most_stored = std::size_t{64} << 20, most_stored_per_thread = std::size_t{8} << 20;
// Approximate number of keys of a range, so that their sums stay in a cache.
constexpr std::int64_t range_keys = 1024;
// Least average number of keys of a row in a range, so that reading the row's heads pays off.
constexpr std::int64_t least_keys = 16;
constexpr std::int64_t strip_keys = 32, most_strips = 4096;
constexpr std::int64_t never = std::numeric_limits<std::int64_t>::max();

constexpr Require require{"selection"};

std::size_t lines(std::size_t bytes) { return round_up(bytes, cache_line); }

// Ranges of a batch follow as many items later as there are threads, so that threads rarely wait.
Batches::Pace pace_of(int team, std::size_t bytes) {
    const std::int64_t members = team > 1 ? team : 0;  // one thread computes items in order and never runs ahead
    const std::size_t capacity = std::max(most_stored, most_stored_per_thread * static_cast<std::size_t>(team)) / bytes;
    const auto slots = std::max<std::int64_t>(static_cast<std::int64_t>(capacity), 1);
    const std::int64_t wanted = std::max<std::int64_t>(least_batch, team);
    const std::int64_t lag = std::min(members, slots / 3);
    const std::int64_t ahead = members ? std::min(std::max(members, wanted / 2), slots / 3) : 0;
    const std::int64_t items = std::min(wanted, slots - lag - ahead);
    return {items, lag, items + lag + ahead, least_keys};
}

std::int64_t keys_of(const Sequence &seq) { return seq.kv_len + seq.compressed_len; }

// Progress of an item of the backward: it no longer adds to keys below `next`, and never to keys above `last`.
struct Progress {
    std::atomic<std::int64_t> next, last;
};

}  // namespace

struct SparsePlan::State {
    SparseJob job;
    char *sums, *contributions;
    float *shares = nullptr;   // [item][most_heads_] contributions to dsink
    double *losses = nullptr;  // [item]
    Progress *progress = nullptr;
    std::atomic<std::int64_t> taken = 0,
                              finished = 0;  // numbers of items begun, and of the first that may be unfinished

    struct View {  // the state of the queue for one thread
        State *state;
        const Team *team;
        std::int64_t first_item;
    };

    // Waits until earlier items of the unit no longer add to keys [first, last].
    static bool wait(void *self, std::int64_t item, std::int64_t first, std::int64_t last) {
        const View &view = *static_cast<View *>(self);
        std::atomic<std::int64_t> &finished = view.state->finished;
        const Progress *const progress = view.state->progress;
        std::int64_t from = finished.load(std::memory_order_acquire);
        while (from < item && progress[from].next.load(std::memory_order_acquire) == never) ++from;
        std::int64_t reached = finished.load(std::memory_order_relaxed);
        while (reached < from && !finished.compare_exchange_weak(reached, from, std::memory_order_acq_rel)) {
        }
        for (std::int64_t other = std::max(from, view.first_item); other < item; ++other) {
            const Progress &its = progress[other];
            const auto passed = [&] {
                return its.next.load(std::memory_order_acquire) > last ||
                       its.last.load(std::memory_order_relaxed) < first;
            };
            if (!view.team->wait_until(passed)) return false;
        }
        return !view.team->cancelled();
    }
    static void done(void *self, std::int64_t item, std::int64_t next, std::int64_t last) {
        Progress &progress = static_cast<View *>(self)->state->progress[item];
        progress.last.store(last, std::memory_order_relaxed);
        progress.next.store(next > last ? never : next, std::memory_order_release);
    }
};

SparsePlan::SparsePlan(const SparseVariant &variant, const SparseProblem &problem, std::vector<Sequence> sequences,
                       bool backward)
    : kernels_(variant.kernels(problem.dtype)), problem_(problem), sequences_(std::move(sequences)),
      backward_(backward) {
    require(problem_.select_count > 0 || problem_.compressed_ratio > 0, "nothing is selected");
    divide();
}

SparsePlan::SparsePlan(const SparseVariant &variant, const SparseProblem &problem, std::vector<Sequence> sequences,
                       const SparseProblem &attention)
    : kernels_(variant.kernels(problem.dtype)), problem_(problem), attention_(attention),
      sequences_(std::move(sequences)), backward_(true), tile_rows_(problem.select_count ? 1 : loss_tile_rows) {
    require(problem_.indexes && problem_.dtype == attention.dtype, "a loss is that of an indexer of the same dtype");
    if (!given_target()) {
        require.heads(attention);
        require.dims(attention.dim_qk > 0 && attention.dim_rope >= 0);
    }
    divide();
}

void SparsePlan::divide() {
    const SparseProblem &p = problem_;
    require.heads(p);
    require.dims(p.dim_qk > 0 && (p.dim_v > 0 || p.indexes) && p.dim_rope >= 0);
    require(p.select_count >= 0 && p.select_block > 0, "a size of the selection is negative");
    require(p.ratio > 0 && (p.ratio == 1 || p.indexes), "a ratio is one of an indexer's keys");
    require(!p.shares_kv || p.dim_v <= p.dim_qk, "shared values are longer than keys");
    require(!p.compressed_ratio || (p.compressed_ratio > 0 && !p.dim_rope && !p.indexes && !attention_),
            "two key sources have no rope tails, and no indexer");
    const std::int64_t group = p.heads_q / p.heads_kv;
    const auto columns = static_cast<std::size_t>(kernels_.sum_columns(p));
    std::size_t used = 0;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        const Sequence &seq = sequences_[b];
        require.lengths(seq);
        require(seq.kv_len < never >> 33 && p.select_block < never >> 33, "a sequence is longer than 2^30 keys");
        require(
            seq.compressed_len >= 0 && seq.compressed_len < never >> 33 && (p.compressed_ratio || !seq.compressed_len),
            "lengths of a second key source do not fit");
        first_row_.push_back(rows_);
        rows_ += seq.q_len;
        const std::int64_t keys = keys_of(seq);
        if (p.compressed_ratio) kv_len_.push_back(seq.kv_len);
        longest_ = std::max(longest_, keys);
        problem_.most_keys = std::max(problem_.most_keys, most_keys_of(seq));
        // With few rows, cores would be idle if they did not share the heads.
        const std::int64_t tile = seq.q_len * p.heads_kv < 8 && !p.indexes ? std::min<std::int64_t>(group, 32) : group;
        most_heads_ = std::max(most_heads_, tile);
        const std::size_t bytes = lines(static_cast<std::size_t>(keys) * columns * sizeof(float));
        for (std::int64_t head = 0; backward_ && head < p.heads_kv; ++head) {
            if (waves_.empty() || (used && used + bytes > wave_bytes)) {
                waves_.push_back({units_.size(), units_.size(), 0});
                used = 0;
            }
            Wave &wave = waves_.back();
            const std::int64_t items = ceil_div(seq.q_len, tile_rows_) * ceil_div(group, tile);
            units_.push_back({static_cast<std::int64_t>(b), head, wave.items, items, tile, used});
            wave.items += items;
            ++wave.end;
            used += bytes;
            sums_bytes_ = std::max(sums_bytes_, used);
            most_items_ = std::max(most_items_, wave.items);
        }
    }
    first_row_.push_back(rows_);
}

// The most keys that a row of a sequence reads.
std::int64_t SparsePlan::most_keys_of(const Sequence &seq) const {
    const SparseProblem &p = problem_;
    if (!p.compressed_ratio) {
        return std::min(p.select_count, ceil_div(seq.kv_len, p.select_block)) * p.select_block;
    }
    std::int64_t band = 0;
    for (std::int64_t row = 0; row < seq.q_len && band < seq.kv_len; ++row) {
        const std::int64_t first = std::max<std::int64_t>(row + seq.lo, 0);
        band = std::max(band, std::min(std::max(row + seq.hi, seq.prefix), seq.kv_len) - first);
    }
    const std::int64_t listed = std::min(p.select_count, ceil_div(seq.compressed_len, p.select_block));
    return band + (p.select_count ? listed * p.select_block : seq.compressed_len);
}

// The number of heads per item of the forward. It may depend on the number of threads, because results of a head do not
// depend on it.
std::int64_t SparsePlan::forward_tile(int threads) const {
    const std::int64_t group = problem_.heads_q / problem_.heads_kv, items = rows_ * problem_.heads_kv;
    if (items >= 8 * static_cast<std::int64_t>(threads) || items % threads == 0) return group;
    return std::min(group, std::max<std::int64_t>(8, ceil_div(ceil_div(group, threads), 4) * 4));
}

SparsePlan::Layout SparsePlan::layout(int threads) const {
    Layout at;
    if (!backward_) {
        const std::int64_t tile = forward_tile(threads), tiles = ceil_div(problem_.heads_q / problem_.heads_kv, tile);
        at.scratch = kernels_.scratch_bytes(problem_, tile);
        at.team = team_size(threads, rows_ * problem_.heads_kv * tiles);
        return at;
    }
    const auto items = static_cast<std::size_t>(most_items_);
    const auto heads = static_cast<std::size_t>(problem_.has_sink ? most_heads_ : 0);
    at.sums = sums_bytes_;
    at.shares = lines(items * (attention_ ? sizeof(double) : heads * sizeof(float)));
    at.scratch =
        attention_ ? kernels_.loss_bytes(*attention_, problem_) : kernels_.gradient_bytes(problem_, most_heads_);
    at.team = team_size(threads, std::max(most_items_, ceil_div(longest_, keys_per_item)));
    if (in_turns()) {
        at.progress = lines(items * sizeof(Progress));
        return at;
    }
    at.strip_keys = std::max(strip_keys, ceil_div(longest_, most_strips));
    const auto edges = static_cast<std::size_t>(ceil_div(longest_, at.strip_keys) + 1);
    at.starts = lines(edges * sizeof(std::int32_t));
    at.scratch = std::max(at.scratch, lines(edges * sizeof(std::int64_t)));  // scratch of Batches::work()
    at.contributions = at.starts + kernels_.contribution_bytes(problem_, most_heads_);
    at.pace = pace_of(at.team, at.contributions);
    at.pace.slots = std::min(at.pace.slots, std::max<std::int64_t>(most_items_, 1));
    return at;
}

std::size_t SparsePlan::workspace_bytes(int threads) const {
    const Layout at = layout(threads);
    return at.sums + at.shares + at.progress + at.contributions * static_cast<std::size_t>(at.pace.slots) +
           at.scratch * static_cast<std::size_t>(at.team);
}

SparseItem SparsePlan::item_at(const Unit &unit, std::int64_t index) const {
    const std::int64_t group = problem_.heads_q / problem_.heads_kv, tiles = ceil_div(group, unit.tile);
    const std::int64_t head = index % tiles * unit.tile;
    std::int64_t row = index / tiles;
    // Last tiles first, because they take longest with a causal band.
    if (tile_rows_ > 1) row = (ceil_div(sequences_[unit.seq].q_len, tile_rows_) - 1 - row) * tile_rows_;
    return {unit.seq, unit.head_kv, unit.head_kv * group + head, std::min(unit.tile, group - head), row};
}

const SparsePlan::Unit &SparsePlan::unit_of(const Wave &wave, std::int64_t item) const {
    const auto before = [](std::int64_t i, const Unit &unit) { return i < unit.first_item; };
    return *(std::upper_bound(units_.begin() + wave.first, units_.begin() + wave.end, item, before) - 1);
}

void SparsePlan::run(const SparseOperands &given, int threads) const {
    SparseOperands operands = given;
    if (problem_.compressed_ratio) operands.k.kv_len = operands.v.kv_len = kv_len_.data();
    const SparseJob job = {&problem_, &operands, sequences_.data()};
    if (backward_) return run_backward(job, threads, nullptr);
    const Lease memory = lease_for(threads, [&](int n) { return workspace_bytes(n); });
    const Layout at = layout(threads);
    attend(job, memory.data(), forward_tile(threads), at);
}

void SparsePlan::run(const SparseOperands &operands, const SparseOperands &attended, float *loss, int threads) const {
    run_backward({&problem_, &operands, sequences_.data(), attention_ ? &*attention_ : nullptr, &attended}, threads,
                 loss);
}

// Calls body(unit, its sums, first key, end) for all keys of a wave; called by every thread of a team.
template <class Body>
void SparsePlan::share_keys(const Team &team, const Wave &wave, const State &state, Body body) const {
    const auto units = static_cast<std::int64_t>(wave.end - wave.first);
    const std::int64_t blocks = ceil_div(longest_, keys_per_item);
    const auto compute = [&](std::int64_t i) {
        const Unit &unit = units_[wave.first + static_cast<std::size_t>(i / blocks)];
        const std::int64_t first = i % blocks * keys_per_item, keys = keys_of(sequences_[unit.seq]);
        const std::int64_t end = std::min(first + keys_per_item, keys);
        if (first < end) body(unit, reinterpret_cast<float *>(state.sums + unit.offset), first, end);
    };
    team.distribute(units * blocks, compute, 4);
}

void SparsePlan::run_backward(const SparseJob &job, int threads, float *loss) const {
    const Lease memory = lease_for(threads, [&](int n) { return workspace_bytes(n); });
    const Layout at = layout(threads);
    char *const sums = memory.data() + at.sums, *const progress = sums + at.shares;
    char *const contributions = progress + at.progress;
    char *const scratch = contributions + at.contributions * static_cast<std::size_t>(at.pace.slots);
    State state{.job = job, .sums = memory.data(), .contributions = contributions};
    state.shares = reinterpret_cast<float *>(sums);
    state.losses = reinterpret_cast<double *>(sums);
    state.progress = reinterpret_cast<Progress *>(progress);
    std::vector<double> dsink(problem_.has_sink ? problem_.heads_q : 0);
    std::deque<Batches> batches;  // per wave
    for (const Wave &wave : waves_) {
        if (!in_turns()) batches.emplace_back(work_of(wave, at), at.pace);
    }
    const std::int64_t columns = kernels_.sum_columns(problem_);
    double total = 0.0;
    for (const Wave &wave : waves_) {
        state.taken = state.finished = 0;
        for (std::int64_t i = 0; at.progress && i < wave.items; ++i) new (&state.progress[i]) Progress{{0}, {never}};
        run_team(at.team, never_alone, [&](const Team &team) {
            char *const thread_scratch = scratch + at.scratch * team.thread;
            share_keys(team, wave, state, [&](const Unit &, float *sums, std::int64_t first, std::int64_t end) {
                std::memset(sums + first * columns, 0,
                            static_cast<std::size_t>((end - first) * columns) * sizeof(float));
            });
            if (in_turns()) descend_tiles(team, wave, state, thread_scratch);
            else descend_lists(team, wave, state, batches[&wave - waves_.data()], at, thread_scratch);
            team.barrier();
            share_keys(team, wave, state, [&](const Unit &unit, float *sums, std::int64_t first, std::int64_t end) {
                kernels_.store_keys(job, unit.seq, unit.head_kv, {sums}, first, end);
            });
        });
        for (std::int64_t i = 0; attention_ && i < wave.items; ++i) total += state.losses[i];
        for (std::int64_t i = 0; problem_.has_sink && i < wave.items; ++i) {
            const Unit &unit = unit_of(wave, i);
            const SparseItem item = item_at(unit, i - unit.first_item);
            for (std::int64_t h = 0; h < item.heads; ++h) dsink[item.head0 + h] += state.shares[i * most_heads_ + h];
        }
    }
    for (std::size_t h = 0; h < dsink.size(); ++h) job.operands->dsink[h] = static_cast<float>(dsink[h]);
    if (loss) *loss = static_cast<float>(total);
}

void SparsePlan::attend(const SparseJob &job, char *scratch, std::int64_t tile, const Layout &at) const {
    const std::int64_t group = problem_.heads_q / problem_.heads_kv, tiles = ceil_div(group, tile);
    run_team(at.team, never_alone, [&](const Team &team) {
        void *const thread_scratch = scratch + at.scratch * team.thread;
        team.distribute(rows_ * problem_.heads_kv * tiles, [&](std::int64_t i) {
            const std::int64_t row = i / tiles % rows_, head_kv = i / tiles / rows_, head = i % tiles * tile;
            const std::int64_t b = sequence_of(first_row_, row), heads = std::min(tile, group - head);
            kernels_.attend(job, {b, head_kv, head_kv * group + head, heads, row - first_row_[b]}, thread_scratch);
        });
    });
}

// The following functions are called by every thread of a team.

// Computes the items of a loss without selection.
void SparsePlan::descend_tiles(const Team &team, const Wave &wave, State &state, char *scratch) const {
    // Items are taken in order and wait for earlier ones only, so the first unfinished one never waits.
    for (std::int64_t i; (i = team.take(state.taken)) < wave.items;) {
        const Unit &unit = unit_of(wave, i);
        State::View view = {&state, &team, unit.first_item};
        const Turn turn = {&view, i, State::wait, State::done};
        const KeySums sums = {reinterpret_cast<float *>(state.sums + unit.offset)};
        kernels_.tile_loss(state.job, item_at(unit, i - unit.first_item), turn, sums, state.losses + i, scratch);
    }
}

void SparsePlan::descend_lists(const Team &team, const Wave &wave, State &state, Batches &batches, const Layout &at,
                               char *scratch) const {
    const auto contributions_of = [&](std::int64_t i) {
        char *const slot = state.contributions + at.contributions * static_cast<std::size_t>(i % at.pace.slots);
        return Contributions{slot + at.starts, reinterpret_cast<std::int32_t *>(slot), at.strip_keys};
    };
    const auto compute = [&](std::int64_t i) {
        const Unit &unit = unit_of(wave, i);
        const SparseItem item = item_at(unit, i - unit.first_item);
        if (attention_) kernels_.list_loss(state.job, item, contributions_of(i), state.losses + i, scratch);
        else kernels_.gradient(state.job, item, contributions_of(i), state.shares + i * most_heads_, scratch);
    };
    const auto add = [&](const Batches::Batch &batch, const KeyRange &range) {
        const Unit &unit = units_[wave.first + batch.unit];
        const KeySums sums = {reinterpret_cast<float *>(state.sums + unit.offset)};
        for (std::int64_t i = batch.first; i < batch.end && !team.cancelled(); ++i) {
            const Contributions next = contributions_of(i + 1);
            kernels_.add_keys(state.job, item_at(unit, i - unit.first_item), contributions_of(i),
                              i + 1 < batch.end ? &next : nullptr, range, sums, scratch);
        }
    };
    const auto starts_of = [&](std::int64_t i) { return contributions_of(i).starts; };
    batches.work(team, compute, starts_of, add, reinterpret_cast<std::int64_t *>(scratch));
}

std::vector<Batches::Unit> SparsePlan::work_of(const Wave &wave, const Layout &at) const {
    std::vector<Batches::Unit> units;
    for (std::size_t u = wave.first; u < wave.end; ++u) {
        const std::int64_t keys = keys_of(sequences_[units_[u].seq]);
        const std::int64_t ranges = std::max<std::int64_t>(at.team, ceil_div(keys, range_keys));
        units.push_back({units_[u].items, ceil_div(keys, at.strip_keys), ranges});
    }
    return units;
}

}  // namespace fusion
