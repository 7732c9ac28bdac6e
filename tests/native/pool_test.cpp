// Pooling of windows of rows, forward and backward, against loops over the rows of every window in double.

#include "plan/pool.h"
#include "core_test.h"

#include <functional>

namespace check {
namespace {

// clang-format off: a table, which it would lay out one field a line
struct Case {
    const char *name;
    fusion::PoolProblem problem;                    // dtype: of the test
    std::vector<fusion::PoolSequence> sequences;    // rows, results, before, room
    double huge = 0;                                // an infinite row whose gate is this far below the others
};

const Case cases[] = {
    {"pooling", {2, 20, 4, false, {}}, {{11, 2, 0, 3}, {0, 0, 0, 1}, {8, 2, 0, 2}}},
    {"pooling, overlap", {1, 37, 3, true, {}}, {{14, 4, 0, 4}, {7, 1, 1, 2}, {2, 0, 0, 0}}},
    {"pooling, long windows", {1, 70, 40, false, {}}, {{90, 2, 0, 2}}},
    {"pooling, an infinity", {1, 8, 4, true, {}}, {{8, 2, 0, 2}}, 300},
    {"pooling, streamed gradients", {1, 256, 4, true, {}}, {{4214, 1053, 0, 1053}}},
    {"pooling, gathered gradients", {1, 488, 24, false, {}}, {{4401, 183, 0, 183}, {25, 1, 0, 2}}},
    {"pooling, gathered gradients, overlap", {1, 256, 12, true, {}}, {{4212, 351, 0, 351}}},
};
// clang-format on

// The rows that result w pools: body(token, channel of d = 0).
void each_pooled(const fusion::PoolProblem &p, const fusion::PoolSequence &seq, Long w,
                 const std::function<void(Long, Long)> &body) {
    const Long number = w + seq.before;
    for (Long i = 0; p.overlap && number > 0 && i < p.ratio; ++i) body((number - 1) * p.ratio + i, 0);
    for (Long i = 0; i < p.ratio; ++i) body(number * p.ratio + i, p.overlap ? p.dim : 0);
}

struct PoolTest {
    fusion::PoolProblem problem;
    std::vector<fusion::PoolSequence> sequences;
    RowMemory kv, gate, dout, out, dkv, dgate;
    std::vector<float> bias, dbias;
    Sums want, want_dkv, want_dgate, want_dbias;
    double largest = 1;

    PoolTest(const Case &from, Dtype dtype) : problem(from.problem), sequences(from.sequences) {
        problem.dtype = dtype;
        std::vector<Long> rows, results, room;
        for (const auto &s : sequences) rows.push_back(s.rows), results.push_back(s.results), room.push_back(s.room);
        std::mt19937 random(59);
        const Long heads = problem.heads, channels = problem.channels();
        for (RowMemory *m : {&kv, &gate, &dkv, &dgate}) *m = RowMemory(dtype, heads, channels, rows);
        dout = RowMemory(dtype, heads, problem.dim, results), out = RowMemory(dtype, heads, problem.dim, room);
        for (RowMemory *m : {&kv, &gate, &dout}) m->fill(random, 1.0);
        bias.resize(problem.ratio * channels), dbias.resize(bias.size());
        for (float &x : bias) x = static_cast<float>(static_cast<double>(random()) * 0x1p-32);
        if (from.huge) kv.set(0, 0, 5, channels - 1, INFINITY), gate.set(0, 0, 5, channels - 1, -from.huge);
        want = Sums(out.size()), want_dkv = Sums(kv.size()), want_dgate = want_dkv, want_dbias = Sums(dbias.size());
        for (Long b = 0; b < static_cast<Long>(sequences.size()); ++b) {
            for (Long h = 0; h < heads; ++h) {
                for (Long w = 0; w < sequences[b].results; ++w) {
                    for (Long d = 0; d < problem.dim; ++d) expect(b, h, w, d);
                }
            }
        }
    }

    Long bias_at(Long token, Long channel) const { return token % problem.ratio * problem.channels() + channel; }

    void expect(Long b, Long h, Long w, Long d) {
        double peak = -INFINITY, sum = 0, total = 0, size = 0;
        const auto z = [&](Long t, Long c) { return gate.get(b, h, t, c) + bias[bias_at(t, c)]; };
        const auto each = [&](const std::function<void(Long, Long)> &body) {
            each_pooled(problem, sequences[b], w, [&](Long t, Long first) { body(t, first + d); });
        };
        each([&](Long t, Long c) { peak = std::max(peak, z(t, c)), largest = std::max(largest, std::fabs(z(t, c))); });
        each([&](Long t, Long c) { sum += std::exp(z(t, c) - peak); });
        const auto weight = [&](Long t, Long c) { return std::exp(z(t, c) - peak) / sum; };
        each([&](Long t, Long c) {
            const double term = weight(t, c) * kv.get(b, h, t, c);
            total += term, size += std::fabs(term);
        });
        want.add(place(out, b, h, w) + d, total, size);
        const double upstream = dout.get(b, h, w, d);
        each([&](Long t, Long c) {
            const double p = weight(t, c), x = kv.get(b, h, t, c), slope = p * (upstream * x - upstream * total);
            const double terms = p * std::fabs(upstream) * (std::fabs(x) + size);
            want_dkv.add(place(kv, b, h, t) + c, p * upstream, p * std::fabs(upstream));
            want_dgate.add(place(kv, b, h, t) + c, slope, terms);
            want_dbias.add(bias_at(t, c), slope, terms);
        });
    }

    void run(Judge &judge, const fusion::PoolKernels &kernels, bool finite) {
        const fusion::PoolCall call{kernels, problem, sequences};
        call.check();
        fusion::PoolOperands o;
        o.kv = kv.view(), o.gate = gate.view(), o.out = out.view(), o.bias = bias.data();
        Elements before;
        for (int threads : {1, 3}) {
            out.poison();
            call.forward(o, threads);
            if (threads > 1) judge.require_same("out", before, out.elements);
            before = out.elements;
        }
        judge.compare("out", out, want, largest, true);
        if (!finite) return;  // what an infinity reaches, gradient by gradient, is tested from Python
        dkv.poison(), dgate.poison();
        o.dout = dout.view(), o.dkv = dkv.view(), o.dgate = dgate.view(), o.dbias = dbias.data();
        call.backward(o, 3);
        judge.compare("dkv", dkv, want_dkv, largest, true);
        judge.compare("dgate", dgate, want_dgate, largest, true);
        judge.compare("dbias", dbias, want_dbias, largest);
    }
};

}  // namespace

void test_pooling(Report &report) {
    for (Dtype dtype : dtypes) {
        const auto kernels = [&](const fusion::Variant &v) { return v.pool.kernels[static_cast<int>(dtype)]; };
        const auto tested = with_own(report, [&](const fusion::Variant &v) { return kernels(v).forward; });
        for (const Case &one : cases) {
            PoolTest test(one, dtype);
            Judge judge(report, one.name, dtype, 2 * one.problem.ratio);
            for (const fusion::Built &built : tested) {
                judge.begin(built.name, "", false);
                test.run(judge, kernels(*built.variant), !one.huge);
            }
        }
    }
}

}  // namespace check
