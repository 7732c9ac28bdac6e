#include "forward_plan.h"

#include "arena.h"
#include "denormals.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace fusion {
namespace {

// Keys and values that lie packed at a time: memory stays bounded for any batch, and between two waves threads wait for at
// most one tile.
constexpr std::size_t wave_bytes = std::size_t{32} << 20;
constexpr std::int64_t run_panels = 8;
// Items by which packing runs ahead of the tile that needs it, so that no thread waits for another's.
constexpr std::size_t ahead = 8;

std::int64_t up_to(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

void require(bool holds, const char *what) {
    if (!holds) throw std::invalid_argument(std::string("fusion_attention: native forward: ") + what);
}

}  // namespace

ForwardPlan::ForwardPlan(const Variant &variant, const Problem &problem, std::vector<Sequence> sequences,
                         std::vector<Tile> tiles)
    : variant_(variant), kernels_(variant.kernels(problem.dtype)), problem_(problem), sequences_(std::move(sequences)),
      tiles_(std::move(tiles)) {
    check();
    for (Sequence &seq : sequences_) {
        seq.key_begin = seq.kv_len;
        seq.key_end = 0;
    }
    for (const Tile &tile : tiles_) {
        if (tile.begin == tile.end) continue;
        Sequence &seq = sequences_[tile.seq];
        seq.key_begin = std::min(seq.key_begin, tile.begin);
        seq.key_end = std::max(seq.key_end, tile.end);
    }
    for (Sequence &seq : sequences_) {
        seq.key_begin = seq.key_begin / variant_.panel * variant_.panel;
        seq.key_end = std::max(seq.key_begin, up_to(seq.key_end, variant_.panel));
    }
    scratch_bytes_ = kernels_.scratch_bytes(problem_);
    cut_waves();
    shared_bytes_ = up_to(waves_.size() * sizeof(std::atomic<std::size_t>) + runs_ * sizeof(std::atomic<bool>), 64);
}

void ForwardPlan::check() const {
    const Problem &p = problem_;
    require(p.heads_q > 0 && p.heads_kv > 0 && p.heads_q % p.heads_kv == 0, "heads_q is no multiple of heads_kv");
    require(p.dim_qk > 0 && p.dim_v > 0 && p.dim_rope >= 0, "a head dim is not positive");
    require(p.keep_below >= 0 && p.keep_below <= 65536, "the threshold of dropout is outside 0 ... 65536");
    for (const Sequence &seq : sequences_) require(seq.q_len >= 0 && seq.kv_len >= 0, "a length is negative");
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

void ForwardPlan::cut_waves() {
    std::size_t used = 0, at = 0;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        std::vector<std::size_t> tiles;
        for (; at < tiles_.size() && tiles_[at].seq == static_cast<std::int64_t>(b); ++at) tiles.push_back(at);
        // Long tiles first: short items at the end keep threads level. Equal ones in order: neighbours share keys.
        std::stable_sort(tiles.begin(), tiles.end(), [&](std::size_t x, std::size_t y) {
            return tiles_[x].end - tiles_[x].begin > tiles_[y].end - tiles_[y].begin;
        });
        const std::size_t bytes = kernels_.packed_bytes(problem_, sequences_[b]);
        for (std::int64_t head = 0; !tiles.empty() && head < problem_.heads_kv; ++head) {
            if (waves_.empty() || used + bytes > wave_bytes) {
                waves_.push_back({items_.size(), items_.size()});
                used = 0;
            }
            units_.push_back({static_cast<std::int64_t>(b), head, used});
            used += bytes;
            packed_bytes_ = std::max(packed_bytes_, used);
            add_items(units_.size() - 1, tiles);
            waves_.back().end = items_.size();
        }
    }
    for (const Wave &wave : waves_) {
        pack_ahead(wave);
        most_items_ = std::max(most_items_, wave.end - wave.first);
    }
}

// The tiles of a unit, and before each the packing that it needs and no tile before it needed.
void ForwardPlan::add_items(std::size_t unit, const std::vector<std::size_t> &tiles) {
    const PlannedUnit &u = units_[unit];
    const Sequence &seq = sequences_[u.seq];
    const std::int64_t run_keys = run_panels * variant_.panel, group = problem_.heads_q / problem_.heads_kv;
    std::vector<bool> listed(up_to(seq.key_end - seq.key_begin, run_keys) / run_keys);
    for (const std::size_t t : tiles) {
        const Tile &tile = tiles_[t];
        const bool keys = tile.begin < tile.end;
        const std::size_t first = keys ? (tile.begin - seq.key_begin) / run_keys : 0;
        const std::size_t end = keys ? (tile.end - seq.key_begin + run_keys - 1) / run_keys : 0;
        for (std::size_t r = first; r < end; ++r) {
            if (listed[r]) continue;
            listed[r] = true;
            items_.push_back({unit, packs, r * run_panels, runs_ + r, runs_ + r + 1});
        }
        for (std::int64_t h = 0; h < group; ++h) items_.push_back({unit, u.head * group + h, t, runs_ + first, runs_ + end});
    }
    runs_ += listed.size();
}

void ForwardPlan::pack_ahead(const Wave &wave) {
    std::vector<std::pair<std::size_t, Item>> placed;
    for (std::size_t i = wave.first; i < wave.end; ++i) {
        placed.emplace_back(i + (items_[i].head == packs ? 0 : ahead), items_[i]);
    }
    std::stable_sort(placed.begin(), placed.end(), [](const auto &x, const auto &y) { return x.first < y.first; });
    for (std::size_t i = wave.first; i < wave.end; ++i) items_[i] = placed[i - wave.first].second;
}

std::size_t ForwardPlan::workspace_bytes(int threads) const {
    if (units_.empty()) return 0;
    const auto team = std::clamp<std::size_t>(threads, 1, most_items_);
    return packed_bytes_ + shared_bytes_ + scratch_bytes_ * team;
}

struct ForwardPlan::Threads {
    char *packed;
    std::atomic<std::size_t> *next;  // of each wave: the first item that no thread has taken
    std::atomic<bool> *ready;        // of each run of panels: it is packed

    Threads(char *packed_, char *memory, const std::vector<Wave> &waves, std::size_t runs)
        : packed(packed_), next(reinterpret_cast<std::atomic<std::size_t> *>(memory)),
          ready(reinterpret_cast<std::atomic<bool> *>(next + waves.size())) {
        for (std::size_t w = 0; w < waves.size(); ++w) new (next + w) std::atomic<std::size_t>(waves[w].first);
        for (std::size_t r = 0; r < runs; ++r) new (ready + r) std::atomic<bool>(false);
    }
};

std::int64_t ForwardPlan::run(const Operands &operands, int threads) const {
    if (units_.empty()) return 0;
    const Job job = {&problem_, &operands, sequences_.data()};
    const Lease memory(workspace_bytes(threads));
    const Threads shared(memory.data(), memory.data() + packed_bytes_, waves_, runs_);
    char *const scratch = memory.data() + packed_bytes_ + shared_bytes_;
    const auto team = static_cast<int>(std::clamp<std::size_t>(threads, 1, most_items_));
    std::int64_t empty = 0;
#pragma omp parallel num_threads(team) reduction(+ : empty)
    {
        const FlushDenormals flushed;
        empty += work(job, shared, scratch + scratch_bytes_ * static_cast<std::size_t>(omp_get_thread_num()));
    }
    return empty;
}

// Called by every thread of a team. Items are taken in order and packing waits for nothing, so no tile waits for ever.
std::int64_t ForwardPlan::work(const Job &job, const Threads &shared, void *scratch) const {
    std::int64_t empty = 0;
    for (std::size_t w = 0; w < waves_.size(); ++w) {
        if (w > 0) {
#pragma omp barrier
        }
        for (std::size_t i = shared.next[w]++; i < waves_[w].end; i = shared.next[w]++) {
            empty += do_item(items_[i], job, shared, scratch);
        }
    }
    return empty;
}

std::int64_t ForwardPlan::do_item(const Item &item, const Job &job, const Threads &shared, void *scratch) const {
    const PlannedUnit &planned = units_[item.unit];
    const Unit unit = {planned.seq, planned.head, shared.packed + planned.offset};
    if (item.head == packs) {
        const Sequence &seq = sequences_[unit.seq];
        const std::int64_t first = static_cast<std::int64_t>(item.at), panels = (seq.key_end - seq.key_begin) / variant_.panel;
        kernels_.pack(job, unit, first, std::min(first + run_panels, panels));
        shared.ready[item.first].store(true, std::memory_order_release);
        return 0;
    }
    for (std::size_t r = item.first; r < item.end; ++r) {
        for (int turn = 0; !shared.ready[r].load(std::memory_order_acquire); ++turn) {
            if (turn > 1000) std::this_thread::yield();
        }
    }
    return kernels_.attend(job, unit, item.head, tiles_[item.at], scratch);
}

}  // namespace fusion
