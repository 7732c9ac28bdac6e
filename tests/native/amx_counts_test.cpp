// What the model of tiles counts: products beside the useful multiply-adds, loads and stores. And what becomes of a
// system that refuses tiles.

#include "data/amx_counts.h"
#include "plan/backward.h"
#include "plan/decode.h"
#include "plan/forward.h"
#include "plan/indexer.h"
#include "plan/sparse.h"
#include "core_test.h"
#include "amx_permission.h"

#include <algorithm>
#include <cerrno>

namespace check {
namespace {

// Where the system refuses tiles, that is a sentence, and no variant that needs them runs.
void test_refusal(Report &report) {
    const std::string small = fusion::tile_refusal_of(ENOSPC), other = fusion::tile_refusal_of(EINVAL);
    if (small.find("the signal stack (sigaltstack) of a thread is too small") == std::string::npos ||
        other != "the system refuses memory for tiles (Invalid argument)")
        report.fail("refusal of tiles: " + small + "; " + other);
    const auto &features = fusion::cpu_features();
    const bool has_tiles = std::find(features.begin(), features.end(), "amx_tile") != features.end();
    for (const fusion::Built &built : fusion::built_variants()) {
        if (built.name != std::string("v4+amx") || !built.variant) continue;
        if (!has_tiles || !fusion::tile_refusal().empty()) report.fail("v4+amx runs without tiles");
    }
    if (!has_tiles && fusion::forced_variant().empty() && fusion::tile_refusal().empty())
        report.fail("tiles were granted that are not there");
}

// Where products of bfloat16 pairs are slow, the variant that adds only these is not chosen, but one with tiles is.
void test_slow_pairs(Report &report) {
    std::vector<fusion::Built> rows = fusion::built_variants();
    for (const bool slow : {false, true}) {
        std::string expected;
        for (const char *left_out : {"", "v4+amx"}) {
            for (fusion::Built &row : rows) {
                if (row.name == std::string(left_out)) row.variant = nullptr;
                if (row.variant && !(slow && row.name == std::string("v4+avx512bf16"))) expected = row.variant->name;
            }
            if (fusion::fastest(rows, slow).name != expected) report.fail("chosen, not " + expected);
        }
        rows = fusion::built_variants();
    }
}

constexpr double product_work = 16 * 16 * 32;  // multiply-adds of two tiles

struct Bound {
    const char *what;
    double most_work, most_loads;  // of useful multiply-adds, and of products
};

// A causal head of 2048 rows, 128 wide.
Call long_head() {
    constexpr Long length = 2048, dim = 128;
    Call c = call_of(plain_problem(1, 1, dim, dim, 0, Dtype::bfloat16), {{length, length}});
    c.sequences.push_back({length, length, -everything, 1, 0, 0});
    std::mt19937 random(29);
    for (RowMemory *m : {&c.q, &c.k, &c.v, &c.dout, &c.out}) m->fill(random, 2.0);
    return c;
}

template <class Run> void count(Report &report, const Bound &bound, double useful, const Run &run) {
    const fusion::TileCounts before = fusion::tile_counts;
    run();
    const auto products = static_cast<double>(fusion::tile_counts.products - before.products);
    const auto loads = static_cast<double>(fusion::tile_counts.loads - before.loads);
    const auto stores = static_cast<double>(fusion::tile_counts.stores - before.stores);
    const double work = products * product_work / useful;
    std::printf("tiles, %-16s %8.0f products, %.3f of the useful ones; %.3f loads and %.3f stores each\n", bound.what,
                products, work, loads / products, stores / products);
    if (!(work >= 1.0 && work <= bound.most_work)) report.fail(std::string(bound.what) + ": products of tiles");
    if (!(loads / products <= bound.most_loads)) report.fail(std::string(bound.what) + ": loads of tiles");
}

void count_dense(Report &report, const fusion::Variant &variant) {
    Call c = long_head();
    const auto length = static_cast<double>(c.sequences[0].q_len), dim = static_cast<double>(c.problem.dim_qk);
    const double useful = length * (length + 1) / 2 * dim;
    count(report, {"forward", 1.15, 1.2}, 2 * useful,
          [&] { fusion::ForwardPlan(variant, c.problem, c.sequences, tiles_of(c)).run(operands_of(c), 1); });
    RowMemory dq = c.q, dk = c.k, dv = c.v;
    fusion::Gradients g;
    g.dout = c.dout.view(), g.dq = dq.view(), g.dk = dk.view(), g.dv = dv.view();
    count(report, {"backward", 1.15, 1.3}, 5 * useful,
          [&] { fusion::BackwardPlan(variant, c.problem, c.sequences).run(operands_of(c), g, 1); });
}

// Rows of 64 heads over lists of 2048 keys, whose first 512 dims are values too; and an indexer with as many heads.
void count_sparse(Report &report, const fusion::SparseVariant &variant) {
    constexpr Long heads = 64, dim = 512, rope = 64, index_dim = 128, rows = 4, keys = 4096, listed = 2048;
    const std::vector<fusion::Sequence> sequences = {{rows, keys, -keys, keys, 0, 0}};
    std::mt19937 random(31);
    Call c = call_of(plain_problem(heads, 1, dim, dim, rope, Dtype::bfloat16), {{rows, keys}});
    for (RowMemory *m : {&c.q, &c.q_rope, &c.k, &c.k_rope, &c.dout}) m->fill(random, 1.0);
    std::vector<std::int32_t> lists(rows * listed);
    for (std::size_t i = 0; i < lists.size(); ++i) lists[i] = static_cast<std::int32_t>(i % listed * 2);
    const std::vector<std::int64_t> zero = {0};
    fusion::SparseOperands o;
    o.q = c.q.view(), o.q_rope = c.q_rope.view(), o.k = o.v = {c.k.view()}, o.k_rope = {c.k_rope.view()};
    o.indices = {lists.data(), zero.data(), zero.data(), listed};
    o.out = c.out.view(), o.max = c.max.view(), o.sum = c.sum.view();
    fusion::SparseProblem p = {heads, 1,    dim,    dim, rope,  Dtype::bfloat16, 0.04,
                               false, true, listed, 1,   false, Dtype::bfloat16};
    const auto met = static_cast<double>(rows * listed * heads);
    count(report, {"selection", 1.15, 1.3}, met * (dim + rope + dim),
          [&] { fusion::SparsePlan(variant, p, sequences, false).run(o, 1); });
    RowMemory dq = c.q, dk = c.k, dq_rope = c.q_rope, dk_rope = c.k_rope;
    o.dout = c.dout.view(), o.dq = dq.view(), o.dk = dk.view();
    o.dq_rope = dq_rope.view(), o.dk_rope = dk_rope.view();
    count(report, {"its backward", 1.15, 1.5}, met * (3 * (dim + rope) + 2 * dim),
          [&] { fusion::SparsePlan(variant, p, sequences, true).run(o, 1); });

    Call index = call_of(plain_problem(heads, 1, index_dim, 1, 0, Dtype::bfloat16), {{rows, keys}});
    RowMemory weights(Dtype::bfloat16, 1, heads, {rows}), chosen(Dtype::float32, 1, listed, {rows});
    for (RowMemory *m : {&index.q, &index.k, &weights}) m->fill(random, 1.0);
    fusion::SparseOperands i;
    i.q = index.q.view(), i.k = {index.k.view()}, i.weights = weights.view(), i.indices = chosen.view();
    p = {heads, 1, index_dim, 0, 0, Dtype::bfloat16, 1.0, false, false, listed, 1, true, Dtype::bfloat16};
    count(report, {"indexer", 1.15, 1.2}, static_cast<double>(rows * keys * heads * index_dim),
          [&] { fusion::IndexerPlan(variant, p, sequences).run(i, 1); });
}

// One token of MLA: heads share keys of 512 + 64 dims, of which the first 512 are values too.
void count_decode(Report &report, const fusion::Variant &variant, const char *name, Long heads) {
    constexpr Long dim = 512, rope = 64, keys = 4096;
    Call c = call_of(plain_problem(heads, 1, dim, dim, rope, Dtype::bfloat16), {{1, keys}});
    std::mt19937 random(37);
    for (RowMemory *m : {&c.q, &c.q_rope, &c.k, &c.k_rope}) m->fill(random, 1.0);
    fusion::DecodeOperands o{operands_of(c), {}, {}, {}, {}, {}, {}, {}};
    o.keys = o.values = cache_of(c.k, Dtype::bfloat16), o.key_ropes = cache_of(c.k_rope, Dtype::bfloat16);
    const fusion::DecodeProblem problem{c.problem, fusion::Storage::bfloat16, fusion::Rounding::none, true};
    const std::vector<fusion::Sequence> sequences = {{1, keys, -keys, keys, 0, 0}};
    count(report, {name, 1.15, 1.3}, static_cast<double>(heads * keys * (dim + rope + dim)),
          [&] { fusion::DecodePlan(variant, problem, sequences).run(o, 1); });
}

}  // namespace

void test_tiles(Report &report) {
    test_refusal(report);
    test_slow_pairs(report);
    for (const fusion::Built &built : fusion::built_variants()) {
        if (!report.tests(built) || built.name != std::string("amx_model")) continue;
        count_dense(report, *built.variant);
        count_sparse(report, built.variant->sparse);
        count_decode(report, *built.variant, "MLA, 64 heads", 64);
        count_decode(report, *built.variant, "MLA, 128 heads", 128);
    }
}

}  // namespace check
