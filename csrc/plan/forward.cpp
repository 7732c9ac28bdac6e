#include "plan/forward.h"

#include "plan/arena.h"
#include "plan/schedule.h"
#include "plan/team.h"

#include <algorithm>
#include <functional>
#include <new>
#include <utility>

namespace fusion {
namespace {

// Bytes of packed keys and values in memory at a time, for any batch: two waves, so that no thread waits between them.
constexpr std::size_t most_packed = std::size_t{32} << 20;
constexpr std::int64_t run_panels = 8;
// Number of items by which packing precedes the tile that needs it, so that threads rarely wait for each other.
constexpr std::size_t ahead = 8;
// Items of work per thread from which their lengths do not matter for the balance of threads.
constexpr std::size_t fair_share = 16;
// Most consecutive pieces of a narrow band that a thread takes together: seven eighths of the keys that they share are
// then packed once instead of twice.
constexpr std::size_t most_segment = 8;
// A tile is short if it has less than 1 / short_tile of the keys of the longest tile of its unit.
constexpr std::int64_t short_tile = 3;
// Cost of loading and storing a row, and of packing a key, in (row, key) pairs.
constexpr double row_work = 13, key_work = 41;
// Multiply-adds per thread from which one more thread pays off: with two heads, a second thread made no call faster up
// to two to four million.
constexpr double work_per_thread = 1 << 21;

constexpr Require require{"forward"};

// Writes elements to `to`, from index `first` on, sorted by their keys; equal keys keep their order.
template <class Place, class T>
void put_in_order(std::vector<std::pair<Place, T>> &placed, std::vector<T> &to, std::size_t first) {
    std::stable_sort(placed.begin(), placed.end(), [](const auto &x, const auto &y) { return x.first < y.first; });
    for (const auto &[place, thing] : placed) to[first++] = thing;
}

}  // namespace

ForwardPlan::ForwardPlan(const Variant &variant, const Problem &problem, std::vector<Sequence> sequences,
                         std::vector<Tile> tiles)
    : variant_(variant), kernels_(variant.kernels(problem.dtype)), problem_(problem), sequences_(std::move(sequences)),
      tiles_(std::move(tiles)), small_unit_(variant.cache / 16 * 15) {
    check();
    scratch_bytes_ = kernels_.scratch_bytes(problem_);
    cut_units();
    list_items();
}

void ForwardPlan::check() const {
    require.problem(problem_, sequences_);
    const Tile *before = nullptr;
    for (const Tile &t : tiles_) {
        require(t.seq >= 0 && t.seq < static_cast<std::int64_t>(sequences_.size()), "a tile's sequence does not exist");
        const Sequence &seq = sequences_[t.seq];
        require(0 <= t.row0 && t.row0 < t.row1 && t.row1 <= seq.q_len, "a tile's rows lie outside its sequence");
        require(t.row1 - t.row0 <= tile_rows, "a tile has too many rows");
        require(0 <= t.begin && t.begin <= t.end && t.end <= seq.kv_len, "a tile's keys lie outside its sequence");
        require(!before || before->seq < t.seq || (before->seq == t.seq && before->row1 <= t.row0),
                "tiles are not in order");
        before = &t;
    }
}

// Divides sequences into units. A sequence with a narrow band becomes several small units, a chain for each head; keys
// that two of them share are packed twice, unless one thread computes both (carry).
void ForwardPlan::cut_units() {
    std::vector<PlannedUnit> pieces;  // units of one sequence
    std::vector<std::pair<double, PlannedUnit>> placed;
    for (std::size_t first = 0; first < tiles_.size(); first = pieces.back().end) {
        if (!pieces.empty() && tiles_[first].seq != pieces.back().unit.seq) add_chains(pieces, placed);
        pieces.push_back(cut_piece(first));
    }
    if (!pieces.empty()) add_chains(pieces, placed);
    units_.resize(placed.size());
    put_in_order(placed, units_, 0);
    for (PlannedUnit &u : units_) {
        u.before = work_;
        work_ += u.work;
        works_.push_back(u.work);
        longest_chain_ = std::max(longest_chain_, u.chain);
    }
    std::sort(works_.begin(), works_.end(), std::greater<>());
}

// The unit that begins with tile `first` of a sequence.
ForwardPlan::PlannedUnit ForwardPlan::cut_piece(std::size_t first) const {
    const std::int64_t panel = kernels_.panel;
    PlannedUnit planned = {{tiles_[first].seq, 0, 0, 0, nullptr}, first, first};
    const auto grow = [&](const Tile &tile) {  // adds the keys of one more tile, unless the unit would exceed a cache
        if (tile.begin == tile.end) return true;
        Unit grown = planned.unit;
        const bool bare = grown.key_begin == grown.key_end;
        grown.key_begin = std::min(bare ? tile.begin : grown.key_begin, tile.begin) / panel * panel;
        grown.key_end = std::max(grown.key_end, round_up(tile.end, panel));
        const std::size_t bytes = kernels_.packed_bytes(problem_, grown);
        const std::int64_t wider = std::max(planned.longest, tile.end - tile.begin);
        const bool leaves = planned.bytes <= small_unit_ && bytes > small_unit_;
        if (leaves && 2 * wider < planned.unit.key_end - planned.unit.key_begin) return false;
        planned.unit = grown;
        planned.bytes = bytes;
        planned.longest = wider;
        return true;
    };
    const std::int64_t group = group_of(problem_);
    for (; planned.end < tiles_.size() && tiles_[planned.end].seq == planned.unit.seq && grow(tiles_[planned.end]);
         ++planned.end) {
        const Tile &tile = tiles_[planned.end];
        planned.work += static_cast<double>(group * (tile.row1 - tile.row0)) *
                        (row_work + static_cast<double>(tile.end - tile.begin));
    }
    planned.work += key_work * static_cast<double>(planned.unit.key_end - planned.unit.key_begin);
    return planned;
}

// Adds a chain of these units for every head, sorted by work, because short work at the end balances threads.
void ForwardPlan::add_chains(std::vector<PlannedUnit> &pieces,
                             std::vector<std::pair<double, PlannedUnit>> &placed) const {
    double work = 0;
    std::int64_t capacity = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        work += pieces[i].work;
        capacity = std::max(capacity, pieces[i].unit.key_end - pieces[i].unit.key_begin);
    }
    for (std::int64_t head = 0; head < problem_.heads_kv; ++head) {
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            PlannedUnit u = pieces[i];
            u.unit.head = head;
            u.chain = pieces.size();
            u.left = pieces.size() - i;
            u.capacity = capacity;
            placed.emplace_back(-work, u);
        }
    }
    pieces.clear();
}

void ForwardPlan::list_items() {
    std::size_t count = 0;
    for (const PlannedUnit &u : units_) {
        count += (u.end - u.first) * group_of(problem_) + runs_of(u);
        refuse_endless(static_cast<std::int64_t>(count));
    }
    items_.reserve(count);
    std::size_t used = 0, first = 0;
    for (std::size_t u = 0; u < units_.size(); ++u) {
        if (used > 0 && used + units_[u].bytes > most_packed / 2) {
            add_items(first, u);
            first = u;
            used = 0;
        }
        units_[u].offset = used;
        units_[u].runs = runs_;
        runs_ += runs_of(units_[u]);
        used += units_[u].bytes;
        wave_bytes_ = std::max(wave_bytes_, used);
        unit_bytes_ = std::max(unit_bytes_, units_[u].bytes);
    }
    if (!units_.empty()) add_items(first, units_.size());
}

std::size_t ForwardPlan::runs_of(const PlannedUnit &u) const {
    const std::int64_t run_keys = run_panels * kernels_.panel;
    return ceil_div(u.unit.key_end - u.unit.key_begin, run_keys);
}

// Adds the items of a wave: the tiles of units [first, end), long ones first, and before each tile the panels that it
// is the first to need.
void ForwardPlan::add_items(std::size_t first, std::size_t end) {
    const std::int64_t run_keys = run_panels * kernels_.panel, group = group_of(problem_);
    const auto keys = [&](const Item &item) { return tiles_[item.at].end - tiles_[item.at].begin; };
    std::vector<Item> order;
    for (std::size_t u = first; u < end; ++u) {
        const PlannedUnit &unit = units_[u];
        for (std::size_t t = unit.first; t < unit.end; ++t) {
            const Tile &tile = tiles_[t];
            const bool bare = tile.begin == tile.end;
            const std::size_t run = bare ? 0 : (tile.begin - unit.unit.key_begin) / run_keys;
            const std::size_t stop = bare ? 0 : ceil_div(tile.end - unit.unit.key_begin, run_keys);
            order.push_back({u, unit.unit.head * group, t, unit.runs + run, unit.runs + stop});
        }
    }
    // Unit by unit, so that keys stay in a cache. In the last wave short tiles come last, to balance threads.
    const auto place = [&](const Item &item) {
        const bool waits = end == units_.size() && keys(item) * short_tile < units_[item.unit].longest;
        return waits ? end : item.unit;
    };
    std::stable_sort(order.begin(), order.end(), [&](const Item &x, const Item &y) {
        const std::size_t first = place(x), second = place(y);
        return first != second ? first < second : keys(x) > keys(y);
    });
    std::vector<bool> listed(runs_ - units_[first].runs);
    std::vector<std::pair<std::size_t, Item>> placed;
    for (Item &item : order) {
        for (std::size_t r = item.first; r < item.end; ++r) {
            if (listed[r - units_[first].runs]) continue;
            listed[r - units_[first].runs] = true;
            const std::size_t panel0 = (r - units_[item.unit].runs) * run_panels;
            placed.push_back({placed.size(), {item.unit, packs, panel0, r, r + 1}});
        }
        for (std::int64_t h = 0; h < group; ++h, ++item.head) placed.push_back({placed.size() + ahead, item});
    }
    items_.resize(items_.size() + placed.size());
    put_in_order(placed, items_, items_.size() - placed.size());
    wave_ends_.push_back(items_.size());
}

// True if each unit is computed by one thread: all are small, and threads that take them by length are balanced. Of the
// first k * threads + 1 units some thread has k + 1.
bool ForwardPlan::alone(int threads) const {
    if (unit_bytes_ > small_unit_) return false;
    const auto count = static_cast<std::size_t>(threads);
    // Plans do not read blocked tiles, so the lengths of units are unknown and only many units are balanced.
    if (threads > 1 && problem_.has_blocked_tiles && works_.size() < fair_share * count) return false;
    double longest = 0;
    for (std::size_t k = 0; k < fair_share && k * count < works_.size(); ++k) {
        longest = std::max(longest, static_cast<double>(k + 1) * works_[k * count]);
    }
    return longest * threads <= work_ * (1 + 1.0 / fair_share);
}

// The number of consecutive units of a chain that a thread takes at a time, as many as keep threads balanced.
std::size_t ForwardPlan::segment(std::size_t team) const {
    std::size_t length = std::min(most_segment, longest_chain_);
    for (; team > 1 && length > 1; --length) {
        double longest = 0;
        std::size_t count = 0;
        for (std::size_t u = 0; u < units_.size(); ++count) {
            double work = 0;
            for (const std::size_t end = u + std::min(units_[u].left, length); u < end; ++u) work += units_[u].work;
            longest = std::max(longest, work);
        }
        // This many rounds of the longest segment, or enough items of work that their lengths do not matter.
        const auto rounds =
            std::min(static_cast<double>(ceil_div(count, team)) / (1 + 1.0 / fair_share), 1.0 * fair_share);
        if (longest * rounds * static_cast<double>(team) <= work_) break;
    }
    return length;
}

// The number of units that a thread takes at a time: units of one chain, or heads of one sequence, as many as leave
// enough bundles for balanced threads. Statistics of neighbouring heads (and rows of narrow heads) may share cache
// lines, and a line that two threads write moves back and forth between their caches: that took a tenth to a third of
// the time of a mix of short packed sequences.
std::size_t ForwardPlan::bundle(const PlannedUnit &u, const Shared &shared) const {
    if (u.chain > 1) return std::min(u.left, shared.segment);
    const double most = work_ / static_cast<double>(fair_share * shared.team);
    auto heads = static_cast<std::size_t>(problem_.heads_kv);
    while (heads > 1 && (problem_.heads_kv % heads != 0 || static_cast<double>(heads) * u.work > most)) --heads;
    return heads;
}

// True if enough work is left for the other threads when a thread that computes a unit takes the next one early.
bool ForwardPlan::plenty(const PlannedUnit &u, const Shared &shared) const {
    const std::size_t next = shared.next;
    if (next >= units_.size()) return false;
    const double then = units_[next].work * static_cast<double>(bundle(units_[next], shared));
    return (u.work + then) * static_cast<double>(shared.team) <= work_ - units_[next].before;
}

std::size_t ForwardPlan::team(int threads) const {
    const int worth = team_by_work(threads, all_work(), work_per_thread);
    return team_size(worth, static_cast<std::int64_t>(alone(worth) ? units_.size() : items_.size()));
}

// The number of waves that may be in memory at a time.
std::size_t ForwardPlan::slots() const {
    return std::min<std::size_t>(wave_ends_.size(), wave_bytes_ > most_packed / 2 ? 1 : 2);
}

std::size_t ForwardPlan::workspace_bytes(int threads) const {
    if (units_.empty()) return 0;
    const std::size_t count = team(threads);
    if (alone(static_cast<int>(count))) return count * (unit_bytes_ + scratch_bytes_);
    return slots() * wave_bytes_ + count * scratch_bytes_ + wave_ends_.size() * sizeof(std::atomic<std::int64_t>) +
           runs_ * sizeof(std::atomic<bool>);
}

std::int64_t ForwardPlan::run(const Operands &operands, int threads) const {
    return run(Job{&problem_, &operands, sequences_.data()}, threads);
}

std::int64_t ForwardPlan::run(const DecodeProblem &problem, const DecodeOperands &operands, int threads) const {
    require(static_cast<int>(problem.storage) == static_cast<int>(problem.dtype) &&
                problem.rounding == Rounding::none && problem.dropout == Dropout::none,
            "keys of a cache are stored in another form than the queries, or their results are");
    require(problem.heads_q == problem_.heads_q && problem.heads_kv == problem_.heads_kv &&
                problem.dim_qk == problem_.dim_qk && problem.dim_v == problem_.dim_v &&
                problem.dim_rope == problem_.dim_rope && problem.dtype == problem_.dtype,
            "the cache's problem is another one");
    Job job = {&problem, &operands, sequences_.data()};
    job.cache = &operands, job.common_keys = problem.common_keys;
    return run(job, threads);
}

void ForwardPlan::pack(const Job &job, const Unit &unit, std::int64_t first, std::int64_t end) const {
    (job.cache ? kernels_.pack_stored : kernels_.pack)(job, unit, first, end);
}

std::int64_t ForwardPlan::run(const Job &job, int threads) const {
    if (units_.empty()) return 0;
    const Lease memory = lease_for(threads, [&](int n) { return workspace_bytes(n); });
    const std::size_t count = team(threads);
    const bool independent = alone(static_cast<int>(count));
    char *const scratch = memory.data() + (independent ? count * unit_bytes_ : slots() * wave_bytes_);
    Shared shared{.job = job, .packed = memory.data(), .team = count};
    if (independent) {
        shared.segment = segment(count);
    } else {
        shared.left = reinterpret_cast<std::atomic<std::int64_t> *>(scratch + count * scratch_bytes_);
        shared.ready = reinterpret_cast<std::atomic<bool> *>(shared.left + wave_ends_.size());
        for (std::size_t w = 0, first = 0; w < wave_ends_.size(); first = wave_ends_[w++]) {
            new (shared.left + w) std::atomic<std::int64_t>(wave_ends_[w] - first);
        }
        for (std::size_t r = 0; r < runs_; ++r) new (shared.ready + r) std::atomic<bool>(false);
    }
    std::atomic<std::int64_t> empty = 0;
    run_team(static_cast<int>(count), time_alone(all_work(), work_per_thread), [&](const Team &team) {
        char *const mine = scratch + team.thread * scratch_bytes_;
        empty += independent ? work_alone(shared, team, shared.packed + team.thread * unit_bytes_, mine)
                             : work_together(shared, team, mine);
    });
    return empty;
}

// The next unit of a thread's bundle, or of a new one.
std::size_t ForwardPlan::take(Shared &shared, Bundle &taken) const {
    if (taken.first == taken.end) {
        taken.first = shared.next;
        do {
            taken.end = taken.first + (taken.first < units_.size() ? bundle(units_[taken.first], shared) : 1);
        } while (!shared.next.compare_exchange_weak(taken.first, taken.end));
    }
    return taken.first++;
}

// Computes units alone. Keys are packed as tiles need them. Memory of the next tile is prefetched during the current
// one, and the first keys of the next unit during the tiles after the last panel of the current unit is packed.
std::int64_t ForwardPlan::work_alone(Shared &shared, const Team &team, char *packed, void *scratch) const {
    const Job &job = shared.job;
    const std::int64_t group = group_of(problem_), panel = kernels_.panel;
    const Operands &o = *job.operands;
    const auto panels_to = [&](const Unit &unit, const Tile &tile) {
        return tile.begin < tile.end ? ceil_div(tile.end - unit.key_begin, panel) : 0;
    };
    const auto ask_queries = [&](Prefetches &ahead, std::int64_t head, const Tile &tile) {
        ahead.add(part_of(o.q, problem_.dtype, tile.seq, head, tile.row0, tile.row1, problem_.dim_qk));
    };
    const auto ask_keys = [&](Prefetches &ahead, const Unit &unit, std::int64_t from, std::int64_t to) {
        if (job.cache) return;
        ahead.add(part_of(o.k, problem_.dtype, unit.seq, unit.head, from, to, problem_.dim_qk));
        ahead.add(part_of(o.v, problem_.dtype, unit.seq, unit.head, from, to, problem_.dim_v));
    };
    Bundle taken;
    std::int64_t empty = 0, done = 0;  // done: packed panels of the unit
    Unit unit = {};
    for (std::size_t i = take(shared, taken), before = units_.size(), after; i < units_.size(); before = i, i = after) {
        // The next unit is taken now, to prefetch its memory, if enough are left for the other threads.
        const PlannedUnit &u = units_[i];
        const bool early = taken.first < taken.end || plenty(u, shared);
        after = early ? take(shared, taken) : units_.size();
        const bool goes_on = u.left > 1 && after == i + 1;
        const PlannedUnit *const then = after < units_.size() && !goes_on ? &units_[after] : nullptr;
        const std::int64_t all = (u.unit.key_end - u.unit.key_begin) / panel;
        done = begin_unit(u, before + 1 == i && units_[before].left > 1, packed, unit, done);
        std::int64_t slice = 0, slices = 0;  // tiles computed since all panels are packed, and their total
        for (std::size_t t = u.first; t < u.end; ++t) {
            const std::int64_t needed = panels_to(unit, tiles_[t]);
            if (done < needed) {
                pack(job, unit, done, needed);
                done = needed;
            }
            if (done == all && slices == 0) slices = static_cast<std::int64_t>(u.end - t) * group;
            for (std::int64_t h = 0; h < group; ++h) {
                if (team.cancelled()) return empty;
                Prefetches ahead;
                const bool last = h + 1 == group;
                if (!last || t + 1 < u.end || goes_on) {
                    const Tile &tile = tiles_[last ? t + 1 : t];
                    ask_queries(ahead, unit.head * group + (last ? 0 : h + 1), tile);
                    if (done < all || goes_on) ask_keys(ahead, unit, unit.key_begin + done * panel, tile.end);
                } else if (then) {
                    ask_queries(ahead, then->unit.head * group, tiles_[then->first]);
                }
                if (slices && then) {
                    const Tile &tile = tiles_[then->first];
                    const std::int64_t keys = tile.begin < tile.end ? tile.end - then->unit.key_begin : 0;
                    const std::int64_t from = then->unit.key_begin + keys * slice / slices;
                    ask_keys(ahead, then->unit, from, then->unit.key_begin + keys * (slice + 1) / slices);
                }
                slice += slices > 0;
                empty += kernels_.attend(job, unit, unit.head * group + h, tiles_[t], ahead, scratch);
            }
        }
        if (!early) after = take(shared, taken);
    }
    return empty;
}

// Turns `unit`, of which `done` panels are packed, into `next`; returns the number of its panels that are already
// packed. All units of a chain have the memory layout of the longest one.
std::int64_t ForwardPlan::begin_unit(const PlannedUnit &next, bool goes_on, char *packed, Unit &unit,
                                     std::int64_t done) const {
    const Unit before = unit;
    unit = next.unit;
    unit.packed = packed;
    unit.key_end = unit.key_begin + next.capacity;
    const std::int64_t gone = (unit.key_begin - before.key_begin) / kernels_.panel;
    if (!goes_on || gone < 0 || gone >= done) return 0;
    kernels_.carry(problem_, before, unit, done - gone);
    return done - gone;
}

// Called by every thread of a team. Items are taken in order, and packing waits for earlier waves only, so no item
// waits forever.
std::int64_t ForwardPlan::work_together(Shared &shared, const Team &team, void *scratch) const {
    std::int64_t empty = 0;
    std::size_t wave = 0;
    for (std::size_t i; (i = team.take(shared.next)) < items_.size();) {
        while (i >= wave_ends_[wave]) ++wave;
        empty += do_item(items_[i], wave, shared, team, scratch);
        if (team.cancelled()) break;  // perhaps in the middle of the item
        shared.left[wave].fetch_sub(1, std::memory_order_acq_rel);
    }
    return empty;
}

std::int64_t ForwardPlan::do_item(const Item &item, std::size_t wave, Shared &shared, const Team &team,
                                  void *scratch) const {
    Unit unit = units_[item.unit].unit;
    unit.packed = shared.packed + wave % slots() * wave_bytes_ + units_[item.unit].offset;
    if (item.head == packs) {
        if (wave >= slots()) {  // the wave that used this memory before is finished
            const std::atomic<std::int64_t> &left = shared.left[wave - slots()];
            if (!team.wait_until([&] { return left.load(std::memory_order_acquire) == 0; })) return 0;
        }
        const std::int64_t first = static_cast<std::int64_t>(item.at),
                           panels = (unit.key_end - unit.key_begin) / kernels_.panel;
        pack(shared.job, unit, first, std::min(first + run_panels, panels));
        shared.ready[item.first].store(true, std::memory_order_release);
        return 0;
    }
    for (std::size_t r = item.first; r < item.end; ++r) {
        if (!team.wait_until([&] { return shared.ready[r].load(std::memory_order_acquire); })) return 0;
    }
    return kernels_.attend(shared.job, unit, item.head, tiles_[item.at], Prefetches{}, scratch);
}

}  // namespace fusion
