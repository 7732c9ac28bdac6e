#include "forward_plan.h"

#include "arena.h"
#include "denormals.h"

#include <omp.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace fusion {
namespace {

// Keys and values packed at a time: they stay in a last-level cache, memory stays bounded for any batch, and between two
// waves threads wait for at most one tile.
constexpr std::size_t wave_bytes = std::size_t{32} << 20;
constexpr std::int64_t panels_per_item = 8;

std::int64_t up_to(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

void require(bool holds, const char *what) {
    if (!holds) throw std::invalid_argument(std::string("fusion_attention: native forward: ") + what);
}

// The unit that an item belongs to: starts[u] <= item < starts[u + 1].
std::size_t find(const std::vector<std::int64_t> &starts, std::int64_t item) {
    return std::upper_bound(starts.begin(), starts.end(), item) - starts.begin() - 1;
}

}  // namespace

ForwardPlan::ForwardPlan(const Variant &variant, const Problem &problem, std::vector<Sequence> sequences,
                         std::vector<Tile> tiles)
    : variant_(variant), kernels_(variant.kernels(problem.dtype)), problem_(problem), sequences_(std::move(sequences)),
      tiles_(std::move(tiles)) {
    check();
    std::size_t at = 0;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        Sequence &seq = sequences_[b];
        first_tile_.push_back(at);
        seq.key_begin = seq.kv_len;
        seq.key_end = 0;
        for (; at < tiles_.size() && tiles_[at].seq == static_cast<std::int64_t>(b); ++at) {
            if (tiles_[at].begin == tiles_[at].end) continue;
            seq.key_begin = std::min(seq.key_begin, tiles_[at].begin);
            seq.key_end = std::max(seq.key_end, tiles_[at].end);
        }
        seq.key_begin = seq.key_begin / variant_.panel * variant_.panel;
        seq.key_end = std::max(seq.key_begin, up_to(seq.key_end, variant_.panel));
    }
    first_tile_.push_back(at);
    scratch_bytes_ = kernels_.scratch_bytes(problem_);
    cut_waves();
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
    const std::int64_t group = problem_.heads_q / problem_.heads_kv;
    std::size_t used = 0;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        const std::size_t bytes = kernels_.packed_bytes(problem_, sequences_[b]);
        const auto tiles = static_cast<std::int64_t>(first_tile_[b + 1] - first_tile_[b]);
        const std::int64_t panels = (sequences_[b].key_end - sequences_[b].key_begin) / variant_.panel;
        for (std::int64_t head = 0; tiles && head < problem_.heads_kv; ++head) {
            if (waves_.empty() || used + bytes > wave_bytes) {
                waves_.push_back({units_.size(), units_.size(), {0}, {0}});
                used = 0;
            }
            Wave &wave = waves_.back();
            units_.push_back({static_cast<std::int64_t>(b), head, used});
            used += bytes;
            packed_bytes_ = std::max(packed_bytes_, used);
            ++wave.end;
            wave.pack_start.push_back(wave.pack_start.back() + (panels + panels_per_item - 1) / panels_per_item);
            wave.tile_start.push_back(wave.tile_start.back() + group * tiles);
            most_items_ = std::max({most_items_, wave.pack_start.back(), wave.tile_start.back()});
        }
    }
}

std::size_t ForwardPlan::workspace_bytes(int threads) const {
    if (units_.empty()) return 0;
    return packed_bytes_ + scratch_bytes_ * static_cast<std::size_t>(std::clamp<std::int64_t>(threads, 1, most_items_));
}

std::int64_t ForwardPlan::run(const Operands &operands, int threads) const {
    if (units_.empty()) return 0;
    const Job job = {&problem_, &operands, sequences_.data()};
    const Lease memory(workspace_bytes(threads));
    char *const packed = memory.data(), *const scratch = packed + packed_bytes_;
    const int team = static_cast<int>(std::clamp<std::int64_t>(threads, 1, most_items_));
    std::int64_t empty = 0;
#pragma omp parallel num_threads(team) reduction(+ : empty)
    {
        const FlushDenormals flushed;
        void *const own = scratch + scratch_bytes_ * static_cast<std::size_t>(omp_get_thread_num());
        for (const Wave &wave : waves_) run_wave(wave, job, packed, own, empty);
    }
    return empty;
}

// Called by every thread of a team.
void ForwardPlan::run_wave(const Wave &wave, const Job &job, char *packed, void *scratch, std::int64_t &empty) const {
    const auto unit_at = [&](std::size_t u) {
        const PlannedUnit &planned = units_[wave.first + u];
        return Unit{planned.seq, planned.head, packed + planned.offset};
    };
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t item = 0; item < wave.pack_start.back(); ++item) {
        const std::size_t u = find(wave.pack_start, item);
        const Unit unit = unit_at(u);
        const Sequence &seq = sequences_[unit.seq];
        const std::int64_t first = (item - wave.pack_start[u]) * panels_per_item;
        const std::int64_t panels = (seq.key_end - seq.key_begin) / variant_.panel;
        kernels_.pack(job, unit, first, std::min(first + panels_per_item, panels));
    }
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t item = 0; item < wave.tile_start.back(); ++item) {
        const std::size_t u = find(wave.tile_start, item);
        const Unit unit = unit_at(u);
        const auto tiles = static_cast<std::int64_t>(first_tile_[unit.seq + 1] - first_tile_[unit.seq]);
        const std::int64_t own = item - wave.tile_start[u];
        const std::int64_t head = unit.head * (problem_.heads_q / problem_.heads_kv) + own / tiles;
        // Last rows first: under a causal band they take longest, and short items at the end keep threads level.
        const Tile &tile = tiles_[first_tile_[unit.seq] + (tiles - 1 - own % tiles)];
        empty += kernels_.attend(job, unit, head, tile, scratch);
    }
}

}  // namespace fusion
