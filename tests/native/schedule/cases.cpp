#include "cases.h"

#include "kernels.h"
#include "kernel_times.h"

#include "plan/backward.h"
#include "plan/decode.h"
#include "plan/forward.h"
#include "plan/indexer.h"
#include "plan/sparse.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>

namespace schedule {
namespace {

using namespace fusion;

constexpr std::int64_t everything = std::int64_t{1} << 40;

std::vector<Sequence> sequences_of(const std::vector<std::int64_t> &lengths, std::int64_t lo, std::int64_t hi) {
    std::vector<Sequence> sequences;
    sequences.reserve(lengths.size());
    for (const std::int64_t n : lengths) sequences.push_back({n, n, lo, hi, 0, 0});
    return sequences;
}

// --------------------------------------------------------------------------------------------------------------- dense

struct Dense {
    const char *name;
    std::int64_t heads_q, heads_kv;
    std::vector<std::int64_t> lengths;
    std::int64_t lo = -everything, hi = everything;  // row i sees keys i + lo <= j < i + hi
    const std::int64_t *keys = nullptr;              // of each sequence, where there are not as many as rows
};

// A long-tailed mix of 100 sequences: 92 tokens on average.
std::vector<std::int64_t> mixed_lengths() {
    std::mt19937 random(17);
    std::vector<std::int64_t> lengths;
    for (int i = 0; i < 100; ++i) {
        const double u = (static_cast<double>(random()) + 1) * 0x1p-32;
        lengths.push_back(std::clamp<std::int64_t>(std::llround(-60 * std::log(u)) + 16, 16, 512));
    }
    std::sort(lengths.rbegin(), lengths.rend());
    lengths[0] = 1800;
    return lengths;
}

std::vector<Dense> dense() {
    using Lengths = std::vector<std::int64_t>;
    Lengths few(8, 100);
    few[0] = 1800;
    return {
        {"B1 N8 S1024", 8, 8, {1024}},
        {"B1 N8 S1024 causal", 8, 8, {1024}, -everything, 1},
        {"B1 N8 S2048", 8, 8, {2048}},
        {"B1 N8 S2048 causal", 8, 8, {2048}, -everything, 1},
        {"B1 N16 S1024", 16, 16, {1024}},
        {"B1 N64 S1024", 64, 64, {1024}},
        {"B1 N32/8 S2048 causal", 32, 8, {2048}, -everything, 1},
        {"B4 N32 S2048 causal", 32, 32, Lengths(4, 2048), -everything, 1},
        {"B8 N32 S4096", 32, 32, Lengths(8, 4096)},
        {"B8 N32 S4096 causal", 32, 32, Lengths(8, 4096), -everything, 1},
        {"B1 N1 S65536 causal", 1, 1, {65536}, -everything, 1},
        {"B1 N8 S16384 window 256", 8, 8, {16384}, -255, 1},
        {"packed 1800 + 64, N1", 1, 1, {1800, 64}},
        {"packed 1800 + 7 x 100, N8", 8, 8, few},
        {"packed mix of 100, N12", 12, 12, mixed_lengths()},
        {"packed 512 x 16, N12", 12, 12, Lengths(512, 16)},
    };
}

Problem problem_of(const Dense &d) {
    Problem p = {};
    p.heads_q = d.heads_q, p.heads_kv = d.heads_kv, p.dim_qk = p.dim_v = 128;
    p.dtype = Dtype::bfloat16;
    p.scale = p.keep_prob = 1;
    return p;
}

// As the forward is given them.
std::vector<Tile> tiles_of(const std::vector<Sequence> &sequences) {
    std::vector<Tile> tiles;
    for (std::size_t b = 0; b < sequences.size(); ++b) {
        const Sequence &s = sequences[b];
        for (std::int64_t row = 0; row < s.q_len; row += tile_rows) {
            const std::int64_t stop = std::min(row + tile_rows, s.q_len);
            const std::int64_t begin = first_key(s, row), end = std::max(end_key(s, stop - 1), begin);
            tiles.push_back({static_cast<std::int64_t>(b), row, stop, begin, end});
        }
    }
    return tiles;
}

// Addresses of rows: arbitrary, but plans add them up.
struct Addresses {
    std::vector<std::int64_t> zeros;

    explicit Addresses(std::size_t sequences) : zeros(sequences) {}
    Rows rows() const { return {nullptr, zeros.data(), zeros.data(), 0}; }
};

Run forward(const Dense &d) {
    const std::vector<Sequence> sequences = sequences_of(d.lengths, d.lo, d.hi);
    const auto plan = std::make_shared<ForwardPlan>(variant(), problem_of(d), sequences, tiles_of(sequences));
    const auto addresses = std::make_shared<Addresses>(sequences.size());
    return [=](int threads) {
        Operands o;
        o.q = o.k = o.v = o.out = addresses->rows();
        plan->run(o, threads);
    };
}

// The gradient of a bias that repeats along some axes of [batch, heads, rows, keys].
struct Shared {
    bool heads = false, rows = false, keys = false;  // have elements of their own
    Bias bias = Bias::matrix;
};

Run backward(const Dense &d, const Shared &shared = {.bias = Bias::none}) {
    std::vector<Sequence> sequences = sequences_of(d.lengths, d.lo, d.hi);
    for (std::size_t b = 0; d.keys && b < sequences.size(); ++b) sequences[b].kv_len = d.keys[b];
    Problem problem = problem_of(d);
    problem.bias = shared.bias;
    const auto plan = std::make_shared<BackwardPlan>(variant(), problem, sequences);
    const auto addresses = std::make_shared<Addresses>(sequences.size());
    const std::int64_t keys = shared.keys ? sequences[0].kv_len : 1;
    const std::int64_t rows = shared.bias == Bias::table ? table_rows : sequences[0].q_len;
    const auto stride_row = std::make_shared<std::vector<std::int64_t>>(sequences.size(), shared.rows ? keys : 0);
    const auto stride_head = std::make_shared<std::vector<std::int64_t>>(
        sequences.size(), shared.heads ? keys * (shared.rows ? rows : 1) : 0);
    return [=](int threads) {
        Operands o;
        o.q = o.k = o.v = o.out = o.max = o.sum = addresses->rows();
        Gradients g;
        Order order;
        g.dout = g.dq = g.dk = g.dv = addresses->rows();
        g.dq.base = &order;
        if (shared.bias != Bias::none)
            g.dbias = {&g,          addresses->zeros.data(), stride_head->data(), stride_row->data(),
                       shared.keys, Dtype::float32};
        plan->run(o, g, threads);
    };
}

std::vector<std::pair<Dense, Shared>> biased() {
    static constexpr std::int64_t uneven[] = {2048, 2048, 40};
    const std::vector<std::int64_t> two(2, 2048), eight(8, 1024);
    return {
        {{"B2 N8 S2048, bias [1,N,S,S]", 8, 8, two}, {true, true, true}},
        {{"B2 N8 S2048 causal, bias [1,N,S,S]", 8, 8, two, -everything, 1}, {true, true, true}},
        {{"B2 N32/8 S2048 causal, bias [1,N,S,S]", 32, 8, two, -everything, 1}, {true, true, true}},
        {{"B2 N8 S2048, bias [1,1,S,S]", 8, 8, two}, {false, true, true}},
        {{"B8 N32 S1024, bias [1,1,1,S]", 32, 32, eight}, {false, false, true}},
        {{"B8 N32 S1024, bias [1,N,S,1]", 32, 32, eight}, {true, true, false}},
        {{"600, 3 and 600 rows, bias [1,1,S,S]", 1, 1, {600, 3, 600}, -everything, everything, uneven},
         {false, true, true}},
        {{"B2 N32 S2048 causal, table", 32, 32, two, -everything, 1}, {true, true, true, Bias::table}},
    };
}

// -------------------------------------------------------------------------------------------------------------- decode

struct Decode {
    const char *name;
    std::int64_t batch, heads_q, heads_kv, keys;
    std::int64_t dim_qk = 128, dim_v = 128;
    bool shares_kv = false;
};

std::vector<Decode> decodes() {
    return {
        {"B1 Nkv8, 4096 keys", 1, 32, 8, 4096},
        {"B1 Nkv8, 16384 keys", 1, 32, 8, 16384},
        {"B4 Nkv8, 4096 keys", 4, 32, 8, 4096},
        {"B8 Nkv8, 4096 keys", 8, 32, 8, 4096},
        {"B64 Nkv8, 4096 keys", 64, 32, 8, 4096},
        {"B1 MLA 128/1, 4096 keys", 1, 128, 1, 4096, 576, 512, true},
        {"B8 MLA 128/1, 4096 keys", 8, 128, 1, 4096, 576, 512, true},
    };
}

Run decode(const Decode &d) {
    DecodeProblem p = {};
    p.heads_q = d.heads_q, p.heads_kv = d.heads_kv, p.dim_qk = d.dim_qk, p.dim_v = d.dim_v;
    p.dtype = Dtype::bfloat16;
    p.scale = p.keep_prob = 1;
    p.storage = Storage::bfloat16;
    p.shares_kv = d.shares_kv;
    std::vector<Sequence> sequences(d.batch, Sequence{1, d.keys, -everything, everything, 0, 0});
    const auto plan = std::make_shared<DecodePlan>(variant(), p, std::move(sequences));
    return [plan](int threads) { plan->run(DecodeOperands{}, threads); };
}

// ------------------------------------------------------------------------------------------- selected keys and indexer

// As benchmarks/sparse.py: heads of 512 + 64 on shared keys; an indexer with heads of 128.
SparseProblem selection(std::int64_t count, Dtype dtype) {
    SparseProblem p = {};
    p.heads_q = 64, p.heads_kv = 1, p.dim_qk = 512, p.dim_v = 512, p.dim_rope = 64;
    p.dtype = p.weights_dtype = dtype;
    p.scale = 1;
    p.shares_kv = true;
    p.select_count = count, p.select_block = 1;
    return p;
}

SparseProblem indexer(std::int64_t count, std::int64_t heads = 32) {
    SparseProblem p = selection(count, Dtype::bfloat16);
    p.heads_q = heads, p.dim_qk = 128, p.dim_v = p.dim_rope = 0;
    p.shares_kv = false;
    p.indexes = true;
    return p;
}

// Random lists of what each row sees, ascending.
struct Lists {
    std::vector<std::int32_t> keys;
    Addresses addresses;
    std::int64_t count;

    Lists(const std::vector<Sequence> &sequences, std::int64_t count_) : addresses(sequences.size()), count(count_) {
        std::mt19937 random(17);
        for (std::size_t b = 0; b < sequences.size(); ++b) {
            const Sequence &s = sequences[b];
            addresses.zeros[b] = static_cast<std::int64_t>(keys.size());
            for (std::int64_t i = 0; i < s.q_len; ++i) {
                const std::int64_t begin = first_key(s, i), end = end_key(s, i);
                const std::size_t size = keys.size() + static_cast<std::size_t>(count);
                std::int64_t left = std::min(count, end - begin);
                for (std::int64_t j = begin; j < end; ++j) {
                    if (static_cast<std::int64_t>(random() % static_cast<std::uint32_t>(end - j)) >= left) continue;
                    keys.push_back(static_cast<std::int32_t>(j));
                    --left;
                }
                keys.resize(size, -1);
            }
        }
    }
    Rows rows() { return {keys.data(), addresses.zeros.data(), addresses.zeros.data(), count}; }
};

struct Sparse {
    const char *name;
    std::int64_t batch, rows, keys, count;
    Dtype dtype = Dtype::bfloat16;

    std::vector<Sequence> sequences() const {  // the last rows of a causal band
        return {static_cast<std::size_t>(batch), Sequence{rows, keys, -everything, keys - rows + 1, 0, 0}};
    }
};

std::vector<Sparse> sparses() {
    return {
        {"4096 rows of 8192, top 2048", 1, 4096, 8192, 2048},
        {"4096 rows of 8192, top 512", 1, 4096, 8192, 512},
        {"4096 rows and keys, top 2048", 1, 4096, 4096, 2048},
        {"B4, 1024 rows of 8192, top 512", 4, 1024, 8192, 512},
        {"4096 rows of 8192, top 2048, fp32", 1, 4096, 8192, 2048, Dtype::float32},
    };
}

Run sparse(const Sparse &s, bool backward) {
    const auto plan =
        std::make_shared<SparsePlan>(sparse_variant(), selection(s.count, s.dtype), s.sequences(), backward);
    const auto lists = std::make_shared<Lists>(s.sequences(), s.count);
    return [=](int threads) {
        SparseOperands o;
        o.indices = lists->rows();
        plan->run(o, threads);
    };
}

// count 0: over all keys of the band, with an attention whose heads have keys of their own.
Run loss(const Sparse &s) {
    SparseProblem attention = selection(0, Dtype::bfloat16);
    if (!s.count) {
        attention.heads_kv = 64, attention.dim_qk = attention.dim_v = 128;
        attention.shares_kv = false;
    }
    const auto plan = std::make_shared<SparsePlan>(sparse_variant(), indexer(s.count), s.sequences(), attention);
    const auto lists = s.count ? std::make_shared<Lists>(s.sequences(), s.count) : nullptr;
    return [=](int threads) {
        SparseOperands o;
        if (lists) o.indices = lists->rows();
        float result;
        plan->run(o, SparseOperands{}, &result, threads);
    };
}

Run index(const Sparse &s, std::int64_t heads) {
    const auto plan = std::make_shared<IndexerPlan>(sparse_variant(), indexer(s.count, heads), s.sequences());
    return [=](int threads) { plan->run(SparseOperands{}, threads); };
}

}  // namespace

std::vector<Case> cases() {
    std::vector<Case> cases;
    for (const Dense &d : dense()) cases.push_back({"forward", d.name, [d] { return forward(d); }});
    for (const Decode &d : decodes()) cases.push_back({"decode", d.name, [d] { return decode(d); }});
    for (const Dense &d : dense()) cases.push_back({"backward", d.name, [d] { return backward(d); }});
    for (const auto &[d, shared] : biased()) {
        cases.push_back({"backward", d.name, [d, shared] { return backward(d, shared); }});
    }
    for (const Sparse &s : sparses()) cases.push_back({"sparse", s.name, [s] { return sparse(s, false); }});
    for (const Sparse &s : sparses()) cases.push_back({"sparse backward", s.name, [s] { return sparse(s, true); }});
    const Sparse large = {"4096 rows and keys, top 2048", 1, 4096, 4096, 2048};
    const Sparse one = {"1 row, 65536 keys, 64 heads", 1, 1, 65536, 2048};
    const Sparse eight = {"B8, 1 row, 65536 keys, 64 heads", 8, 1, 65536, 2048};
    const Sparse few = {"200 rows of 4096 keys, top 2048", 1, 200, 4096, 2048};
    cases.push_back({"indexer", large.name, [large] { return index(large, 32); }});
    cases.push_back({"indexer", few.name, [few] { return index(few, 32); }});
    cases.push_back({"indexer decode", one.name, [one] { return index(one, 64); }});
    cases.push_back({"indexer decode", eight.name, [eight] { return index(eight, 64); }});
    const Sparse long_one = {"4096 rows of 8192, top 2048", 1, 4096, 8192, 2048};
    const Sparse all = {"4096 rows and keys, all", 1, 4096, 4096, 0};
    for (const Sparse &s : {large, long_one, all}) cases.push_back({"loss", s.name, [s] { return loss(s); }});
    return cases;
}

}  // namespace schedule
