#include "plan/forward.h"

#include "plan/arena.h"
#include "plan/schedule.h"
#include "plan/team.h"

#include <algorithm>
#include <new>
#include <utility>

namespace fusion {
namespace {

// Units up to this size are packed and met by one thread, out of its second-level cache, without waiting for anyone.
constexpr std::size_t small_unit = std::size_t{960} << 10;
// Larger ones are shared by all threads. What lies packed at a time bounds the memory for any batch.
constexpr std::size_t most_wave = std::size_t{32} << 20;
constexpr std::int64_t run_panels = 8;
// Items by which packing runs ahead of the tile that needs it, so that hardly a thread waits for another's.
constexpr std::size_t ahead = 8;
// Pieces of work for each thread, from which on their lengths do not matter: threads end together.
constexpr std::size_t fair_share = 16;

constexpr Require require{"forward"};

// Writes what has been given places to `to`, from `first` on, by place; what has the same stays in order.
template <class Place, class T>
void put_in_order(std::vector<std::pair<Place, T>> &placed, std::vector<T> &to, std::size_t first) {
    std::stable_sort(placed.begin(), placed.end(), [](const auto &x, const auto &y) { return x.first < y.first; });
    for (const auto &[place, thing] : placed) to[first++] = thing;
}

}  // namespace

ForwardPlan::ForwardPlan(const Variant &variant, const Problem &problem, std::vector<Sequence> sequences,
                         std::vector<Tile> tiles)
    : variant_(variant), kernels_(variant.kernels(problem.dtype)), problem_(problem), sequences_(std::move(sequences)),
      tiles_(std::move(tiles)) {
    check();
    scratch_bytes_ = kernels_.scratch_bytes(problem_);
    cut_units();
    list_items();
}

void ForwardPlan::check() const {
    const Problem &p = problem_;
    require.heads(p);
    require.dims(p.dim_qk > 0 && p.dim_v > 0 && p.dim_rope >= 0);
    require(p.keep_below >= 0 && p.keep_below <= 65536, "the threshold of dropout is outside 0 ... 65536");
    for (const Sequence &seq : sequences_) require.lengths(seq);
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

// Where a band is narrow a sequence becomes several small units, which pack the keys between two of them twice.
void ForwardPlan::cut_units() {
    const std::int64_t panel = variant_.panel;
    for (std::size_t first = 0, end; first < tiles_.size(); first = end) {
        PlannedUnit piece = {{tiles_[first].seq, 0, 0, 0, nullptr}, first, 0, 0, 0};
        std::int64_t widest = 0;
        const auto grow = [&](const Tile &tile) {  // by the keys of one more tile, unless the piece leaves a cache
            if (tile.begin == tile.end) return true;
            Unit grown = piece.unit;
            const bool bare = grown.key_begin == grown.key_end;
            grown.key_begin = std::min(bare ? tile.begin : grown.key_begin, tile.begin) / panel * panel;
            grown.key_end = std::max(grown.key_end, round_up(tile.end, panel));
            const std::size_t bytes = kernels_.packed_bytes(problem_, grown);
            const std::int64_t wider = std::max(widest, tile.end - tile.begin);
            const bool leaves = piece.bytes <= small_unit && bytes > small_unit;
            if (leaves && 4 * wider < piece.unit.key_end - piece.unit.key_begin) return false;
            piece.unit = grown;
            piece.bytes = bytes;
            widest = wider;
            return true;
        };
        for (end = first; end < tiles_.size() && tiles_[end].seq == tiles_[first].seq && grow(tiles_[end]);) ++end;
        piece.end = end;
        for (piece.unit.head = 0; piece.unit.head < problem_.heads_kv; ++piece.unit.head) units_.push_back(piece);
    }
    const auto load = [&](const PlannedUnit &u) {
        std::int64_t pairs = 0;
        for (std::size_t t = u.first; t < u.end; ++t)
            pairs += (tiles_[t].row1 - tiles_[t].row0) * (tiles_[t].end - tiles_[t].begin);
        return pairs;
    };
    // Long ones first: short work at the end keeps threads level.
    std::vector<std::pair<std::int64_t, PlannedUnit>> placed;
    placed.reserve(units_.size());
    for (const PlannedUnit &u : units_) placed.emplace_back(-load(u), u);
    put_in_order(placed, units_, 0);
}

void ForwardPlan::list_items() {
    std::size_t count = 0;
    for (const PlannedUnit &u : units_) {
        count += (u.end - u.first) * (problem_.heads_q / problem_.heads_kv) + runs_of(u);
        refuse_endless(static_cast<std::int64_t>(count));
    }
    items_.reserve(count);
    std::size_t used = 0;
    for (std::size_t u = 0; u < units_.size(); ++u) {
        if (used > 0 && used + units_[u].bytes > most_wave) {
            wave_ends_.push_back(items_.size());
            used = 0;
        }
        units_[u].offset = used;
        used += units_[u].bytes;
        wave_bytes_ = std::max(wave_bytes_, used);
        unit_bytes_ = std::max(unit_bytes_, units_[u].bytes);
        add_items(u);
    }
    wave_ends_.push_back(items_.size());
    std::size_t first = 0;
    for (const std::size_t end : wave_ends_) {
        std::vector<std::pair<std::size_t, Item>> placed;
        for (; first < end; ++first)
            placed.emplace_back(first + (items_[first].head == packs ? 0 : ahead), items_[first]);
        put_in_order(placed, items_, end - placed.size());
    }
}

std::size_t ForwardPlan::runs_of(const PlannedUnit &u) const {
    const std::int64_t run_keys = run_panels * variant_.panel;
    return ceil_div(u.unit.key_end - u.unit.key_begin, run_keys);
}

// The tiles of a unit, long ones first, and before each the packing that it needs and no tile before it needed.
void ForwardPlan::add_items(std::size_t unit) {
    const PlannedUnit &u = units_[unit];
    const std::int64_t run_keys = run_panels * variant_.panel, group = problem_.heads_q / problem_.heads_kv;
    std::vector<std::size_t> order;
    for (std::size_t t = u.first; t < u.end; ++t) order.push_back(t);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) {
        return tiles_[x].end - tiles_[x].begin > tiles_[y].end - tiles_[y].begin;
    });
    std::vector<bool> listed(runs_of(u));
    for (const std::size_t t : order) {
        const Tile &tile = tiles_[t];
        const bool bare = tile.begin == tile.end;
        const std::size_t first = bare ? 0 : (tile.begin - u.unit.key_begin) / run_keys;
        const std::size_t end = bare ? 0 : ceil_div(tile.end - u.unit.key_begin, run_keys);
        for (std::size_t r = first; r < end; ++r) {
            if (!listed[r]) items_.push_back({unit, packs, r * run_panels, runs_ + r, runs_ + r + 1});
            listed[r] = true;
        }
        for (std::int64_t h = 0; h < group; ++h) {
            items_.push_back({unit, u.unit.head * group + h, t, runs_ + first, runs_ + end});
        }
    }
    runs_ += listed.size();
}

// Whether each unit belongs to one thread: all are small, and there are many, or as many for one thread as for another.
bool ForwardPlan::alone(int threads) const {
    const auto count = static_cast<std::size_t>(threads);
    return unit_bytes_ <= small_unit && (units_.size() >= fair_share * count || units_.size() % count == 0);
}

// How many units a thread takes at a time: heads of one sequence, as many as leave threads enough bundles to end
// together. Their statistics may lie in the same cache lines, as their rows do where heads are narrow, and a line that
// two threads write goes to and fro between them: that was a tenth to a third of the time of a mix of short packed
// sequences.
std::size_t ForwardPlan::bundle(std::size_t team) const {
    auto heads = static_cast<std::size_t>(problem_.heads_kv);
    while (problem_.heads_kv % heads != 0 || units_.size() < fair_share * team * heads) {
        if (--heads <= 1) return 1;
    }
    return heads;
}

std::size_t ForwardPlan::team(int threads) const {
    return std::clamp<std::size_t>(threads, 1, alone(threads) ? units_.size() : items_.size());
}

std::size_t ForwardPlan::workspace_bytes(int threads) const {
    if (units_.empty()) return 0;
    if (alone(threads)) return team(threads) * (unit_bytes_ + scratch_bytes_);
    return wave_bytes_ + team(threads) * scratch_bytes_ + runs_ * sizeof(std::atomic<bool>);
}

std::int64_t ForwardPlan::run(const Operands &operands, int threads) const {
    if (units_.empty()) return 0;
    const Job job = {&problem_, &operands, sequences_.data()};
    const Lease memory = lease_for(threads, [&](int n) { return workspace_bytes(n); });
    const std::size_t count = team(threads);
    const bool own = alone(threads);
    char *const packed = memory.data(), *const scratch = packed + (own ? count * unit_bytes_ : wave_bytes_);
    // Of each run: is packed.
    auto *const ready = reinterpret_cast<std::atomic<bool> *>(scratch + count * scratch_bytes_);
    for (std::size_t r = 0; !own && r < runs_; ++r) new (ready + r) std::atomic<bool>(false);
    std::atomic<std::size_t> next = 0;  // the first unit or item that no thread has taken
    const std::size_t together = bundle(count);
    std::atomic<std::int64_t> empty = 0;
    run_team(static_cast<int>(count), [&](const Team &team) {
        char *const mine = scratch + team.thread * scratch_bytes_;
        empty += own ? work_alone(job, team, next, together, packed + team.thread * unit_bytes_, mine)
                     : work_together(job, team, next, ready, packed, mine);
    });
    return empty;
}

// Keys are packed as the tiles come to them. What the next tile reads is asked for during this one, and the next unit's
// first keys during all tiles that need no more of this one's.
std::int64_t ForwardPlan::work_alone(const Job &job, const Team &team, std::atomic<std::size_t> &next,
                                     std::size_t bundle, char *packed, void *scratch) const {
    const std::int64_t group = problem_.heads_q / problem_.heads_kv, panel = variant_.panel;
    const Operands &o = *job.operands;
    const auto panels_to = [&](const PlannedUnit &u, const Tile &tile) {
        return tile.begin < tile.end ? ceil_div(tile.end - u.unit.key_begin, panel) : 0;
    };
    const auto ask_keys = [&](Prefetches &ahead, const Unit &unit, std::int64_t from, std::int64_t to) {
        ahead.add(part_of(o.k, problem_.dtype, unit.seq, unit.head, from, to, problem_.dim_qk));
        ahead.add(part_of(o.v, problem_.dtype, unit.seq, unit.head, from, to, problem_.dim_v));
    };
    std::size_t taken = 0, end = 0;  // what is left of a bundle
    const auto take = [&] {
        if (taken == end) end = (taken = next.fetch_add(bundle)) + bundle;
        return taken++;
    };
    std::int64_t empty = 0;
    for (std::size_t i = take(), after; i < units_.size(); i = after) {
        after = take();
        const PlannedUnit &u = units_[i], *const then = after < units_.size() ? &units_[after] : nullptr;
        const std::int64_t all = (u.unit.key_end - u.unit.key_begin) / panel;
        Unit unit = u.unit;
        unit.packed = packed;
        std::int64_t done = 0, slice = 0, slices = 0;  // panels; tiles since all are packed, and from then on
        for (std::size_t t = u.first; t < u.end; ++t) {
            const std::int64_t needed = panels_to(u, tiles_[t]);
            if (done < needed) {
                kernels_.pack(job, unit, done, needed);
                done = needed;
            }
            if (done == all && slices == 0) slices = (u.end - t) * group;
            for (std::int64_t h = 0; h < group; ++h) {
                if (team.cancelled()) return empty;
                Prefetches ahead;
                const bool last = h + 1 == group, ends = last && t + 1 == u.end;
                if (!ends) {
                    const Tile &tile = tiles_[last ? t + 1 : t];
                    const std::int64_t head = unit.head * group + (last ? 0 : h + 1);
                    ahead.add(part_of(o.q, problem_.dtype, tile.seq, head, tile.row0, tile.row1, problem_.dim_qk));
                    if (done < all) ask_keys(ahead, unit, unit.key_begin + done * panel, tile.end);
                } else if (then) {
                    const Tile &tile = tiles_[then->first];
                    ahead.add(part_of(o.q, problem_.dtype, tile.seq, then->unit.head * group, tile.row0, tile.row1,
                                      problem_.dim_qk));
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
    }
    return empty;
}

// Called by every thread of a team. Items are taken in order and packing waits for nothing, so no tile waits for ever.
std::int64_t ForwardPlan::work_together(const Job &job, const Team &team, std::atomic<std::size_t> &next,
                                        std::atomic<bool> *ready, char *packed, void *scratch) const {
    std::int64_t empty = 0;
    std::size_t i = team.take(next);
    for (const std::size_t end : wave_ends_) {
        for (; i < end; i = team.take(next)) empty += do_item(items_[i], job, team, ready, packed, scratch);
        if (end < items_.size() && !team.barrier()) break;
    }
    return empty;
}

std::int64_t ForwardPlan::do_item(const Item &item, const Job &job, const Team &team, std::atomic<bool> *ready,
                                  char *packed, void *scratch) const {
    Unit unit = units_[item.unit].unit;
    unit.packed = packed + units_[item.unit].offset;
    if (item.head == packs) {
        const std::int64_t first = static_cast<std::int64_t>(item.at),
                           panels = (unit.key_end - unit.key_begin) / variant_.panel;
        kernels_.pack(job, unit, first, std::min(first + run_panels, panels));
        ready[item.first].store(true, std::memory_order_release);
        return 0;
    }
    for (std::size_t r = item.first; r < item.end; ++r) {
        if (!team.wait_until([&] { return ready[r].load(std::memory_order_acquire); })) return 0;
    }
    return kernels_.attend(job, unit, item.head, tiles_[item.at], Prefetches{}, scratch);
}

}  // namespace fusion
