#include "plan/decode.h"

#include "plan/arena.h"
#include "plan/schedule.h"
#include "plan/team.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fusion {
namespace {

// Elements of work below which a second thread costs more than it brings.
constexpr std::int64_t work_per_thread = 1 << 16;

constexpr Require require{"decode"};

}  // namespace

DecodePlan::DecodePlan(const Variant &variant, const DecodeProblem &problem, std::vector<Sequence> sequences)
    : variant_(variant), problem_(problem), sequences_(std::move(sequences)) {
    const DecodeProblem &p = problem_;
    require.heads(p);
    require.dims(p.dim_qk > 0 && p.dim_v > 0 && p.dim_rope >= 0);
    require(p.dropout == Dropout::none, "dropout is none of its features");
    row_floats_ = variant_.decode.partial_floats(problem_);
    scratch_bytes_ = variant_.decode.scratch_bytes(problem_) + row_floats_ * decode_slots * sizeof(float);
    cut_units();
}

void DecodePlan::update(const std::int64_t *kv_len, const std::int64_t *lo, const std::int64_t *hi) {
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        sequences_[b].kv_len = kv_len[b];
        sequences_[b].lo = lo[b];
        sequences_[b].hi = hi[b];
    }
    cut_units();
}

void DecodePlan::cut_units() {
    const std::int64_t group = problem_.heads_q / problem_.heads_kv;
    units_.clear();
    merges_.clear();
    partial_floats_ = 0;
    pairs_ = 0;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
        require.lengths(sequences_[b]);
        const std::int64_t rows = sequences_[b].q_len * group;
        for (std::int64_t row = 0; row < rows; row += decode_rows) {
            cut_rows(static_cast<std::int64_t>(b), row, std::min(row + decode_rows, rows));
        }
    }
}

void DecodePlan::cut_rows(std::int64_t b, std::int64_t row0, std::int64_t row1) {
    const Sequence &seq = sequences_[b];
    const std::int64_t group = problem_.heads_q / problem_.heads_kv, heads = problem_.heads_kv;
    const std::int64_t first = row0 / group, last = (row1 - 1) / group;
    const bool sees = seq.hi > seq.lo || seq.prefix > 0;
    const std::int64_t begin = std::clamp<std::int64_t>(first + seq.lo, 0, seq.kv_len);
    const std::int64_t end = sees ? std::clamp(std::max(last + seq.hi, seq.prefix), begin, seq.kv_len) : begin;
    const std::int64_t chunk = decode_chunk(problem_), chunk0 = begin / chunk;
    const std::int64_t count = std::max<std::int64_t>(ceil_div(end, chunk) - chunk0, 1);
    refuse_endless(count * heads);
    const auto size = static_cast<std::int64_t>(row_floats_) * (row1 - row0);
    pairs_ += (end - begin) * (row1 - row0) * heads;
    const auto place = static_cast<std::int64_t>(partial_floats_);
    for (std::int64_t c = 0; c < count; ++c) {
        const std::int64_t from = std::max(begin, (chunk0 + c) * chunk);
        const std::int64_t to = std::min(end, (chunk0 + c + 1) * chunk);
        for (std::int64_t head = 0; head < heads; ++head) {
            units_.push_back({b, head, 1, row0, row1, from, to, count > 1 ? place + (c * heads + head) * size : -1});
        }
    }
    if (count == 1) return;
    partial_floats_ += static_cast<std::size_t>(count * heads * size);
    for (std::int64_t head = 0; head < heads; ++head) {
        merges_.push_back({b, head, row0, row1, place + head * size, heads * size, count});
    }
}

int DecodePlan::team(int threads) const {
    const std::int64_t work = pairs_ * (problem_.dim_qk + problem_.dim_rope + problem_.dim_v);
    const std::int64_t most =
        std::min<std::int64_t>(static_cast<std::int64_t>(units_.size()), 1 + work / work_per_thread);
    return team_size(threads, most);
}

std::size_t DecodePlan::workspace_bytes(int threads) const {
    const std::size_t partials = round_up(partial_floats_ * sizeof(float), cache_line);
    return units_.empty() ? 0 : partials + scratch_bytes_ * static_cast<std::size_t>(team(threads));
}

// Takes the next heads of one chunk, which lie side by side in a page; fewer when little is left, so that the last
// pieces are short.
DecodeUnit DecodePlan::take(std::atomic<std::size_t> &taken, int members) const {
    std::size_t first = taken.load(std::memory_order_relaxed);
    DecodeUnit unit;
    do {
        if (first >= units_.size()) return {0, 0, 0, 0, 0, 0, 0, 0};
        unit = units_[first];
        const auto left = static_cast<std::int64_t>(units_.size() - first) / (2 * members);
        const std::int64_t most = decode_slots / slots_of(unit.row1 - unit.row0);
        unit.heads = std::clamp<std::int64_t>(std::min(left, problem_.heads_kv - unit.head), 1, most);
    } while (
        !taken.compare_exchange_weak(first, first + static_cast<std::size_t>(unit.heads), std::memory_order_relaxed));
    return unit;
}

// Called by every thread of a team: takes units until none is left, always knowing the next one to fetch ahead.
std::int64_t DecodePlan::attend_units(const DecodeJob &job, const Team &team, char *own, float *partials,
                                      std::atomic<std::size_t> &taken, int members) const {
    // A unit's rows stay in this thread's cache while they are computed: what they go to was last written by any
    // thread.
    auto *const rows = reinterpret_cast<float *>(own);
    char *const scratch = own + row_floats_ * decode_slots * sizeof(float);
    std::int64_t empty = 0;
    DecodeUnit unit = take(taken, members);
    while (unit.heads && !team.cancelled()) {
        const DecodeUnit next = take(taken, members);
        variant_.decode.attend(job, unit, next.heads ? &next : nullptr, scratch, rows);
        const std::int64_t floats = (unit.row1 - unit.row0) * static_cast<std::int64_t>(row_floats_);
        if (unit.place < 0) {
            for (std::int64_t i = 0; i < unit.heads; ++i) {
                empty += variant_.decode.finish(job, {unit.seq, unit.head + i, unit.row0, unit.row1, i * floats, 0, 1},
                                                rows);
            }
        } else {
            std::memcpy(partials + unit.place, rows, static_cast<std::size_t>(unit.heads * floats) * sizeof(float));
        }
        unit = next;
    }
    return empty;
}

std::int64_t DecodePlan::run(const DecodeOperands &operands, int threads) const {
    if (units_.empty()) return 0;
    const DecodeJob job = {&problem_, &operands, sequences_.data()};
    const Lease memory = lease_for(threads, [&](int n) { return workspace_bytes(n); });
    const int members = team(threads);
    char *const scratch = memory.data();
    auto *const partials = reinterpret_cast<float *>(scratch + scratch_bytes_ * static_cast<std::size_t>(members));
    std::atomic<std::size_t> taken = 0;
    std::atomic<std::int64_t> empty = 0;
    run_team(members, [&](const Team &team) {
        empty += attend_units(job, team, scratch + scratch_bytes_ * team.thread, partials, taken, members);
        team.barrier();
        team.share(merges_.size(), [&](std::size_t i) { empty += variant_.decode.finish(job, merges_[i], partials); });
    });
    return empty;
}

}  // namespace fusion
