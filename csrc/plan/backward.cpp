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

// Threads have rows of different units packed at a time where all together take no more than these bytes.
constexpr std::size_t most_bytes = std::size_t{32} << 20;
// Tiles of keys that a shared unit's rows may be packed ahead, so that whoever packs them rarely waits.
constexpr std::int64_t shared_ahead = 3;
// Results larger than this leave no cache anything for who reads them.
constexpr double streamed_bytes = 8 << 20;
// What packing and storing a row take, in pairs of a row and a key.
constexpr double row_work = 100;

constexpr Require require{"backward"};

bool wait_for(const Team &team, const std::atomic<std::int64_t> &counter, std::int64_t value) {
    return team.wait_until([&] { return counter.load(std::memory_order_acquire) == value; });
}

}  // namespace

struct BackwardPlan::State {
    Job job;
    Shares shares;
    char *packed, *own;  // rows of shared units, slot after slot; rows of threads' own units
    bool ordered_dbias;  // units share elements of dbias: they add to a column in ascending order
    std::vector<Item> items;
    std::vector<Task> tasks;
    std::atomic<std::size_t> next;                          // task
    std::unique_ptr<std::atomic<std::int64_t>[]> turn;      // per tile of rows: the tile of keys that may add to it
    std::unique_ptr<std::atomic<std::int64_t>[]> left;      // per unit: its unfinished items
    std::unique_ptr<std::atomic<std::int64_t>[]> finished;  // per tile of keys: how many units are done with it
    std::vector<RowNotes> notes;                            // per tile of rows
};

BackwardPlan::BackwardPlan(const Variant &variant, const Problem &problem, std::vector<Sequence> sequences)
    : variant_(variant), kernels_(variant.gradient_kernels(problem.dtype)), problem_(problem),
      sequences_(std::move(sequences)) {
    check();
    group_ = problem_.heads_q / problem_.heads_kv;
    key_bytes_ = kernels_.key_bytes(problem_);
    tile_bytes_ = kernels_.row_bytes(problem_, gradient_rows);
    cut_units();
    // Of any lengths: not in whole numbers, which end.
    const double size = problem_.dtype == Dtype::float32 ? 4 : 2, dim_qk = problem_.dim_qk + problem_.dim_rope;
    for (const Sequence &seq : sequences_) {
        result_bytes_ += size * problem_.heads_q * seq.q_len * dim_qk;
        result_bytes_ += size * problem_.heads_kv * seq.kv_len * (dim_qk + problem_.dim_v);
    }
}

void BackwardPlan::check() const {
    const Problem &p = problem_;
    require.heads(p);
    require.dims(p.dim_qk > 0 && p.dim_v > 0 && p.dim_rope >= 0);
    require(p.keep_below >= 0 && p.keep_below <= 65536, "the threshold of dropout is outside 0 ... 65536");
    for (const Sequence &seq : sequences_) require.lengths(seq);
}

void BackwardPlan::cut_units() {
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        const Sequence &seq = sequences_[b];
        const std::int64_t rows = ceil_div(seq.q_len, gradient_rows), keys = ceil_div(seq.kv_len, kernels_.tile_keys);
        const std::int64_t places[] = {places_of(seq, rows, shared_ahead), places_of(seq, rows, 0)};
        const double work = work_of(seq, rows);
        for (std::int64_t head = 0; (rows || keys) && head < problem_.heads_kv; ++head) {
            // A short tile takes what a whole one does, but a lone one: many sequences may be that short.
            const std::size_t tile = rows == 1 ? kernels_.row_bytes(problem_, seq.q_len) : tile_bytes_;
            const Room shared = {places[0], group_ * places[0] * tile}, own = {places[1], group_ * places[1] * tile};
            units_.push_back({static_cast<std::int64_t>(b), head, row_tiles_, rows, keys, work, shared, own});
            row_tiles_ += group_ * rows;
            items_ += group_ * rows + keys;
            most_key_tiles_ = std::max(most_key_tiles_, keys);
        }
    }
}

// The tiles of keys [returned, end) that some row of a tile may see. The first ascends from tile to tile, also among
// those that meet nothing.
std::int64_t BackwardPlan::first_meeting(const Sequence &seq, std::int64_t row_tile, std::int64_t &end) const {
    const std::int64_t row0 = row_tile * gradient_rows, row1 = std::min(row0 + gradient_rows, seq.q_len);
    const std::int64_t begin_key = std::max<std::int64_t>(row0 + seq.lo, 0);
    const std::int64_t end_key = std::min(std::max(row1 - 1 + seq.hi, seq.prefix), seq.kv_len);
    const std::int64_t first = std::min(begin_key / kernels_.tile_keys, ceil_div(seq.kv_len, kernels_.tile_keys));
    end = begin_key < end_key ? ceil_div(end_key, kernels_.tile_keys) : first;
    return first;
}

// A tile takes the place of one that has met its last tile of keys `ahead` tiles of keys before: so many rows lie
// between their firsts. Two more tiles of keys are for boundaries inside of tiles.
std::int64_t BackwardPlan::places_of(const Sequence &seq, std::int64_t row_tiles, std::int64_t ahead) const {
    const std::int64_t margin = (ahead + 2) * kernels_.tile_keys - seq.lo;
    const std::int64_t rows = std::max(margin + seq.hi + gradient_rows, seq.prefix > 0 ? margin + seq.prefix : 0);
    return std::clamp<std::int64_t>(ceil_div(rows, gradient_rows), 1, std::max<std::int64_t>(row_tiles, 1));
}

// Judged by some tiles of rows of a long sequence.
double BackwardPlan::work_of(const Sequence &seq, std::int64_t row_tiles) const {
    const std::int64_t step = row_tiles / 64 + 1;
    std::int64_t met = 0, end;
    for (std::int64_t i = 0; i < row_tiles; i += step) {
        const std::int64_t first = first_meeting(seq, i, end);
        met += end - first;
    }
    const std::int64_t tile = std::min(gradient_rows, seq.q_len) * std::min(kernels_.tile_keys, seq.kv_len) * step;
    return group_ * (static_cast<double>(met) * tile + row_work * seq.q_len) + row_work * seq.kv_len;
}

// A thread computes a unit alone, in its own cache, while enough work is left for the others meanwhile; what is then
// left they share.
BackwardPlan::Shares BackwardPlan::shares_of(int team, bool ordered) const {
    Shares shares = {};
    const auto threads = static_cast<std::size_t>(team);
    double left = 0;
    for (const PlannedUnit &unit : units_) left += unit.work;
    for (std::size_t u = 0; u < units_.size(); ++u) {
        const PlannedUnit &unit = units_[u];
        shares.position.push_back(shares.shared.size());
        if (!ordered && unit.work * (team + 1) <= left && unit.own.bytes * threads <= most_bytes) {
            shares.own.push_back(u);
            shares.own_bytes = std::max(shares.own_bytes, unit.own.bytes);
            left -= unit.work;
        } else {
            shares.shared.push_back(u);
            shares.slot_bytes = std::max(shares.slot_bytes, unit.shared.bytes);
        }
    }
    const std::size_t fitting = shares.slot_bytes ? most_bytes / shares.slot_bytes : 1;
    shares.slots =
        std::clamp<std::size_t>(std::min(threads, fitting), 1, std::max<std::size_t>(shares.shared.size(), 1));
    return shares;
}

std::size_t BackwardPlan::bytes_of(const Shares &shares, int team) const {
    return shares.slot_bytes * shares.slots + (shares.own_bytes + key_bytes_) * static_cast<std::size_t>(team);
}

std::size_t BackwardPlan::workspace_bytes(int threads) const {
    const int team = team_size(threads, items_);
    return units_.empty() ? 0 : std::max(bytes_of(shares_of(team, false), team), bytes_of(shares_of(team, true), team));
}

// A tile of rows of a unit, counted head after head.
RowTile BackwardPlan::row_tile(std::size_t unit, std::int64_t index, char *rows, std::int64_t places) const {
    const PlannedUnit &u = units_[unit];
    const std::int64_t head = index / u.row_tiles, tile = index % u.row_tiles, row0 = tile * gradient_rows;
    const std::int64_t q_len = sequences_[u.seq].q_len;
    const std::size_t bytes = u.row_tiles == 1 ? kernels_.row_bytes(problem_, q_len) : tile_bytes_;
    rows += (head * places + tile % places) * bytes;
    return {u.seq, u.head * group_ + head, row0, std::min(row0 + gradient_rows, q_len), rows, false};
}

// Shared units go abreast, as many as there are slots and threads: two tiles of keys of one unit would wait for each
// other.
void BackwardPlan::cut_items(State &state, std::size_t abreast) const {
    state.items.reserve(items_);
    std::vector<std::int64_t> ranks(most_key_tiles_, 0), packed(abreast);
    for (const std::size_t unit : state.shares.own) {
        const std::size_t first = state.items.size();
        add_items(state.items, &unit, 1, ranks, packed);
        state.tasks.push_back({first, state.items.size(), true});
    }
    std::fill(ranks.begin(), ranks.end(), 0);
    const std::vector<std::size_t> &shared = state.shares.shared;
    for (std::size_t first = 0; first < shared.size(); first += abreast) {
        std::size_t item = state.items.size();
        add_items(state.items, shared.data() + first, std::min(abreast, shared.size() - first), ranks, packed);
        for (; item < state.items.size(); ++item) state.tasks.push_back({item, item + 1, false});
    }
}

// The items of units that go abreast. Rows are packed before the first tile of keys that they meet.
void BackwardPlan::add_items(std::vector<Item> &items, const std::size_t *units, std::size_t count,
                             std::vector<std::int64_t> &ranks, std::vector<std::int64_t> &packed) const {
    std::int64_t tiles = 0;
    for (std::size_t i = 0; i < count; ++i) {
        tiles = std::max(tiles, units_[units[i]].key_tiles);
        packed[i] = 0;
    }
    for (std::int64_t t = 0; t <= tiles; ++t) {
        for (std::size_t i = 0; i < count; ++i) add_rows(items, units[i], t, packed[i]);
        for (std::size_t i = 0; i < count; ++i) {
            if (t < units_[units[i]].key_tiles) items.push_back({units[i], t, ranks[t]++});
        }
    }
}

// Packs the tiles of rows from `next` on that meet no tile of keys before `key_tile`.
void BackwardPlan::add_rows(std::vector<Item> &items, std::size_t unit, std::int64_t key_tile,
                            std::int64_t &next) const {
    const PlannedUnit &u = units_[unit];
    for (std::int64_t end; next < u.row_tiles && first_meeting(sequences_[u.seq], next, end) <= key_tile; ++next) {
        for (std::int64_t head = 0; head < group_; ++head) items.push_back({unit, head * u.row_tiles + next, -1});
    }
}

// Zeroes dbias, which is written once, where a tile of rows and a tile of keys do not meet.
void BackwardPlan::clear_dbias(const Matrix &dbias, const RowTile &rows, const KeyTile &keys) const {
    const std::int64_t size = dbias.dtype == Dtype::float32 ? 4 : 2;
    for (std::int64_t row = rows.row0; row < rows.row1; ++row) {
        const std::int64_t at = dbias.address[rows.seq] + rows.head * dbias.stride_head[rows.seq] +
                                row * dbias.stride_row[rows.seq] + keys.key0;
        std::memset(static_cast<char *>(const_cast<void *>(dbias.base)) + at * size, 0, (keys.key1 - keys.key0) * size);
    }
}

std::int64_t BackwardPlan::run(const Operands &operands, const Gradients &gradients, int threads) const {
    refuse_endless(items_);
    State state = {};
    state.job = {&problem_, &operands, sequences_.data(), &gradients, result_bytes_ > streamed_bytes};
    state.ordered_dbias = gradients.dbias.base && !gradients.owns_dbias;
    // Keys that share an element leave no order but one after the other.
    const bool alone = state.ordered_dbias && (gradients.dbias.stride_key == 0 || problem_.bias == Bias::table);
    int team = alone ? 1 : team_size(threads, items_);
    const Shares &shares = state.shares;
    const Lease memory = lease_for(team, [&](int n) {
        state.shares = shares_of(n, state.ordered_dbias);
        return bytes_of(shares, n);
    });
    state.packed = memory.data();
    state.own = state.packed + shares.slot_bytes * shares.slots;
    state.turn = std::make_unique<std::atomic<std::int64_t>[]>(row_tiles_);
    state.left = std::make_unique<std::atomic<std::int64_t>[]>(units_.size());
    state.finished = std::make_unique<std::atomic<std::int64_t>[]>(most_key_tiles_);
    state.notes.resize(row_tiles_);
    for (std::int64_t i = 0; i < row_tiles_; ++i) state.turn[i] = -1;  // not packed
    for (std::size_t u = 0; u < units_.size(); ++u) state.left[u] = group_ * units_[u].row_tiles + units_[u].key_tiles;
    cut_items(state, state.ordered_dbias ? 1 : std::min<std::size_t>(team, shares.slots));
    std::vector<double> dsink(problem_.heads_q);
    run_team(team, [&](const Team &members) {
        char *const own = state.own + (shares.own_bytes + key_bytes_) * members.thread;
        work(state, members, own, own + shares.own_bytes);
#if defined(__x86_64__)
        _mm_sfence();  // others read what was written past the caches
#endif
    });
    std::int64_t means = 0;
    for (const PlannedUnit &unit : units_) {
        for (std::int64_t i = 0; i < group_ * unit.row_tiles; ++i) {
            const RowNotes &notes = state.notes[unit.first_tile + i];
            dsink[unit.head * group_ + i / unit.row_tiles] += notes.dsink;
            means += notes.means;
        }
    }
    for (std::int64_t h = 0; problem_.has_sink && h < problem_.heads_q; ++h)
        gradients.dsink[h] = static_cast<float>(dsink[h]);
    return means;
}

void BackwardPlan::work(State &state, const Team &team, char *own, void *scratch) const {
    const std::size_t own_tasks = state.shares.own.size();
    // Items are taken in their order and wait for earlier ones alone, so the first unfinished one never waits.
    for (std::size_t i = team.take(state.next), after; i < state.tasks.size(); i = after) {
        const Task &task = state.tasks[i];
        // A unit of one's own is taken while the one before it is computed, which asks for its memory.
        after = state.next;
        while (after < own_tasks && !state.next.compare_exchange_weak(after, after + 1)) {
        }
        const Task *const then = after < own_tasks ? &state.tasks[after] : nullptr;
        for (std::size_t at = task.first; at < task.end && !team.cancelled(); ++at) {
            const Item &item = state.items[at];
            const PlannedUnit &unit = units_[item.unit];
            const std::int64_t places = task.own ? unit.own.places : unit.shared.places;
            char *rows = own;
            if (!task.own) {
                const std::size_t position = state.shares.position[item.unit], slots = state.shares.slots;
                // Units without rows wait too: who comes after them in their slot waits for them alone.
                if (position >= slots && !wait_for(team, state.left[state.shares.shared[position - slots]], 0)) return;
                rows = state.packed + position % slots * state.shares.slot_bytes;
            }
            if (item.rank < 0) {
                pack_rows(item, state, team, rows, places);
            } else {
                meet_keys(item, state, team, rows, places, scratch, upcoming_after(state, at, task, then));
            }
            state.left[item.unit].fetch_sub(1, std::memory_order_acq_rel);
        }
        if (!then) after = team.take(state.next);
    }
}

BackwardPlan::Upcoming BackwardPlan::upcoming_after(const State &state, std::size_t at, const Task &task,
                                                    const Task *then) const {
    Upcoming upcoming = {};
    // Of a shared unit the next ones in the list, whoever of those that work abreast will take them.
    const std::size_t unit = state.items[at].unit, far = at + Upcoming::farthest;
    std::size_t end = task.own ? task.end : std::min(state.items.size(), far);
    for (++at; !upcoming.keys; ++at) {
        while (at >= end) {  // a sequence without keys has none to ask for
            if (!task.own || !then) return upcoming;
            at = then->first;
            end = then->end;
            then = nullptr;
        }
        const Item &item = state.items[at];
        if (!task.own && item.unit != unit) continue;
        if (item.rank >= 0) {
            upcoming.keys = &item;
        } else if (upcoming.count < Upcoming::most) {
            upcoming.rows[upcoming.count++] = &item;
        }
    }
    return upcoming;
}

// What is asked for in one of so many slices.
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
        const PlannedUnit &unit = units_[upcoming.keys->unit];
        const std::int64_t key0 = upcoming.keys->tile * kernels_.tile_keys;
        const std::int64_t key1 = std::min(key0 + kernels_.tile_keys, sequences_[unit.seq].kv_len);
        add_keys(o.k, o.v, unit.seq, unit.head, key0, key1);
    }
    for (std::int64_t i = 0; i < upcoming.count; ++i) {
        const RowTile tile = row_tile(upcoming.rows[i]->unit, upcoming.rows[i]->tile, nullptr, 1);
        // Of all tiles one after the other this slice, as far as it lies in this one.
        const std::int64_t rows = tile.row1 - tile.row0, first = upcoming.count * slice - i * slices;
        const std::int64_t from = tile.row0 + rows * std::clamp<std::int64_t>(first, 0, slices) / slices;
        const std::int64_t to = tile.row0 + rows * std::clamp<std::int64_t>(first + upcoming.count, 0, slices) / slices;
        add(o.q, dim_qk, tile.seq, tile.head, from, to);
        add(g.dout, dim_v, tile.seq, tile.head, from, to);
        add(o.out, dim_v, tile.seq, tile.head, from, to);
    }
    return ahead;
}

void BackwardPlan::pack_rows(const Item &item, State &state, const Team &team, char *memory,
                             std::int64_t places) const {
    const PlannedUnit &unit = units_[item.unit];
    const Sequence &seq = sequences_[unit.seq];
    const std::int64_t tile = item.tile % unit.row_tiles;
    std::int64_t end;
    if (tile >= places) {  // who lies there is done
        first_meeting(seq, tile - places, end);
        if (!wait_for(team, state.turn[unit.first_tile + item.tile - places], end)) return;
    }
    RowTile rows = row_tile(item.unit, item.tile, memory, places);
    const std::int64_t first = first_meeting(seq, tile, end);
    state.notes[unit.first_tile + item.tile] = kernels_.pack_rows(state.job, rows);
    rows.fresh = true;
    if (first == end) kernels_.store_rows(state.job, rows);
    state.turn[unit.first_tile + item.tile].store(first, std::memory_order_release);
}

void BackwardPlan::meet_keys(const Item &item, State &state, const Team &team, char *memory, std::int64_t places,
                             void *scratch, const Upcoming &upcoming) const {
    const PlannedUnit &unit = units_[item.unit];
    const Sequence &seq = sequences_[unit.seq];
    const std::int64_t key0 = item.tile * kernels_.tile_keys;
    const KeyTile keys = {unit.seq, unit.head, key0, std::min(key0 + kernels_.tile_keys, seq.kv_len), scratch};
    kernels_.load_keys(state.job, keys);
    if (state.ordered_dbias && !wait_for(team, state.finished[item.tile], item.rank)) return;
    std::int64_t slice = 0, slices = 0, end;
    for (std::int64_t i = 0; i < unit.row_tiles; ++i) {
        slices += item.tile >= first_meeting(seq, i, end) && item.tile < end ? group_ : 0;
    }
    for (std::int64_t i = 0; i < group_ * unit.row_tiles; ++i) {
        RowTile rows = row_tile(item.unit, i, memory, places);
        const std::int64_t first = first_meeting(seq, i % unit.row_tiles, end);
        if (item.tile < first || item.tile >= end) {
            if (state.job.gradients->owns_dbias) clear_dbias(state.job.gradients->dbias, rows, keys);
            continue;
        }
        rows.fresh = item.tile == first;
        std::atomic<std::int64_t> &turn = state.turn[unit.first_tile + i];
        if (team.cancelled() || !wait_for(team, turn, item.tile)) return;
        kernels_.accumulate(state.job, rows, keys, ahead_of(state, upcoming, keys, slice++, slices));
        rows.fresh = false;
        if (item.tile + 1 == end) kernels_.store_rows(state.job, rows);
        turn.store(item.tile + 1, std::memory_order_release);
    }
    if (state.ordered_dbias) state.finished[item.tile].store(item.rank + 1, std::memory_order_release);
    kernels_.store_keys(state.job, keys);
}

}  // namespace fusion
