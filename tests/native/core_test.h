// What the parts of the core's own test share: which there are, and a call as the core takes it.

#pragma once

#include "judge.h"

namespace check {

void test_quantised_decode(Report &report);  // decode_test.cpp
void test_caches(Report &report);            // cache_test.cpp
void test_pooling(Report &report);           // pool_test.cpp
void test_sparse(Report &report);            // sparse_test.cpp
void test_teams(Report &report);             // team_test.cpp
void test_tiles(Report &report);             // amx_counts_test.cpp

// Those to test, without those that share a kernel, which select(variant) returns, with a weaker one.
template <class Select> std::vector<fusion::Built> with_own(const Report &report, Select select) {
    std::vector<fusion::Built> out;
    std::vector<decltype(select(fusion::chosen_variant()))> kernels;
    for (const fusion::Built &built : fusion::built_variants()) {
        if (!built.variant) continue;
        const auto kernel = select(*built.variant);
        const bool first = std::find(kernels.begin(), kernels.end(), kernel) == kernels.end();
        if (first && report.tests(built)) out.push_back(built);
        kernels.push_back(kernel);
    }
    return out;
}

inline std::vector<fusion::Built> with_own_sparse_part(const Report &report, Dtype dtype) {
    return with_own(report, [&](const fusion::Variant &v) { return v.sparse.kernels(dtype).attend; });
}

constexpr Long everything = Long{1} << 40;
constexpr Dtype dtypes[] = {Dtype::float32, Dtype::float16, Dtype::bfloat16};

using Lengths = std::vector<std::pair<Long, Long>>;  // rows and keys of each sequence

struct Counts {  // the same, separately
    std::vector<Long> queries, keys;

    explicit Counts(const Lengths &lengths) {
        for (const auto &[q_len, kv_len] : lengths) queries.push_back(q_len), keys.push_back(kv_len);
    }
};

inline fusion::Problem plain_problem(Long heads_q, Long heads_kv, Long dim_qk, Long dim_v, Long dim_rope, Dtype dtype) {
    const double scale = 1 / std::sqrt(static_cast<double>(dim_qk + dim_rope));
    return {heads_q,    heads_kv, dim_qk, dim_v, dim_rope,      dtype, scale,
            Bias::none, false,    false,  false, Dropout::none, 1.0,   0};
}

// A call with memory for its rows, whose numbers are not set; sequences are missing.
inline Call call_of(const fusion::Problem &p, const Lengths &lengths) {
    const Counts n(lengths);
    Call c;
    c.problem = p;
    c.q = RowMemory(p.dtype, p.heads_q, p.dim_qk, n.queries);
    c.q_rope = RowMemory(p.dtype, p.heads_q, p.dim_rope, n.queries);
    c.k = RowMemory(p.dtype, p.heads_kv, p.dim_qk, n.keys);
    c.k_rope = RowMemory(p.dtype, p.heads_kv, p.dim_rope, n.keys);
    c.v = RowMemory(p.dtype, p.heads_kv, p.dim_v, n.keys);
    c.dout = c.out = RowMemory(p.dtype, p.heads_q, p.dim_v, n.queries);
    c.max = c.sum = RowMemory(Dtype::float32, p.heads_q, 1, n.queries);
    return c;
}

// Computes a call by run(threads), with the same bits for any number of threads.
template <class Run> void run_teams(Judge &judge, Call &c, Run run) {
    Elements out, max, sum;
    for (int threads : {3, 8, 1}) {
        c.out.poison(), c.max.poison(), c.sum.poison();
        run(threads);
        if (threads != 3) {
            judge.require_same("out", out, c.out.elements);
            judge.require_same("max", max, c.max.elements);
            judge.require_same("sum", sum, c.sum.elements);
        }
        out = c.out.elements, max = c.max.elements, sum = c.sum.elements;
    }
}

inline void compare_outputs(Judge &judge, const Call &c, const Results &want, double largest) {
    judge.compare("out", c.out, want.at("out"), largest, true);
    judge.compare("max", c.max, want.at("max"), largest, false, true);
    judge.compare("sum", c.sum, want.at("sum"), largest, false);
}

inline fusion::Operands operands_of(Call &c) {
    fusion::Operands o;
    o.q = c.q.view(), o.k = c.k.view(), o.v = c.v.view(), o.q_rope = c.q_rope.view(), o.k_rope = c.k_rope.view();
    o.out = c.out.view(), o.max = c.max.view(), o.sum = c.sum.view();
    o.bias = c.bias_at.view(c.bias.data(), c.problem.dtype);
    o.blocked = c.blocked_at.view(c.blocked.data(), Dtype::float32);
    o.drop_bits = c.bits_at.view(c.bits.data(), Dtype::float32);
    o.blocked_tiles = c.tiles_at.view(c.tiles.data(), Dtype::float32);
    o.blocked_bits = c.tile_bits.data(), o.blocked_count = static_cast<Long>(c.tile_bits.size() / 2048);
    o.slopes = c.slopes.data(), o.sink = c.sink.data(), o.seed = c.seed, o.offset = c.offset;
    return o;
}

inline fusion::Cache cache_of(RowMemory &m, Dtype dtype) {
    fusion::Cache c;
    c.base = static_cast<const char *>(m.elements.data()), c.item = kind_of(dtype).bytes;
    c.address = m.address.data(), c.stride_head = m.stride_head.data(), c.stride_token = m.stride_token;
    return c;
}

inline std::vector<fusion::Tile> tiles_of(const Call &c) {
    std::vector<fusion::Tile> out;
    for (std::size_t b = 0; b < c.sequences.size(); ++b) {
        const fusion::Sequence &s = c.sequences[b];
        for (Long row = 0; row < s.q_len; row += fusion::tile_rows) {
            const Long last = std::min(row + fusion::tile_rows, s.q_len);
            const Long begin = std::max<Long>(row + s.lo, 0);
            const Long end = std::min(std::max(last - 1 + s.hi, s.prefix), s.kv_len);
            out.push_back({static_cast<Long>(b), row, last, begin < end ? begin : 0, begin < end ? end : 0});
        }
    }
    return out;
}

}  // namespace check
