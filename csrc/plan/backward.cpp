#include "plan/backward.h"

#include "plan/arena.h"
#include "plan/schedule.h"
#include "plan/team.h"

#include <algorithm>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fusion {
namespace {

// Number of tiles of keys by which rows of a shared unit may be packed ahead, so that the packing thread rarely waits.
constexpr std::int64_t shared_ahead = 3;
// Results above this number of bytes are written past the caches, which cannot hold them until they are read.
constexpr double streamed_bytes = 8 << 20;
// Cost of packing and storing a row, in (row, key) pairs.
constexpr double row_work = 100;
// (row, key) pairs times columns from which a second thread pays off although it may wait for work.
constexpr double work_per_thread = 1 << 19;

constexpr Require require{"backward"};

using Counter = std::atomic<std::int64_t>;

struct alignas(cache_line) Progress {  // of a tile of keys: rows of its unit that it has processed, head after head
    Counter rows = 0;
};

bool wait_for(const Team &team, const Counter &counter, std::int64_t least) {
    return team.wait_until([&] { return counter.load(std::memory_order_acquire) >= least; });
}

}  // namespace

struct BackwardPlan::State {
    const Job job;
    const BiasOrder &order;
    const BackwardSchedule &schedule;
    char *const packed;                    // rows of shared units, slot after slot
    std::atomic<std::size_t> next = 0;     // task
    std::unique_ptr<Counter[]> met;        // per tile of rows: finished tiles of keys; -1: not packed
    std::unique_ptr<Counter[]> left;       // per unit: unfinished items
    std::vector<PackedRows> packed_rows;   // per tile of rows
    std::int64_t first_watched;            // first tile of keys that a thread may wait for
    std::unique_ptr<Progress[]> progress;  // per tile of keys from first_watched on

    State(const BackwardPlan &plan, const Job &job, const BiasOrder &order, const BackwardSchedule &schedule,
          char *memory)
        : job(job), order(order), schedule(schedule), packed(memory), met(new Counter[plan.row_tiles_]),
          left(new Counter[plan.units_.size()]), packed_rows(plan.row_tiles_), first_watched(plan.key_tiles_) {
        for (std::int64_t i = 0; i < plan.row_tiles_; ++i) met[i] = -1;
        for (std::size_t u = 0; u < plan.units_.size(); ++u) {
            left[u] = plan.units_.group * plan.units_[u].row_tiles + plan.units_[u].key_tiles;
        }
        if (!schedule.shared.empty()) first_watched = plan.units_[schedule.shared.front()].first_key_tile;
        if (!order.before.empty()) first_watched = 0;
        progress.reset(new Progress[plan.key_tiles_ - first_watched]);
    }
};

// The state of RowTurn: the order in which tiles of keys add to a tile of rows.
struct BackwardPlan::Turn {
    const Team *team;
    Before dq, dbias;
    bool whole_head;  // of the one before: its rows share elements of dbias
    Counter *mine;
    std::int64_t first, rows;  // of the unit, and of the tile

    // Rows counted as gradient_rows at the end of a tile, so that later tiles may be of a longer sequence.
    std::int64_t reached(std::int64_t row) const { return row == rows ? gradient_rows : row; }
    static bool wait(void *state, std::int64_t row) {
        const Turn &turn = *static_cast<const Turn *>(state);
        const std::int64_t reached = turn.reached(row);
        const auto passed = [&](const Before &before, std::int64_t rows) {
            return !before.rows || wait_for(*turn.team, *before.rows, before.first + rows);
        };
        return passed(turn.dq, reached) && passed(turn.dbias, turn.whole_head ? 0 : reached);
    }
    static void done(void *state, std::int64_t row) {
        const Turn &turn = *static_cast<const Turn *>(state);
        turn.mine->store(turn.first + turn.reached(row), std::memory_order_release);
    }
};

BackwardPlan::BackwardPlan(const Variant &variant, const Problem &problem, std::vector<Sequence> sequences)
    : variant_(variant), kernels_(variant.gradient_kernels(problem.dtype)), problem_(problem) {
    units_.sequences = std::move(sequences);
    require.problem(problem_, units_.sequences);
    units_.group = group_of(problem_);
    units_.tile_keys = kernels_.tile_keys;
    units_.key_bytes = kernels_.key_bytes(problem_);
    tile_bytes_ = kernels_.row_bytes(problem_, gradient_rows);
    cut_units();
    // In floating point, because integers could overflow.
    const double size = problem_.dtype == Dtype::float32 ? 4 : 2, dim_qk = problem_.dim_qk + problem_.dim_rope;
    for (const Sequence &seq : units_.sequences) {
        result_bytes_ += size * problem_.heads_q * seq.q_len * dim_qk;
        result_bytes_ += size * problem_.heads_kv * seq.kv_len * (dim_qk + problem_.dim_v);
    }
}

BackwardPlan::~BackwardPlan() { delete last_schedule_.load(); }

void BackwardPlan::cut_units() {
    for (std::size_t b = 0; b < units_.sequences.size(); ++b) {
        const Sequence &seq = units_.sequences[b];
        const std::int64_t rows = ceil_div(seq.q_len, gradient_rows), keys = ceil_div(seq.kv_len, kernels_.tile_keys);
        const std::int64_t row_slots[] = {places_of(seq, rows, shared_ahead), places_of(seq, rows, 0)};
        const double work = work_of(seq, rows);
        // A short tile takes as much memory as a full one, except if it is the only one: many sequences may be short.
        const std::size_t tile = rows == 1 ? kernels_.row_bytes(problem_, seq.q_len) : tile_bytes_;
        const GradientUnit::Room shared = {row_slots[0], units_.group * row_slots[0] * tile},
                                 single = {row_slots[1], units_.group * row_slots[1] * tile};
        for (std::int64_t head = 0; (rows || keys) && head < problem_.heads_kv; ++head) {
            units_.units.push_back(
                {static_cast<std::int64_t>(b), head, row_tiles_, key_tiles_, rows, keys, work, shared, single});
            row_tiles_ += units_.group * rows;
            key_tiles_ += keys;
            work_ += work;
        }
    }
}

// Number of slots for packed tiles of rows of a head. A tile reuses the slot of one whose last tile of keys is `ahead`
// tiles of keys earlier; two more tiles of keys account for boundaries inside of tiles.
std::int64_t BackwardPlan::places_of(const Sequence &seq, std::int64_t row_tiles, std::int64_t ahead) const {
    const std::int64_t margin = (ahead + 2) * kernels_.tile_keys - seq.lo;
    const std::int64_t rows = std::max(margin + seq.hi + gradient_rows, seq.prefix > 0 ? margin + seq.prefix : 0);
    return std::clamp<std::int64_t>(ceil_div(rows, gradient_rows), 1, std::max<std::int64_t>(row_tiles, 1));
}

// Work of a head of a sequence in (row, key) pairs; of a long sequence estimated from some tiles of rows.
double BackwardPlan::work_of(const Sequence &seq, std::int64_t row_tiles) const {
    const std::int64_t step = row_tiles / 64 + 1;
    std::int64_t met = 0;
    for (std::int64_t i = 0; i < row_tiles; i += step) {
        const MetKeys keys(seq, i, kernels_.tile_keys);
        met += keys.end - keys.first;
    }
    const std::int64_t tile = std::min(gradient_rows, seq.q_len) * std::min(kernels_.tile_keys, seq.kv_len) * step;
    return units_.group * (static_cast<double>(met) * tile + row_work * seq.q_len) + row_work * seq.kv_len;
}

int BackwardPlan::team(int threads) const {
    return team_size(team_by_work(threads, all_work(), work_per_thread), row_tiles_ + key_tiles_);
}

std::size_t BackwardPlan::workspace_bytes(int threads) const {
    if (units_.units.empty()) return 0;
    BiasOrder ordered;
    ordered.before.assign(units_.size() * units_.group, -1);
    const BackwardSchedule free(units_, team(threads), {}), in_order(units_, team(threads), ordered);
    return std::max(free.bytes(units_), in_order.bytes(units_));
}

// Reuses the schedule of the last run if it had the same number of threads. No lock, because a fork could leave it
// locked.
std::unique_ptr<const BackwardSchedule> BackwardPlan::take_schedule(int size, const BiasOrder &order) const {
    std::unique_ptr<const BackwardSchedule> previous(order.holds() ? nullptr : last_schedule_.exchange(nullptr));
    if (previous && previous->team == size) return previous;
    auto schedule = std::make_unique<BackwardSchedule>(units_, size, order);
    schedule->list_items(units_);
    return schedule;
}

// The tile of rows number `index` of a unit, counted head after head.
RowTile BackwardPlan::row_tile(std::size_t unit, std::int64_t index, Memory memory) const {
    const GradientUnit &u = units_[unit];
    const std::int64_t head = index / u.row_tiles, tile = index % u.row_tiles, row0 = tile * gradient_rows;
    const std::int64_t q_len = units_.sequences[u.seq].q_len;
    const std::size_t bytes = u.row_tiles == 1 ? kernels_.row_bytes(problem_, q_len) : tile_bytes_;
    char *const rows = memory.rows + (head * memory.row_slots + tile % memory.row_slots) * bytes;
    return {u.seq, u.head * units_.group + head, row0, std::min(row0 + gradient_rows, q_len), rows, false};
}

// Writes zeros to dbias for a tile of rows and a tile of keys without visible pairs.
void BackwardPlan::clear_dbias(const Matrix &dbias, const RowTile &rows, const KeyTile &keys) const {
    const std::int64_t size = dbias.dtype == Dtype::float32 ? 4 : 2;
    for (std::int64_t row = rows.row0; row < rows.row1; ++row) {
        const std::int64_t at = dbias.address[rows.seq] + rows.head * dbias.stride_head[rows.seq] +
                                row * dbias.stride_row[rows.seq] + keys.key0;
        std::memset(static_cast<char *>(const_cast<void *>(dbias.base)) + at * size, 0, (keys.key1 - keys.key0) * size);
    }
}

std::int64_t BackwardPlan::run(const Operands &operands, const Gradients &gradients, int threads) const {
    refuse_endless(row_tiles_ + key_tiles_);
    BiasOrder order;
    if (gradients.dbias.base && !gradients.owns_dbias) {
        order = BiasOrder(units_, gradients.dbias, problem_.bias == Bias::table);
    }
    const Job job = {&problem_, &operands, units_.sequences.data(), &gradients, result_bytes_ > streamed_bytes};
    std::unique_ptr<const BackwardSchedule> owned;
    const Lease memory = lease_for(threads, [&](int n) {
        owned = take_schedule(team(n), order);
        return owned->bytes(units_);
    });
    const BackwardSchedule &schedule = *owned;
    State state(*this, job, order, schedule, memory.data());
    std::vector<double> dsink(problem_.heads_q);
    char *const single_memory = state.packed + schedule.slot_bytes * schedule.slots;
    run_team(schedule.team, time_alone(all_work(), work_per_thread), [&](const Team &members) {
        char *const mine = single_memory + (schedule.single_bytes + units_.key_bytes) * members.thread;
        work(state, members, mine, mine + schedule.single_bytes);
#if defined(__x86_64__)
        _mm_sfence();  // other threads read results that were written past the caches
#endif
    });
    std::int64_t means = 0;
    for (const GradientUnit &unit : units_.units) {
        for (std::int64_t i = 0; i < units_.group * unit.row_tiles; ++i) {
            const PackedRows &rows = state.packed_rows[unit.first_row_tile + i];
            dsink[unit.head * units_.group + i / unit.row_tiles] += rows.dsink;
            means += rows.means;
        }
    }
    for (std::int64_t h = 0; problem_.has_sink && h < problem_.heads_q; ++h)
        gradients.dsink[h] = static_cast<float>(dsink[h]);
    if (!order.holds()) delete last_schedule_.exchange(owned.release());
    return means;
}

// Takes the next task while the last tile of keys of the current one is computed, so that its memory can be prefetched,
// unless another thread could begin it at once. Returns the number of tasks if none is left.
std::size_t BackwardPlan::take_early(State &state) const {
    const BackwardSchedule &schedule = state.schedule;
    std::size_t next = state.next;
    while (next + static_cast<std::size_t>(schedule.team) <= schedule.single_tasks) {
        if (state.next.compare_exchange_weak(next, next + 1)) return next;
    }
    return schedule.tasks.size();
}

void BackwardPlan::work(State &state, const Team &team, char *single_memory, void *scratch) const {
    const BackwardSchedule &schedule = state.schedule;
    const std::size_t none = schedule.tasks.size();
    // Items are taken in order and wait for earlier ones only, so the first unfinished one never waits.
    for (std::size_t i = team.take(state.next), after; i < none; i = after < none ? after : team.take(state.next)) {
        const GradientTask &task = schedule.tasks[i];
        after = none;
        for (std::size_t at = task.first; at < task.end; ++at) {
            const GradientItem &item = schedule.items[at];
            const Memory memory =
                task.single ? Memory{single_memory, units_[item.unit].single.row_slots} : memory_of(state, team, item);
            if (team.cancelled()) return;
            if (item.packs) {
                if (!pack_rows(item, state, team, memory)) return;
            } else {
                if (task.single && at == task.last_keys) after = take_early(state);
                const GradientTask *const then = after < none ? &schedule.tasks[after] : nullptr;
                const Upcoming upcoming = upcoming_after(state, at, task, then);
                if (!meet_keys(item, state, team, memory, scratch, task.single, upcoming)) return;
            }
            state.left[item.unit].fetch_sub(1, std::memory_order_acq_rel);
        }
    }
}

// The memory of a shared unit; waits until the unit that used it before is finished or the run is cancelled.
BackwardPlan::Memory BackwardPlan::memory_of(const State &state, const Team &team, const GradientItem &item) const {
    const BackwardSchedule &schedule = state.schedule;
    const std::size_t position = schedule.position[item.unit], slots = schedule.slots;
    // Units without rows wait too, because the next unit of their slot waits for them only.
    if (position >= slots) {
        const Counter &left = state.left[schedule.shared[position - slots]];
        team.wait_until([&] { return left.load(std::memory_order_acquire) == 0; });
    }
    return {state.packed + position % slots * schedule.slot_bytes, units_[item.unit].shared.row_slots};
}

BackwardPlan::Upcoming BackwardPlan::upcoming_after(const State &state, std::size_t at, const GradientTask &task,
                                                    const GradientTask *then) const {
    const std::vector<GradientItem> &items = state.schedule.items;
    Upcoming upcoming = {};
    // For a shared unit, the next items in the list, which any thread may take.
    const std::size_t unit = items[at].unit, far = at + Upcoming::farthest;
    std::size_t end = task.single ? task.end : std::min(items.size(), far);
    for (++at; !upcoming.keys; ++at) {
        while (at >= end) {  // a sequence without keys has no memory to prefetch
            if (!task.single || !then) return upcoming;
            at = then->first;
            end = then->end;
            then = nullptr;
        }
        const GradientItem &item = items[at];
        if (!task.single && item.unit != unit) continue;
        if (!item.packs) {
            upcoming.keys = &item;
        } else if (upcoming.count < Upcoming::most) {
            upcoming.rows[upcoming.count++] = &item;
        }
    }
    return upcoming;
}

// Memory to prefetch in slice number `slice` of `slices`.
Prefetches BackwardPlan::ahead_of(const State &state, const Upcoming &upcoming, const KeyTile &keys, std::int64_t slice,
                                  std::int64_t slices) const {
    const Operands &o = *state.job.operands;
    const Gradients &g = *state.job.gradients;
    const std::int64_t dim_qk = problem_.dim_qk, dim_v = problem_.dim_v;
    Prefetches ahead;
    const auto add = [&](const Rows &rows, std::int64_t dim, std::int64_t seq, std::int64_t head, std::int64_t from,
                         std::int64_t to) {
        if (from < to) ahead.add(part_of(rows, problem_.dtype, seq, head, from, to, dim));
    };
    const auto add_keys = [&](const Rows &k, const Rows &v, std::int64_t seq, std::int64_t head, std::int64_t key0,
                              std::int64_t key1) {
        const std::int64_t from = key0 + (key1 - key0) * slice / slices;
        const std::int64_t to = key0 + (key1 - key0) * (slice + 1) / slices;
        add(k, dim_qk, seq, head, from, to);
        add(v, dim_v, seq, head, from, to);
    };
    if (!state.job.streamed) add_keys(g.dk, g.dv, keys.seq, keys.head, keys.key0, keys.key1);
    if (upcoming.keys) {
        const GradientUnit &unit = units_[upcoming.keys->unit];
        const std::int64_t key0 = upcoming.keys->tile * kernels_.tile_keys;
        const std::int64_t key1 = std::min(key0 + kernels_.tile_keys, units_.sequences[unit.seq].kv_len);
        add_keys(o.k, o.v, unit.seq, unit.head, key0, key1);
    }
    for (std::int64_t i = 0; i < upcoming.count; ++i) {
        const RowTile tile = row_tile(upcoming.rows[i]->unit, upcoming.rows[i]->tile, {nullptr, 1});
        // The intersection of this tile with the slice of all tiles, one after the other.
        const std::int64_t rows = tile.row1 - tile.row0, first = upcoming.count * slice - i * slices;
        const std::int64_t from = tile.row0 + rows * std::clamp<std::int64_t>(first, 0, slices) / slices;
        const std::int64_t to = tile.row0 + rows * std::clamp<std::int64_t>(first + upcoming.count, 0, slices) / slices;
        add(o.q, dim_qk, tile.seq, tile.head, from, to);
        add(g.dout, dim_v, tile.seq, tile.head, from, to);
        add(o.out, dim_v, tile.seq, tile.head, from, to);
    }
    return ahead;
}

// Packs the rows of an item; false if the run is cancelled, as in meet_keys().
bool BackwardPlan::pack_rows(const GradientItem &item, State &state, const Team &team, Memory memory) const {
    const GradientUnit &unit = units_[item.unit];
    Counter *const met = state.met.get() + unit.first_row_tile + item.tile;
    const std::int64_t tile = item.tile % unit.row_tiles;
    if (tile >= memory.row_slots) {  // the tile that used this memory before is finished
        const MetKeys before = units_.met(item.unit, tile - memory.row_slots);
        if (!wait_for(team, *(met - memory.row_slots), before.end - before.first)) return false;
    }
    RowTile rows = row_tile(item.unit, item.tile, memory);
    const MetKeys keys = units_.met(item.unit, tile);
    state.packed_rows[unit.first_row_tile + item.tile] = kernels_.pack_rows(state.job, rows);
    rows.fresh = true;
    if (keys.first == keys.end) kernels_.store_rows(state.job, rows);
    met->store(0, std::memory_order_release);
    return true;
}

// The work that must add to dbias before a tile of rows: the same tile of the last earlier head that shares its
// elements and has visible pairs there (earlier heads are ordered by the same rule), or all rows of that head if rows
// share elements.
BackwardPlan::Before BackwardPlan::bias_before(const State &state, const GradientItem &item, std::int64_t index) const {
    if (state.order.before.empty()) return {};
    const std::int64_t tile = index % units_[item.unit].row_tiles, group = units_.group;
    const bool own_rows = state.job.gradients->dbias.stride_row[units_[item.unit].seq] != 0;
    std::int64_t head = static_cast<std::int64_t>(item.unit) * group + index / units_[item.unit].row_tiles;
    while ((head = state.order.before[head]) >= 0) {
        const auto before = static_cast<std::size_t>(head / group);
        if (before == item.unit) return {};  // computed earlier by this thread
        const GradientUnit &unit = units_[before];
        const std::int64_t from = own_rows ? tile : 0, to = own_rows ? tile + 1 : unit.row_tiles;
        for (std::int64_t i = from; i < std::min(to, unit.row_tiles); ++i) {
            if (!units_.met(before, i).has(item.tile)) continue;
            const std::int64_t tiles = head % group * unit.row_tiles + (own_rows ? tile : unit.row_tiles);
            return {&state.progress[unit.first_key_tile + item.tile - state.first_watched].rows, tiles * gradient_rows};
        }
    }
    return {};
}

bool BackwardPlan::meet_keys(const GradientItem &item, State &state, const Team &team, Memory memory, void *scratch,
                             bool single, const Upcoming &upcoming) const {
    const GradientUnit &unit = units_[item.unit];
    const std::int64_t key0 = item.tile * kernels_.tile_keys;
    const KeyTile keys = {unit.seq, unit.head, key0,
                          std::min(key0 + kernels_.tile_keys, units_.sequences[unit.seq].kv_len), scratch};
    kernels_.load_keys(state.job, keys);
    std::int64_t slice = 0, slices = 0;
    for (std::int64_t i = 0; i < unit.row_tiles; ++i) {
        slices += units_.met(item.unit, i).has(item.tile) ? units_.group : 0;
    }
    const bool watched = !single || !state.order.before.empty();
    Progress *const progress =
        watched ? &state.progress[unit.first_key_tile + item.tile - state.first_watched] : nullptr;
    const bool whole_head = !state.order.before.empty() && state.job.gradients->dbias.stride_row[unit.seq] == 0;
    for (std::int64_t i = 0; i < units_.group * unit.row_tiles; ++i) {
        if (watched && i % unit.row_tiles == 0) progress->rows.store(i * gradient_rows, std::memory_order_release);
        RowTile rows = row_tile(item.unit, i, memory);
        const MetKeys met = units_.met(item.unit, i % unit.row_tiles);
        if (!met.has(item.tile)) {
            if (state.job.gradients->owns_dbias) clear_dbias(state.job.gradients->dbias, rows, keys);
            continue;
        }
        rows.fresh = item.tile == met.first;
        Counter &done = state.met[unit.first_row_tile + i];
        if (!wait_for(team, done, 0)) return false;
        Turn turn = {};
        if (watched) {
            const std::int64_t first = i * gradient_rows;
            turn = {&team, {}, bias_before(state, item, i), whole_head, &progress->rows, first, rows.row1 - rows.row0};
            if (!rows.fresh) turn.dq = {&progress[-1].rows, first};
        }
        const RowTurn turns = watched ? RowTurn{&turn, Turn::wait, Turn::done} : RowTurn{};
        kernels_.accumulate(state.job, rows, keys, turns, ahead_of(state, upcoming, keys, slice++, slices));
        if (team.cancelled()) return false;  // perhaps in the middle of the tile
        rows.fresh = false;
        if (item.tile + 1 == met.end) kernels_.store_rows(state.job, rows);
        done.fetch_add(1, std::memory_order_acq_rel);
    }
    if (watched) progress->rows.store(units_.group * unit.row_tiles * gradient_rows, std::memory_order_release);
    kernels_.store_keys(state.job, keys);
    return true;
}

}  // namespace fusion
