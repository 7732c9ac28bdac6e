// The native core without Python: every instruction-set variant that runs here, on tiny calls in all dtypes, against
// naive loops in double. For machines that the Python suite does not reach (make test-aarch64). Prints the worst
// fraction of what is allowed.
//
// Here: forward, backward and, where nothing is dropped, decode. decode_test.cpp: caches of integers; sparse_test.cpp:
// selected keys, the indexer, its loss. An argument names the variant that must be chosen here, which is then
// tested alone.

#include "plan/arena.h"
#include "plan/backward.h"
#include "plan/decode.h"
#include "dispatch.h"
#include "plan/forward.h"
#include "core_test.h"

namespace check {
namespace {

struct Case {
    const char *name;
    Long heads_q = 1, heads_kv = 1, dim_qk = 8, dim_v = 8, dim_rope = 0;
    Lengths lengths;
    Long lo = -everything, hi = everything, prefix = 0;  // row i sees keys i + lo <= j < max(prefix, i + hi)
    Bias bias = Bias::none;
    bool bias_scaled = false, own_rows = true;  // the bias has rows of its own
    Dropout dropout = Dropout::none;
    bool blocked = false, sink = false;
    double softcap = 0;
    bool tiled = false;   // keys are blocked by tiles
    bool masked = false;  // the bias hides every fifth key, whose V is NaN, and keys of some rows
    double size = 1;      // of q and k; where it is not 1, scores' last bits are worth too much for gradients
};

// clang-format off: a table, which it would lay out one field a line
const Case cases[] = {
    {.name = "plain", .dim_qk = 64, .dim_v = 64, .lengths = {{40, 50}}},
    {.name = "few keys", .heads_q = 4, .heads_kv = 2, .dim_qk = 40, .dim_v = 72,
     .lengths = {{16, 16}, {5, 5}, {0, 0}, {31, 32}, {32, 31}, {3, 8}}, .lo = -20, .hi = 9},
    {.name = "few keys, at a panel's end", .dim_qk = 33, .dim_v = 31, .lengths = {{1, 32}, {1, 31}, {1, 40}}, .lo = 29,
     .hi = 32},
    {.name = "causal, grouped heads", .heads_q = 4, .heads_kv = 2, .dim_qk = 24, .dim_v = 40,
     .lengths = {{70, 70}, {0, 5}, {3, 0}, {1, 1}}, .hi = 1},
    {.name = "window, odd dims, rope", .heads_q = 2, .dim_qk = 33, .dim_v = 7, .dim_rope = 5,
     .lengths = {{100, 90}, {13, 140}}, .lo = -20, .hi = 9},
    {.name = "prefix, bias", .heads_q = 2, .heads_kv = 2, .dim_qk = 17, .dim_v = 16, .lengths = {{30, 41}, {20, 9}},
     .hi = 1, .prefix = 12, .bias = Bias::matrix},
    {.name = "scaled row bias, mask", .heads_q = 3, .dim_v = 31, .lengths = {{25, 33}}, .bias = Bias::matrix,
     .bias_scaled = true, .own_rows = false, .blocked = true},
    {.name = "float mask", .heads_q = 4, .heads_kv = 2, .dim_qk = 24, .dim_v = 40,
     .lengths = {{70, 130}, {3, 9}, {20, 1}}, .lo = -60, .hi = 90, .bias = Bias::matrix, .masked = true},
    {.name = "float mask beside others", .heads_q = 2, .dim_qk = 17, .dim_v = 31, .dim_rope = 3,
     .lengths = {{140, 300}}, .bias = Bias::matrix, .bias_scaled = true, .dropout = Dropout::philox,
     .blocked = true, .sink = true, .masked = true},
    {.name = "slopes, sink", .heads_q = 4, .heads_kv = 2, .dim_qk = 16, .dim_v = 1, .lengths = {{21, 60}, {5, 5}},
     .hi = 1, .bias = Bias::slopes, .sink = true},
    {.name = "root slopes, drop bits", .heads_q = 2, .dim_qk = 1, .dim_v = 48, .dim_rope = 3, .lengths = {{19, 77}},
     .bias = Bias::slopes_sqrt, .dropout = Dropout::bits, .blocked = true},
    {.name = "drawn dropout", .heads_q = 2, .heads_kv = 2, .dim_qk = 72, .dim_v = 80, .lengths = {{33, 65}, {40, 17}},
     .lo = -30, .hi = 15, .dropout = Dropout::philox, .sink = true},
    {.name = "capped", .heads_q = 4, .heads_kv = 2, .dim_qk = 24, .dim_v = 40, .lengths = {{70, 70}, {3, 9}}, .hi = 1,
     .softcap = 0.7},
    {.name = "capped beside others", .heads_q = 2, .dim_qk = 17, .dim_v = 31, .dim_rope = 3, .lengths = {{140, 300}},
     .bias = Bias::matrix, .dropout = Dropout::philox, .blocked = true, .sink = true, .softcap = 0.9, .masked = true},
    {.name = "several tiles", .dim_qk = 40, .dim_v = 24, .lengths = {{230, 300}}, .lo = -150, .hi = 71,
     .dropout = Dropout::philox},
    {.name = "long window", .heads_q = 2, .dim_qk = 5, .dim_v = 7, .lengths = {{2600, 2600}, {1200, 700}, {100, 900}},
     .lo = -60, .hi = 9},
    {.name = "pieces of a band", .dim_qk = 250, .dim_v = 250, .lengths = {{1400, 1400}}, .lo = -40, .hi = 3},
    {.name = "many keys", .dim_v = 16, .lengths = {{7, 3000}}},
    {.name = "large scores", .heads_q = 2, .dim_qk = 16, .dim_v = 16,
     .lengths = {{40, 40}, {16, 16}, {70, 1300}, {0, 0}, {3, 33}}, .size = 0x1p14},
    {.name = "blocked tiles", .heads_q = 4, .heads_kv = 2, .dim_qk = 24, .dim_v = 40, .lengths = {{300, 700}, {5, 140}},
     .tiled = true},
    {.name = "blocked tiles in a band", .heads_q = 2, .dim_qk = 17, .dim_v = 7, .dim_rope = 3,
     .lengths = {{400, 390}, {0, 3}, {3, 0}, {129, 257}}, .lo = -170, .hi = 9, .bias = Bias::matrix,
     .dropout = Dropout::philox, .blocked = true, .sink = true, .tiled = true, .masked = true},
};
// clang-format on

// One table for all sequences: tiles blocked as a whole or not at all, with bits, and with a number that has none.
void draw_tiles(Call &c, std::mt19937 &random) {
    Long rows = 0, keys = 0;
    for (const fusion::Sequence &s : c.sequences) {
        rows = std::max(rows, (s.q_len + 127) / 128), keys = std::max(keys, (s.kv_len + 127) / 128);
    }
    c.tiles_at.address.assign(c.sequences.size(), 0);
    c.tiles_at.stride_row.assign(c.sequences.size(), keys);
    c.tiles_at.stride_head.assign(c.sequences.size(), rows * keys);
    for (Long i = 0; i < c.problem.heads_q * rows * keys; ++i) {
        const std::int32_t numbers[] = {-1, -2, 1 << 30}, kind = static_cast<std::int32_t>(random() % 6);
        c.tiles.push_back(kind < 3 ? numbers[kind] : static_cast<std::int32_t>(c.tile_bits.size() / 2048));
        for (int byte = 0; kind >= 3 && byte < 2048; ++byte) {
            c.tile_bits.push_back(static_cast<unsigned char>(random() & random()));
        }
    }
}

void hide_keys(Call &c) {
    each_row(c, [&](Long b, Long h, Long i) {
        for (Long j = 0; j < c.sequences[b].kv_len; ++j) {
            if (j % 5 == 2 || (i % 3 == 0 && j % 2)) c.bias.set(c.bias_at.at(b, h, i, j), -INFINITY);
        }
    });
    c.v.each([&](Long b, Long h, Long j, Long d) {
        if (j % 5 == 2 && d == j % c.problem.dim_v) c.v.set(b, h, j, d, j % 2 ? NAN : INFINITY);
    });
}

Call make(const Case &from, Dtype dtype) {
    fusion::Problem p = plain_problem(from.heads_q, from.heads_kv, from.dim_qk, from.dim_v, from.dim_rope, dtype);
    p.bias = from.bias, p.bias_scaled = from.bias_scaled, p.has_blocked = from.blocked, p.has_sink = from.sink;
    p.dropout = from.dropout, p.keep_prob = from.dropout == Dropout::none ? 1.0 : 0.7, p.keep_below = 45875;
    p.softcap = from.softcap, p.has_blocked_tiles = from.tiled;
    Call c = call_of(p, from.lengths);
    for (const auto &[q_len, kv_len] : from.lengths) {
        const auto stream = static_cast<Long>(c.sequences.size()) * p.heads_q;
        c.sequences.push_back({q_len, kv_len, from.lo, from.hi, from.prefix, 2, 0, 0, stream});
    }
    std::mt19937 random(17);
    for (RowMemory *m : {&c.q, &c.k}) m->fill(random, 2.0 * from.size);
    for (RowMemory *m : {&c.v, &c.q_rope, &c.k_rope, &c.dout}) m->fill(random, 2.0);
    c.bias_at = MatrixMemory(1, from.heads_q, c.sequences, true, from.own_rows);
    c.bias = Elements(dtype, c.bias_at.count);
    for (Long i = 1; i < c.bias_at.count; ++i) c.bias.set(i, static_cast<double>(random()) * 0x1p-31 - 1.0);
    c.blocked_at = MatrixMemory(1, from.heads_q, c.sequences, false, true);
    c.blocked.assign(c.blocked_at.count, 1);
    for (Long i = 1; i < c.blocked_at.count; ++i) c.blocked[i] = random() % 3 == 0;
    c.bits_at = MatrixMemory(5, from.heads_q, c.sequences, true, true);
    for (Long i = 0; i < c.bits_at.count; i += 8) c.bits.push_back(static_cast<unsigned char>(random()));
    const Long slopes = static_cast<Long>(from.lengths.size()) * from.heads_q;
    for (Long i = 1; i <= slopes; ++i) c.slopes.push_back(0.02f * static_cast<float>(i));
    for (Long h = 0; h < from.heads_q; ++h) c.sink.push_back(0.5f - 0.4f * static_cast<float>(h));
    if (from.tiled) draw_tiles(c, random);
    if (from.masked) hide_keys(c);
    return c;
}

void decode(Call &c, const fusion::Variant &variant, int threads) {
    const fusion::DecodeProblem problem{c.problem, static_cast<fusion::Storage>(c.problem.dtype),
                                        fusion::Rounding::none, false};
    fusion::DecodeOperands o{operands_of(c), {}, {}, {}, {}, {}, {}, {}};
    o.keys = cache_of(c.k, c.problem.dtype), o.values = cache_of(c.v, c.problem.dtype);
    o.key_ropes = cache_of(c.k_rope, c.problem.dtype);
    fusion::DecodePlan(variant, problem, c.sequences).run(o, threads);
}

struct CoreGradients {  // by the core's backward
    RowMemory dq, dk, dv, dq_rope, dk_rope;
    std::vector<float> dbias, dsink;
};

CoreGradients run_backward(Call &c, const fusion::Variant &variant, int threads) {
    CoreGradients f = {c.q, c.k, c.v, c.q_rope, c.k_rope, {}, {}};
    for (RowMemory *m : {&f.dq, &f.dk, &f.dv, &f.dq_rope, &f.dk_rope}) m->poison();
    f.dbias.assign(c.bias_at.count, 0.0f);
    f.dsink.assign(c.problem.heads_q, NAN);
    fusion::Gradients g;
    g.dout = c.dout.view(), g.dq = f.dq.view(), g.dk = f.dk.view(), g.dv = f.dv.view();
    g.dq_rope = f.dq_rope.view(), g.dk_rope = f.dk_rope.view(), g.dsink = f.dsink.data();
    if (c.problem.bias == Bias::matrix) g.dbias = c.bias_at.view(f.dbias.data(), Dtype::float32);
    fusion::BackwardPlan(variant, c.problem, c.sequences).run(operands_of(c), g, threads);
    return f;
}

// Judges one case in one dtype; the naive results are computed once for all variants.
class DenseTest {
public:
    DenseTest(Report &report, const Case &from, Dtype dtype)
        : call_(make(from, dtype)), want_(forward(call_, largest_)),
          judge_(report, from.name, dtype, most_terms(call_)), differentiates_(from.size == 1) {}

    void run_dense(const fusion::Built &built) {
        judge_.begin(built.name, "", built.variant->as_pairs.attend);
        test_forward(*built.variant);
        if (differentiates_) test_gradients(*built.variant);
    }

    void run_decode(const fusion::Built &built) {
        if (call_.problem.dropout != Dropout::none || call_.problem.has_blocked_tiles) return;
        judge_.begin(built.name, "decode, ", built.variant->as_pairs.attend);
        test_decode(*built.variant);
    }

private:
    void test_forward(const fusion::Variant &variant) {
        run_teams(judge_, call_, [&](int threads) {
            fusion::ForwardPlan(variant, call_.problem, call_.sequences, tiles_of(call_))
                .run(operands_of(call_), threads);
        });
        compare_outputs(judge_, call_, want_, largest_);
    }

    void test_gradients(const fusion::Variant &variant) {
        double largest = 0;
        const Results gradients = backward(call_, largest);
        const CoreGradients f = run_backward(call_, variant, 1);
        for (int threads : {3, 8}) {
            const CoreGradients other = run_backward(call_, variant, threads);
            judge_.require_same("dq", f.dq.elements, other.dq.elements);
            judge_.require_same("dk", f.dk.elements, other.dk.elements);
        }
        const std::pair<const char *, const RowMemory *> rows[] = {
            {"dq", &f.dq}, {"dk", &f.dk}, {"dv", &f.dv}, {"dq_rope", &f.dq_rope}, {"dk_rope", &f.dk_rope}};
        for (const auto &[name, memory] : rows) judge_.compare(name, *memory, gradients.at(name), largest, true);
        judge_.compare("dbias", f.dbias, gradients.at("dbias"), largest);
        if (call_.problem.has_sink) judge_.compare("dsink", f.dsink, gradients.at("dsink"), largest);
    }

    void test_decode(const fusion::Variant &variant) {
        run_teams(judge_, call_, [&](int threads) {
            fusion::lease_poison =
                threads == 1 ? 0 : 0xff;  // the same from any memory: NaN would only take the slow way
            decode(call_, variant, threads);
        });
        fusion::lease_poison = 0xff;
        compare_outputs(judge_, call_, want_, largest_);
    }

    double largest_ = 0;
    Call call_;
    Results want_;
    Judge judge_;
    bool differentiates_;
};

void test_dense(Report &report) {
    for (Dtype dtype : dtypes) {
        const auto tested = with_own(report, [&](const fusion::Variant &v) { return v.kernels(dtype).attend; });
        for (const Case &one : cases) {
            DenseTest test(report, one, dtype);
            for (const fusion::Built &built : tested) test.run_dense(built);
            for (const fusion::Built &built : fusion::built_variants()) {
                if (report.tests(built)) test.run_decode(built);
            }
        }
    }
}

}  // namespace

}  // namespace check

int main(int count, char **arguments) {
    using namespace check;
    fusion::lease_poison = 0xff;
    Report report;
    int ran = 0;
    for (const fusion::Built &built : fusion::built_variants()) {
        std::printf("variant %s: %s\n", built.name, built.variant ? "runs here" : "not on this CPU");
        ran += built.variant != nullptr;
    }
    std::printf("features:");
    for (const std::string &name : fusion::cpu_features()) std::printf(" %s", name.c_str());
    std::printf("\n");
    const std::string chosen = fusion::chosen_variant().name;
    if (count > 1) report.only = arguments[1];
    if (count > 1 && chosen != report.only) report.fail("chosen: " + chosen + ", expected " + report.only);
    test_dense(report);
    test_quantised_decode(report);
    test_caches(report);
    test_pooling(report);
    test_sparse(report);
    test_teams(report);
    test_tiles(report);
    std::printf("%d variants run here, %d failures\n", ran, report.failures);
    return ran > 0 && report.failures == 0 ? 0 : 1;
}
