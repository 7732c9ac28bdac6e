#include "plan/indexer.h"

#include "plan/arena.h"
#include "plan/schedule.h"
#include "plan/team.h"

#include <algorithm>
#include <utility>

namespace fusion {
namespace {

// Most bytes of packed keys in memory at a time, unless one sequence has more.
constexpr std::size_t wave_bytes = std::size_t{64} << 20;
constexpr std::int64_t panels_per_item = 16;
constexpr std::int64_t keys_per_share = 512;  // keys of a row per thread if threads share rows: a chunk of the kernels
// Number of rows of a sequence up to which packing panel by panel, repeated for every tile of rows, is cheaper than
// packing all keys to memory.
constexpr std::int64_t few_rows = index_tile_rows;
constexpr std::size_t unpacked = ~std::size_t{0};  // offset of keys that are packed panel by panel

constexpr Require require{"indexer"};

}  // namespace

IndexerPlan::IndexerPlan(const SparseVariant &variant, const SparseProblem &problem, std::vector<Sequence> sequences)
    : kernels_(variant.kernels(problem.dtype)), panel_(kernels_.panel), problem_(problem),
      sequences_(std::move(sequences)) {
    require(problem_.heads_q > 0 && problem_.dim_qk > 0 && problem_.select_count >= 0 && problem_.ratio > 0,
            "a size is not positive");
    std::int64_t rows = 0;
    std::size_t used = 0;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        const Sequence &seq = sequences_[b];
        require.lengths(seq);
        require(seq.kv_len < std::int64_t{1} << 30 && problem_.select_count < std::int64_t{1} << 30, "too many keys");
        const bool packs = seq.q_len > few_rows;
        const std::size_t bytes = packs ? kernels_.index_packed_bytes(problem_, seq.kv_len) : 0;
        if (waves_.empty() || (used && used + bytes > wave_bytes)) {
            waves_.push_back({b, b, 0, 0});
            used = 0;
        }
        Wave &wave = waves_.back();
        wave.end = b + 1;
        wave.rows += seq.q_len;
        wave.longest = std::max(wave.longest, seq.kv_len);
        first_row_.push_back(rows);
        offset_.push_back(packs ? used : unpacked);
        rows += seq.q_len;
        used += bytes;
        packed_bytes_ = std::max(packed_bytes_, used);
    }
    first_row_.push_back(rows);
    scratch_bytes_ = kernels_.index_scratch_bytes(problem_, index_tile_rows);
}

// True if threads share the keys of a row, because there are few rows.
bool IndexerPlan::shares_rows(const Wave &wave, int threads) const {
    return problem_.select_count && threads > 1 && wave.rows <= 4 * static_cast<std::int64_t>(threads);
}

std::size_t IndexerPlan::scores_bytes(int threads) const {
    std::size_t bytes = 0;
    for (const Wave &wave : waves_) {
        if (!shares_rows(wave, threads)) continue;
        const std::int64_t row = round_up(wave.longest, keys_per_share);
        bytes = std::max(bytes, static_cast<std::size_t>(wave.rows * row) * sizeof(float));
    }
    return bytes;
}

std::size_t IndexerPlan::workspace_bytes(int threads) const {
    return packed_bytes_ + scores_bytes(threads) + scratch_bytes_ * static_cast<std::size_t>(threads);
}

void IndexerPlan::run(const SparseOperands &operands, int threads) const {
    const SparseJob job = {&problem_, &operands, sequences_.data()};
    const Lease memory = lease_for(threads, [&](int n) { return workspace_bytes(n); });
    char *const packed = memory.data(), *const scores = packed + packed_bytes_,
                *const scratch = scores + scores_bytes(threads);
    std::vector<std::vector<Tile>> tiles;  // per wave
    tiles.reserve(waves_.size());
    for (const Wave &wave : waves_) tiles.push_back(divide(wave, threads));
    run_team(threads, never_alone, [&](const Team &team) {
        char *const thread_scratch = scratch + scratch_bytes_ * team.thread;
        for (std::size_t w = 0; w < waves_.size(); ++w) {
            pack(team, waves_[w], job, packed);
            if (shares_rows(waves_[w], threads)) {
                choose_together(team, waves_[w], tiles[w], job, packed, reinterpret_cast<float *>(scores),
                                thread_scratch);
            } else {
                choose(team, tiles[w], job, packed, thread_scratch);
            }
        }
    });
}

// Divides the rows of a wave into tiles, last rows first, because they take longest with a causal band. If few tiles
// are enough, all rows of a short sequence are one tile, which reads its keys from memory once.
std::vector<IndexerPlan::Tile> IndexerPlan::divide(const Wave &wave, int threads) const {
    const bool together = threads == 1 || shares_rows(wave, threads);
    const std::int64_t most = std::clamp<std::int64_t>(wave.rows / (4 * threads), 1, index_tile_rows);
    std::vector<Tile> tiles;
    for (std::size_t b = wave.end; b-- > wave.first;) {
        const std::int64_t size = together && offset_[b] == unpacked ? few_rows : most;
        for (std::int64_t end = sequences_[b].q_len; end > 0; end -= size) {
            tiles.push_back({static_cast<std::int64_t>(b), std::max<std::int64_t>(end - size, 0), end});
        }
    }
    return tiles;
}

const char *IndexerPlan::keys_of(std::int64_t b, const char *packed) const {
    return offset_[b] == unpacked ? nullptr : packed + offset_[b];
}

// Packs the keys of a wave; like the other steps of a wave, called by every thread of a team.
void IndexerPlan::pack(const Team &team, const Wave &wave, const SparseJob &job, char *packed) const {
    const std::int64_t blocks = ceil_div(ceil_div(wave.longest, panel_), panels_per_item);
    team.distribute(static_cast<std::int64_t>(wave.end - wave.first) * blocks, [&](std::int64_t i) {
        const std::size_t b = wave.first + static_cast<std::size_t>(i / blocks);
        const std::int64_t first = i % blocks * panels_per_item, end = ceil_div(sequences_[b].kv_len, panel_);
        if (offset_[b] == unpacked || first >= end) return;
        kernels_.index_pack(job, static_cast<std::int64_t>(b), first, std::min(first + panels_per_item, end),
                            packed + offset_[b]);
    });
}

void IndexerPlan::choose(const Team &team, const std::vector<Tile> &tiles, const SparseJob &job, const char *packed,
                         char *scratch) const {
    const auto compute = problem_.select_count ? kernels_.index_rows : kernels_.index_stats;
    team.distribute(tiles.size(), [&](std::size_t i) {
        const Tile &tile = tiles[i];
        compute(job, tile.seq, tile.row0, tile.row1, keys_of(tile.seq, packed), scratch);
    });
}

void IndexerPlan::choose_together(const Team &team, const Wave &wave, const std::vector<Tile> &tiles,
                                  const SparseJob &job, const char *packed, float *scores, char *scratch) const {
    const std::int64_t parts = ceil_div(wave.longest, keys_per_share), pitch = parts * keys_per_share;
    const std::int64_t first = first_row_[wave.first];
    team.distribute(static_cast<std::int64_t>(tiles.size()) * parts, [&](std::int64_t i) {
        const Tile &tile = tiles[static_cast<std::size_t>(i / parts)];
        const std::int64_t begin = i % parts * keys_per_share;
        const std::int64_t end = std::min(begin + keys_per_share, sequences_[tile.seq].kv_len);
        if (begin >= end) return;
        kernels_.index_scores(job, tile.seq, tile.row0, tile.row1, begin, end, begin + team.size * keys_per_share,
                              keys_of(tile.seq, packed), scores + (first_row_[tile.seq] + tile.row0 - first) * pitch,
                              pitch, scratch);
    });
    team.distribute(wave.rows, [&](std::int64_t i) {
        const std::int64_t b = sequence_of(first_row_, first + i);
        kernels_.index_choose(job, b, first + i - first_row_[b], scores + i * pitch, scratch);
    });
}

}  // namespace fusion
