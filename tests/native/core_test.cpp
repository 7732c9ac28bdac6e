// The native core without Python: every instruction-set variant that runs here, forward, backward and, where nothing is
// dropped, decode, on tiny calls in all dtypes, against naive loops in double. For machines that the Python suite does
// not reach (make test-aarch64).
//
// Allowed for every element: what the roundings of the operand dtype, and float32 sums of so many terms, can make of
// the sum of its absolute terms. Prints the worst share of that.

#include "plan/arena.h"
#include "plan/backward.h"
#include "plan/decode.h"
#include "dispatch.h"
#include "plan/forward.h"
#include "naive.h"

#include <cstdio>

namespace check {

int test_teams();  // team_test.cpp; how many failures

namespace {

constexpr Long everything = Long{1} << 40;

struct Case {
    const char *name;
    Long heads_q = 1, heads_kv = 1, dim_qk = 8, dim_v = 8, dim_rope = 0;
    std::vector<std::pair<Long, Long>> lengths;          // rows and keys of each sequence
    Long lo = -everything, hi = everything, prefix = 0;  // row i sees keys i + lo <= j < max(prefix, i + hi)
    Bias bias = Bias::none;
    bool bias_scaled = false, own_rows = true;  // the bias has rows of its own
    Dropout dropout = Dropout::none;
    bool blocked = false, sink = false;
    bool masked = false;  // the bias hides every fifth key, whose V is NaN, and keys of some rows
};

// clang-format off: a table, which it would lay out one field a line
const Case cases[] = {
    {.name = "plain", .dim_qk = 64, .dim_v = 64, .lengths = {{40, 50}}},
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
    {.name = "several tiles", .dim_qk = 40, .dim_v = 24, .lengths = {{230, 300}}, .lo = -150, .hi = 71,
     .dropout = Dropout::philox},
    {.name = "long window", .heads_q = 2, .dim_qk = 5, .dim_v = 7, .lengths = {{2600, 2600}, {1200, 700}, {100, 900}},
     .lo = -60, .hi = 9},
    {.name = "many keys", .dim_v = 16, .lengths = {{7, 3000}}},
};
// clang-format on

std::vector<Long> lengths_of(const Case &from, bool keys) {
    std::vector<Long> out;
    out.reserve(from.lengths.size());
    for (const auto &[q_len, kv_len] : from.lengths) out.push_back(keys ? kv_len : q_len);
    return out;
}

void hide_keys(Call &c) {
    for (std::size_t b = 0; b < c.sequences.size(); ++b) {
        const fusion::Sequence &s = c.sequences[b];
        for (Long h = 0; h < c.problem.heads_q; ++h) {
            for (Long i = 0; i < s.q_len; ++i) {
                for (Long j = 0; j < s.kv_len; ++j) {
                    if (j % 5 == 2 || (i % 3 == 0 && j % 2)) c.bias.set(c.bias_at.at(b, h, i, j), -INFINITY);
                }
            }
        }
        for (Long j = 2; j < s.kv_len; j += 5) {
            for (Long h = 0; h < c.problem.heads_kv; ++h) c.v.set(b, h, j, j % c.problem.dim_v, j % 2 ? NAN : INFINITY);
        }
    }
}

Call make(const Case &from, Dtype dtype) {
    Call c;
    c.problem = {from.heads_q,
                 from.heads_kv,
                 from.dim_qk,
                 from.dim_v,
                 from.dim_rope,
                 dtype,
                 1 / std::sqrt(static_cast<double>(from.dim_qk + from.dim_rope)),
                 from.bias,
                 from.bias_scaled,
                 from.blocked,
                 from.sink,
                 from.dropout,
                 from.dropout == Dropout::none ? 1.0 : 0.7,
                 45875};
    for (const auto &[q_len, kv_len] : from.lengths) {
        c.sequences.push_back({q_len, kv_len, from.lo, from.hi, from.prefix, 2});
    }
    std::mt19937 random(17);
    const std::vector<Long> rows = lengths_of(from, false), keys = lengths_of(from, true);
    c.q = RowMemory(dtype, from.heads_q, from.dim_qk, rows);
    c.k = RowMemory(dtype, from.heads_kv, from.dim_qk, keys);
    c.v = RowMemory(dtype, from.heads_kv, from.dim_v, keys);
    c.q_rope = RowMemory(dtype, from.heads_q, from.dim_rope, rows);
    c.k_rope = RowMemory(dtype, from.heads_kv, from.dim_rope, keys);
    c.dout = RowMemory(dtype, from.heads_q, from.dim_v, rows);
    for (RowMemory *m : {&c.q, &c.k, &c.v, &c.q_rope, &c.k_rope, &c.dout}) m->fill(random, 2.0);
    c.out = RowMemory(dtype, from.heads_q, from.dim_v, rows);
    c.max = RowMemory(Dtype::float32, from.heads_q, 1, rows);
    c.sum = RowMemory(Dtype::float32, from.heads_q, 1, rows);
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
    if (from.masked) hide_keys(c);
    return c;
}

fusion::Operands operands_of(Call &c) {
    fusion::Operands o;
    o.q = c.q.view(), o.k = c.k.view(), o.v = c.v.view(), o.q_rope = c.q_rope.view(), o.k_rope = c.k_rope.view();
    o.out = c.out.view(), o.max = c.max.view(), o.sum = c.sum.view();
    o.bias = c.bias_at.view(c.bias.data(), c.problem.dtype);
    o.blocked = c.blocked_at.view(c.blocked.data(), Dtype::float32);
    o.drop_bits = c.bits_at.view(c.bits.data(), Dtype::float32);
    o.slopes = c.slopes.data(), o.sink = c.sink.data(), o.seed = c.seed, o.offset = c.offset;
    return o;
}

std::vector<fusion::Tile> tiles_of(const Call &c) {
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

void run_forward(Call &c, const fusion::Variant &variant, int threads) {
    c.out.poison(), c.max.poison(), c.sum.poison();
    fusion::ForwardPlan(variant, c.problem, c.sequences, tiles_of(c)).run(operands_of(c), threads);
}

fusion::Cache cache_of(RowMemory &m, Dtype dtype) {
    fusion::Cache c;
    c.base = static_cast<const char *>(m.elements.data()), c.item = kind_of(dtype).bytes;
    c.address = m.address.data(), c.stride_head = m.stride_head.data(), c.stride_token = m.stride_token;
    return c;
}

void run_decode(Call &c, const fusion::Variant &variant, int threads) {
    c.out.poison(), c.max.poison(), c.sum.poison();
    const fusion::DecodeProblem problem{c.problem, static_cast<fusion::Storage>(c.problem.dtype),
                                        fusion::Rounding::none, false};
    fusion::DecodeOperands o{operands_of(c), {}, {}, {}, {}, {}, {}, {}};
    o.keys = cache_of(c.k, c.problem.dtype), o.values = cache_of(c.v, c.problem.dtype);
    o.key_ropes = cache_of(c.k_rope, c.problem.dtype);
    fusion::DecodePlan(variant, problem, c.sequences).run(o, threads);
}

struct Found {  // by the core's backward
    RowMemory dq, dk, dv, dq_rope, dk_rope;
    std::vector<float> dbias, dsink;
};

Found run_backward(Call &c, const fusion::Variant &variant, int threads) {
    Found f = {c.q, c.k, c.v, c.q_rope, c.k_rope, {}, {}};
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

int failures = 0;

void fail(const char *variant, const char *name, Dtype dtype, const std::string &what) {
    if (++failures > 20) return;
    std::printf("FAILED %s, %s, dtype %d: %s\n", variant, name, static_cast<int>(dtype), what.c_str());
}

// Judges one case in one dtype; the naive results are computed once for all variants.
class Judge {
public:
    Judge(const Case &from, Dtype dtype)
        : name_(from.name), call_(make(from, dtype)), want_(forward(call_, largest_)) {}

    void run(const fusion::Variant &variant) {
        variant_ = variant.name, stage_ = "";
        rounds_weights_ = variant.as_pairs.attend != nullptr;
        run_forward(call_, variant, 1);
        const std::vector<unsigned char> alone = call_.out.elements.bytes();
        for (int threads : {3, 8}) {
            run_forward(call_, variant, threads);
            if (alone != call_.out.elements.bytes()) report("out", "other bits with several threads");
        }
        compare("out", call_.out, want_, largest_);
        compare("max", call_.max, want_, largest_);
        compare("sum", call_.sum, want_, largest_);
        judge_gradients(variant);
        if (call_.problem.dropout == Dropout::none) judge_decode(variant);
    }

    double worst() const { return worst_; }

private:
    void judge_gradients(const fusion::Variant &variant) {
        double largest = 0;
        const Results gradients = backward(call_, largest);
        const Found f = run_backward(call_, variant, 1);
        for (int threads : {3, 8}) {
            const Found other = run_backward(call_, variant, threads);
            if (other.dq.elements.bytes() != f.dq.elements.bytes() ||
                other.dk.elements.bytes() != f.dk.elements.bytes())
                report("dq, dk", "other bits with several threads");
        }
        const std::pair<const char *, const RowMemory *> rows[] = {
            {"dq", &f.dq}, {"dk", &f.dk}, {"dv", &f.dv}, {"dq_rope", &f.dq_rope}, {"dk_rope", &f.dk_rope}};
        for (const auto &[name, memory] : rows) compare(name, *memory, gradients, largest);
        compare("dbias", f.dbias, gradients, largest);
        if (call_.problem.has_sink) compare("dsink", f.dsink, gradients, largest);
    }

    void judge_decode(const fusion::Variant &variant) {
        stage_ = "decode, ";
        run_decode(call_, variant, 1);
        const std::vector<unsigned char> alone = call_.out.elements.bytes();
        for (int threads : {3, 8}) {
            run_decode(call_, variant, threads);
            if (alone != call_.out.elements.bytes()) report("out", "other bits with several threads");
        }
        for (const auto &[name, memory] : {std::pair{"out", &call_.out}, {"max", &call_.max}, {"sum", &call_.sum}}) {
            compare(name, *memory, want_, largest_);
        }
    }

    void report(const char *what, const std::string &why) {
        fail(variant_, name_, call_.problem.dtype, std::string(stage_) + what + ": " + why);
    }

    // float32 sums of n terms err like sqrt(n); an error of a score is one of the exponential's relative error.
    void judge(const char *what, double got, double want, double size, double largest, bool stored_low) {
        const Dtype dtype = call_.problem.dtype;
        const bool low = dtype != Dtype::float32;
        Long terms = call_.problem.dim_qk + call_.problem.dim_rope;
        for (const fusion::Sequence &s : call_.sequences) terms = std::max({terms, s.q_len, s.kv_len});
        double relative = 2 * unit(Dtype::float32) * std::sqrt(static_cast<double>(terms)) * (1 + largest);
        if (dtype == Dtype::bfloat16 && rounds_weights_) relative += unit(dtype);
        if (low && stored_low) relative += unit(dtype);
        const double least = stored_low && dtype == Dtype::float16 ? 0x1p-24 : 1e-30;  // below its normal numbers
        const bool same = got == want, close = std::fabs(got - want) <= relative * size + least;
        if (!same && !close) report(what, std::to_string(got) + ", expected " + std::to_string(want));
        if (!same && close) worst_ = std::max(worst_, std::fabs(got - want) / (relative * size + least));
    }

    void compare(const char *what, const RowMemory &got, const Results &results, double largest) {
        const Sums &want = results.at(what);
        const bool is_max = !std::strcmp(what, "max"), low = &got != &call_.max && &got != &call_.sum;
        Long at = 0;
        got.each([&](Long b, Long h, Long t, Long d) {
            judge(what, got.get(b, h, t, d), want.value[at], is_max ? 1 + largest : want.size[at], largest, low);
            ++at;
        });
        const Long gaps = got.elements.count() - got.size();
        if (got.elements.poisoned() != gaps) report(what, "memory beside the rows was written");
    }

    void compare(const char *what, const std::vector<float> &got, const Results &results, double largest) {
        const Sums &want = results.at(what);
        for (std::size_t i = 0; i < want.value.size(); ++i) {
            judge(what, got[i], want.value[i], want.size[i], largest, false);
        }
    }

    const char *name_, *variant_ = "", *stage_ = "";
    bool rounds_weights_ = false;  // to bfloat16, for dot products of pairs
    double largest_ = 0, worst_ = 0;
    Call call_;
    Results want_;
};

}  // namespace
}  // namespace check

int main() {
    using namespace check;
    fusion::poisons_leases = true;
    int ran = 0;
    for (const fusion::Built &built : fusion::built_variants()) {
        std::printf("variant %s: %s\n", built.name, built.variant ? "runs here" : "not on this CPU");
        ran += built.variant != nullptr;
    }
    for (const Case &one : cases) {
        for (Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
            Judge judge(one, dtype);
            for (const fusion::Built &built : fusion::built_variants()) {
                if (built.variant) judge.run(*built.variant);
            }
            const char *const names[] = {"float32", "float16", "bfloat16"};
            std::printf("%-24s %-9s worst error / allowed %.2f\n", one.name, names[static_cast<int>(dtype)],
                        judge.worst());
        }
    }
    failures += test_teams();
    std::printf("%d variants, %d failures\n", ran, failures);
    return ran > 0 && failures == 0 ? 0 : 1;
}
