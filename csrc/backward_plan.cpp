#include "backward_plan.h"

#include "arena.h"
#include "denormals.h"

#include <omp.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <thread>

namespace fusion {
namespace {

// Rows packed at a time, so that memory stays bounded for any batch.
constexpr std::size_t wave_bytes = std::size_t{32} << 20;

void require(bool holds, const char *what) {
    if (!holds) throw std::invalid_argument(std::string("fusion_attention: native backward: ") + what);
}

std::int64_t pieces(std::int64_t n, std::int64_t size) { return (n + size - 1) / size; }

// Until the counter has the value; who waits lets others run, since cores may be fewer than threads.
void wait_for(const std::atomic<std::int64_t> &counter, std::int64_t value) {
    for (int spins = 0; counter.load(std::memory_order_acquire) != value; ++spins) {
        if (spins > 64) std::this_thread::yield();
    }
}

}  // namespace

struct BackwardPlan::State {
    Job job;
    char *packed;
    bool ordered_dbias;  // units share elements of dbias: they add to a column in ascending order
    std::unique_ptr<std::atomic<std::int64_t>[]> turn;      // per tile of rows: the tile of keys that may add to it
    std::unique_ptr<std::atomic<std::int64_t>[]> finished;  // per tile of keys: how many units are done with it
    std::vector<RowNotes> notes;                            // per tile of rows
    std::vector<double> dsink;                              // per query head
    std::int64_t means = 0;
};

BackwardPlan::BackwardPlan(const Variant &variant, const Problem &problem, std::vector<Sequence> sequences)
    : variant_(variant), kernels_(variant.gradient_kernels(problem.dtype)), problem_(problem),
      sequences_(std::move(sequences)) {
    check();
    key_bytes_ = kernels_.key_bytes(problem_);
    tile_bytes_ = kernels_.row_bytes(problem_, gradient_rows);
    cut_waves();
}

void BackwardPlan::check() const {
    const Problem &p = problem_;
    require(p.heads_q > 0 && p.heads_kv > 0 && p.heads_q % p.heads_kv == 0, "heads_q is no multiple of heads_kv");
    require(p.dim_qk > 0 && p.dim_v > 0 && p.dim_rope >= 0, "a head dim is not positive");
    require(p.keep_below >= 0 && p.keep_below <= 65536, "the threshold of dropout is outside 0 ... 65536");
    for (const Sequence &seq : sequences_) require(seq.q_len >= 0 && seq.kv_len >= 0, "a length is negative");
}

void BackwardPlan::cut_waves() {
    const std::int64_t group = problem_.heads_q / problem_.heads_kv;
    std::size_t used = 0;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        const Sequence &seq = sequences_[b];
        const std::int64_t rows = pieces(seq.q_len, gradient_rows), keys = pieces(seq.kv_len, kernels_.tile_keys);
        const std::int64_t last = seq.q_len - (rows - 1) * gradient_rows;
        const std::size_t head_bytes = rows ? (rows - 1) * tile_bytes_ + kernels_.row_bytes(problem_, last) : 0;
        for (std::int64_t head = 0; (rows || keys) && head < problem_.heads_kv; ++head) {
            if (waves_.empty() || used + group * head_bytes > wave_bytes) {
                waves_.push_back({units_.size(), units_.size(), 0, unit_of_tile_.size()});
                used = 0;
            }
            Wave &wave = waves_.back();
            units_.push_back({static_cast<std::int64_t>(b), head, used, wave.row_tiles, rows, keys});
            unit_of_tile_.insert(unit_of_tile_.end(), group * rows, wave.end - wave.first);
            wave.row_tiles += group * rows;
            ++wave.end;
            used += group * head_bytes;
            packed_bytes_ = std::max(packed_bytes_, used);
            most_row_tiles_ = std::max(most_row_tiles_, wave.row_tiles);
            most_key_tiles_ = std::max(most_key_tiles_, keys);
            most_items_ = std::max<std::int64_t>(most_items_, (wave.end - wave.first) * std::max(keys, group * rows));
        }
    }
}

int BackwardPlan::team_of(int threads) const {
    return static_cast<int>(std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(most_items_, 1)));
}

std::size_t BackwardPlan::workspace_bytes(int threads) const {
    return units_.empty() ? 0 : packed_bytes_ + key_bytes_ * static_cast<std::size_t>(team_of(threads));
}

// A tile of rows of a unit, counted head after head.
RowTile BackwardPlan::row_tile(const PlannedUnit &unit, std::int64_t index, char *packed) const {
    const std::int64_t head = index / unit.row_tiles, row0 = index % unit.row_tiles * gradient_rows;
    const std::int64_t q_len = sequences_[unit.seq].q_len;
    const std::int64_t last = q_len - (unit.row_tiles - 1) * gradient_rows;
    const std::size_t head_bytes = (unit.row_tiles - 1) * tile_bytes_ + kernels_.row_bytes(problem_, last);
    char *const memory = packed + unit.offset + head * head_bytes + row0 / gradient_rows * tile_bytes_;
    const std::int64_t group = problem_.heads_q / problem_.heads_kv;
    return {unit.seq, unit.head * group + head, row0, std::min(row0 + gradient_rows, q_len), memory};
}

// The tiles of keys [first, end) that some of the rows may see.
void BackwardPlan::meeting(const Sequence &seq, std::int64_t row0, std::int64_t row1, std::int64_t &first,
                           std::int64_t &end) const {
    const std::int64_t begin_key = std::max<std::int64_t>(row0 + seq.lo, 0);
    const std::int64_t end_key = std::min(std::max(row1 - 1 + seq.hi, seq.prefix), seq.kv_len);
    first = end = 0;
    if (end_key <= begin_key) return;
    first = begin_key / kernels_.tile_keys;
    end = pieces(end_key, kernels_.tile_keys);
}

// Units go abreast, as many as there are threads: two tiles of keys of one unit would wait for each other.
std::vector<BackwardPlan::Item> BackwardPlan::items_of(const Wave &wave, std::size_t abreast) const {
    std::vector<Item> items;
    std::vector<std::int64_t> ranks(most_key_tiles_, 0);
    for (std::size_t first = wave.first; first < wave.end; first += abreast) {
        const std::size_t end = std::min(first + abreast, wave.end);
        std::int64_t tiles = 0;
        for (std::size_t u = first; u < end; ++u) tiles = std::max(tiles, units_[u].key_tiles);
        for (std::int64_t t = 0; t < tiles; ++t) {
            for (std::size_t u = first; u < end; ++u) {
                if (t < units_[u].key_tiles) items.push_back({u, t, ranks[t]++});
            }
        }
    }
    return items;
}

// Whether every element of dbias gets its gradient from one pair of a row and a key alone.
bool BackwardPlan::owns_dbias(const Matrix &dbias) const {
    if (problem_.bias != Bias::matrix || dbias.stride_key == 0) return false;
    std::vector<std::int64_t> addresses;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        const Sequence &seq = sequences_[b];
        if (seq.q_len == 0 || seq.kv_len == 0) continue;
        if (seq.q_len > 1 && dbias.stride_row[b] == 0) return false;
        if (problem_.heads_q > 1 && dbias.stride_head[b] == 0) return false;
        addresses.push_back(dbias.address[b]);
    }
    std::sort(addresses.begin(), addresses.end());
    return std::adjacent_find(addresses.begin(), addresses.end()) == addresses.end();
}

std::int64_t BackwardPlan::run(const Operands &operands, const Gradients &gradients, int threads) const {
    State state = {};
    state.job = {&problem_, &operands, sequences_.data(), &gradients};
    state.ordered_dbias = gradients.dbias.base && !owns_dbias(gradients.dbias);
    // Keys that share an element leave no order but one after the other.
    const bool alone = state.ordered_dbias && (gradients.dbias.stride_key == 0 || problem_.bias == Bias::table);
    const int team = alone ? 1 : team_of(threads);
    const Lease memory(workspace_bytes(threads));
    state.packed = memory.data();
    char *const scratch = state.packed + packed_bytes_;
    state.turn = std::make_unique<std::atomic<std::int64_t>[]>(most_row_tiles_);
    state.finished = std::make_unique<std::atomic<std::int64_t>[]>(most_key_tiles_);
    state.notes.resize(most_row_tiles_);
    state.dsink.resize(problem_.heads_q);
    std::vector<std::vector<Item>> items;
    for (const Wave &wave : waves_) items.push_back(items_of(wave, state.ordered_dbias ? 1 : team));
    const auto next = std::make_unique<std::atomic<std::size_t>[]>(waves_.size());
#pragma omp parallel num_threads(team)
    {
        const FlushDenormals flushed;
        void *const own = scratch + key_bytes_ * static_cast<std::size_t>(omp_get_thread_num());
        for (std::size_t i = 0; i < waves_.size(); ++i) {
            pack(waves_[i], state);
            meet(items[i], next[i], state, own);
            store(waves_[i], state);
        }
    }
    for (std::int64_t h = 0; problem_.has_sink && h < problem_.heads_q; ++h) {
        gradients.dsink[h] = static_cast<float>(state.dsink[h]);
    }
    return state.means;
}

// The three parts of a wave are called by every thread of a team.

void BackwardPlan::pack(const Wave &wave, State &state) const {
    const std::size_t *const unit_of = unit_of_tile_.data() + wave.first_tile;
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t i = 0; i < wave.row_tiles; ++i) {
        const PlannedUnit &unit = units_[wave.first + unit_of[i]];
        const RowTile rows = row_tile(unit, i - unit.first_tile, state.packed);
        std::int64_t first, end;
        meeting(sequences_[unit.seq], rows.row0, rows.row1, first, end);
        state.turn[i].store(first, std::memory_order_relaxed);
        state.notes[i] = kernels_.pack_rows(state.job, rows);
    }
#pragma omp single
    {
        for (std::int64_t i = 0; i < wave.row_tiles; ++i) {
            const PlannedUnit &unit = units_[wave.first + unit_of[i]];
            state.dsink[row_tile(unit, i - unit.first_tile, state.packed).head] += state.notes[i].dsink;
            state.means += state.notes[i].means;
        }
        for (std::int64_t t = 0; t < most_key_tiles_; ++t) state.finished[t].store(0, std::memory_order_relaxed);
    }
}

void BackwardPlan::meet(const std::vector<Item> &items, std::atomic<std::size_t> &next, State &state,
                        void *scratch) const {
    // Items are taken in their order and wait for earlier ones alone, so the first unfinished one never waits.
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items.size();) {
        run_item(items[i], state, scratch);
    }
#pragma omp barrier
}

void BackwardPlan::run_item(const Item &item, State &state, void *scratch) const {
    const PlannedUnit &unit = units_[item.unit];
    const Sequence &seq = sequences_[unit.seq];
    const std::int64_t key0 = item.tile * kernels_.tile_keys;
    const KeyTile keys = {unit.seq, unit.head, key0, std::min(key0 + kernels_.tile_keys, seq.kv_len), scratch};
    kernels_.load_keys(state.job, keys);
    if (state.ordered_dbias) wait_for(state.finished[item.tile], item.rank);
    const std::int64_t tiles = problem_.heads_q / problem_.heads_kv * unit.row_tiles;
    for (std::int64_t i = 0; i < tiles; ++i) {
        const RowTile rows = row_tile(unit, i, state.packed);
        std::int64_t first, end;
        meeting(seq, rows.row0, rows.row1, first, end);
        if (item.tile < first || item.tile >= end) continue;
        std::atomic<std::int64_t> &turn = state.turn[unit.first_tile + i];
        wait_for(turn, item.tile);
        kernels_.meet(state.job, rows, keys);
        turn.store(item.tile + 1, std::memory_order_release);
    }
    if (state.ordered_dbias) state.finished[item.tile].store(item.rank + 1, std::memory_order_release);
    kernels_.store_keys(state.job, keys);
}

void BackwardPlan::store(const Wave &wave, State &state) const {
    const std::size_t *const unit_of = unit_of_tile_.data() + wave.first_tile;
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t i = 0; i < wave.row_tiles; ++i) {
        const PlannedUnit &unit = units_[wave.first + unit_of[i]];
        kernels_.store_rows(state.job, row_tile(unit, i - unit.first_tile, state.packed));
    }
}

}  // namespace fusion
