// Selected keys, forward and backward; the lightning indexer's choice, statistics and gradients; its loss with lists
// and without.

#include "plan/indexer.h"
#include "plan/sparse.h"
#include "core_test.h"
#include "naive_indexer.h"

#include <numeric>

namespace check {
namespace {

using fusion::SparseOperands;
using fusion::SparseProblem;

// clang-format off: a table, which it would lay out one field a line
struct Case {
    const char *name;
    Long heads_q = 1, heads_kv = 1, dim_qk = 8, dim_v = 8, dim_rope = 0;
    Lengths lengths;
    Long count = 1, block = 1;                   // entries of a list, keys of an entry
    bool sink = false, shares_kv = false;
    Long hi = everything;
    bool hides = false;  // some keys, and all keys of some rows, by scores of -inf
};

const Case selections[] = {
    {.name = "few heads", .heads_q = 3, .dim_qk = 33, .dim_v = 7, .dim_rope = 5, .lengths = {{5, 40}, {0, 3}, {2, 1}},
     .count = 20, .sink = true},
    {.name = "key heads, blocks", .heads_q = 10, .heads_kv = 2, .dim_qk = 16, .dim_v = 24, .lengths = {{7, 130}},
     .count = 9, .block = 5, .hi = 124},
    {.name = "shared values, chunks", .heads_q = 17, .dim_qk = 64, .dim_v = 48, .dim_rope = 16,
     .lengths = {{6, 500}}, .count = 300, .shares_kv = true},
    {.name = "long lists", .heads_q = 4, .dim_qk = 16, .dim_v = 16, .lengths = {{3, 3000}}, .count = 1500},
    {.name = "many heads", .heads_q = 42, .dim_qk = 64, .dim_v = 32, .lengths = {{3, 200}}, .count = 145},
    {.name = "hidden keys", .heads_q = 6, .heads_kv = 2, .dim_qk = 33, .dim_v = 7, .dim_rope = 5,
     .lengths = {{5, 40}, {3, 9}}, .count = 20, .hides = true},
    {.name = "hidden keys, shared", .heads_q = 17, .dim_qk = 64, .dim_v = 64, .lengths = {{6, 500}}, .count = 300,
     .shares_kv = true, .hides = true},
    {.name = "many rows", .heads_q = 5, .dim_qk = 24, .dim_v = 24, .lengths = {{150, 1400}, {33, 90}}, .count = 60},
};
// clang-format on

struct IndexCase {
    const char *name;
    Long heads, dim;
    Lengths lengths;
    Long count;  // entries of a list; 0: a row meets all keys of its band
    bool sink;
};

const IndexCase choices[] = {{"choice", 5, 40, {{3, 100}, {0, 4}, {2, 1}}, 7, false},
                             {"choice, long lists", 8, 33, {{11, 700}}, 600, false},
                             {"choice, long rows", 2, 8, {{13, 1500}}, 20, false},
                             {"choice, shared rows", 2, 8, {{2, 2500}}, 1100, false},
                             {"choice, many heads", 42, 64, {{12, 150}}, 40, false}};
const IndexCase losses[] = {{"loss, lists", 5, 20, {{9, 90}, {1, 3}, {2, 0}}, 40, false},
                            {"loss, lists, ranges", 13, 33, {{5, 1100}}, 500, true},
                            {"loss, lists, many rows", 5, 24, {{150, 1400}, {33, 90}}, 60, false},
                            {"loss, band", 5, 20, {{17, 60}, {3, 1}}, 0, true},
                            {"loss, band, two tiles", 3, 8, {{150, 170}}, 0, false}};

// Lists of 32-bit integers in the core's order of rows.
class Lists {
public:
    Lists() = default;
    Lists(Long heads, Long count, const std::vector<Long> &rows) : memory_(Dtype::float32, heads, count, rows) {}

    void set(Long b, Long head, Long row, Long slot, std::int32_t entry) {
        std::memcpy(address(b, head, row, slot), &entry, 4);
    }
    std::int32_t get(Long b, Long head, Long row, Long slot) {
        std::int32_t entry;
        std::memcpy(&entry, address(b, head, row, slot), 4);
        return entry;
    }
    void poison() { memory_.poison(); }
    const Elements &elements() const { return memory_.elements; }
    fusion::Rows view() { return memory_.view(); }

private:
    char *address(Long b, Long head, Long row, Long slot) {
        return static_cast<char *>(memory_.elements.data()) + 4 * memory_.at(b, head, row, slot);
    }
    RowMemory memory_;
};

// An attention to lists, or (count 0) to bands, and the lists as the core takes them.
struct Selection {
    Call c;
    Lists lists;

    Selection(const Case &from, Dtype dtype) {
        const Counts rows(from.lengths);
        std::mt19937 random(41);
        c = call_of(plain_problem(from.heads_q, from.heads_kv, from.dim_qk, from.dim_v, from.dim_rope, dtype),
                    from.lengths);
        c.problem.has_sink = from.sink;
        for (const auto &[q_len, kv_len] : from.lengths)
            c.sequences.push_back({q_len, kv_len, -everything, from.hi, 0, 0});
        for (RowMemory *m : {&c.q, &c.k, &c.v, &c.q_rope, &c.k_rope, &c.dout}) m->fill(random, 2.0);
        if (from.hides) make_infinite();
        if (from.shares_kv) {
            c.v.each([&](Long b, Long h, Long t, Long d) { c.v.set(b, h, t, d, c.k.get(b, h, t, d)); });
        }
        for (Long h = 0; h < from.heads_q; ++h) c.sink.push_back(0.5f - 0.4f * static_cast<float>(h));
        if (from.count) select(from, rows, random);
        c.max.each([&](Long b, Long h, Long i, Long) {
            if (!from.hides || h >= from.heads_kv) return;
            std::erase_if(c.lists[c.list_at(b, h, i)], [&](Long key) { return hides_row(i) || hides_key(key); });
        });
    }

    static bool hides_row(Long row) { return row % 4 == 1; }
    static bool hides_key(Long key) { return key % 5 == 2; }

    // What is multiplied is positive; -inf in an element of a row of q or k makes all its scores so. What it then meets
    // with a weight of 0 is not finite either.
    void make_infinite() {
        for (RowMemory *m : {&c.q, &c.k}) {
            m->each([&](Long b, Long h, Long t, Long d) { m->set(b, h, t, d, std::fabs(m->get(b, h, t, d)) + 0.125); });
        }
        c.q.each([&](Long b, Long h, Long t, Long d) {
            if (hides_row(t) && d == 1) c.q.set(b, h, t, d, -INFINITY);
        });
        c.k.each([&](Long b, Long h, Long t, Long d) {
            if (hides_key(t) && d == 0) c.k.set(b, h, t, d, -INFINITY);
        });
        c.v.each([&](Long b, Long h, Long t, Long d) {
            if (hides_key(t) && d == 2) c.v.set(b, h, t, d, NAN);
        });
        c.dout.each([&](Long b, Long h, Long t, Long d) {
            if (hides_row(t) && d == 3) c.dout.set(b, h, t, d, INFINITY);
        });
    }

    // Different blocks in any order, of which the band may hide a part; every third list ends early.
    void select(const Case &from, const Counts &rows, std::mt19937 &random) {
        lists = Lists(from.heads_kv, from.count, rows.queries);
        for (std::size_t b = 0; b < rows.queries.size(); ++b) {
            std::vector<Long> blocks((rows.keys[b] + from.block - 1) / from.block);
            std::iota(blocks.begin(), blocks.end(), 0);
            for (Long i = 0; i < rows.queries[b]; ++i) {
                const Long end = std::min(i + from.hi, rows.keys[b]), readable = (end + from.block - 1) / from.block;
                for (Long h = 0; h < from.heads_kv; ++h) {
                    std::shuffle(blocks.begin(), blocks.end(), random);
                    std::vector<Long> keys;
                    for (Long slot = 0; slot < from.count; ++slot) {
                        const bool there = slot < std::min<Long>(blocks.size(), readable) && (i % 3 != 1 || slot < 2);
                        lists.set(static_cast<Long>(b), h, i, slot, there ? static_cast<int>(blocks[slot]) : -1);
                        const Long first = there ? blocks[slot] * from.block : end;
                        for (Long j = first; j < std::min(first + from.block, end); ++j) keys.push_back(j);
                    }
                    c.lists.push_back(keys);
                }
            }
        }
    }

    SparseProblem problem(const Case &from) const {
        return {from.heads_q, from.heads_kv,  from.dim_qk, from.dim_v, from.dim_rope, c.problem.dtype, c.problem.scale,
                from.sink,    from.shares_kv, from.count,  from.block, false,         c.problem.dtype};
    }
    SparseOperands operands() {
        SparseOperands o;
        o.q = c.q.view(), o.q_rope = c.q_rope.view(), o.indices = lists.view();
        o.k = {c.k.view()}, o.k_rope = {c.k_rope.view()}, o.v = {c.v.view()};
        o.out = c.out.view(), o.max = c.max.view(), o.sum = c.sum.view(), o.sink = c.sink.data();
        return o;
    }
};

// dk of keys that are values too.
void add_values(const Call &c, Results &r) {
    Long at = 0;
    c.v.each([&](Long b, Long h, Long t, Long d) {
        r["dk"].add(place(c.k, b, h, t) + d, r["dv"].value[at], r["dv"].size[at]);
        ++at;
    });
}

void test_selection(Report &report, const Case &from, Dtype dtype) {
    Selection s(from, dtype);
    Call &c = s.c;
    double largest = 0;
    const Results want = forward(c, largest);
    Judge judge(report, from.name, dtype, std::max(most_terms(c), from.count * from.block));
    for (const fusion::Built &built : with_own_sparse_part(report, dtype)) {
        judge.begin(built.name, "", built.variant->sparse.as_pairs.attend);
        const fusion::SparsePlan plan(built.variant->sparse, s.problem(from), c.sequences, false);
        run_teams(judge, c, [&](int threads) { plan.run(s.operands(), threads); });
        compare_outputs(judge, c, want, largest);

        double largest_term = 0;
        Results gradients = backward(c, largest_term);
        if (from.shares_kv) add_values(c, gradients);
        const fusion::SparsePlan back(built.variant->sparse, s.problem(from), c.sequences, true);
        RowMemory dq = c.q, dk = c.k, dv = c.v, dq_rope = c.q_rope, dk_rope = c.k_rope;
        std::vector<float> dsink(from.heads_q);
        SparseOperands o = s.operands();
        o.dout = c.dout.view(), o.dq = dq.view(), o.dk = dk.view(), o.dv = dv.view();
        o.dq_rope = dq_rope.view(), o.dk_rope = dk_rope.view(), o.dsink = dsink.data();
        for (int threads : {3, 8, 1}) {
            const Elements before_dq = dq.elements, before_dk = dk.elements;
            for (RowMemory *m : {&dq, &dk, &dv, &dq_rope, &dk_rope}) m->poison();
            back.run(o, threads);
            if (threads == 3) continue;
            judge.require_same("dq", before_dq, dq.elements);
            judge.require_same("dk", before_dk, dk.elements);
        }
        for (const auto &[name, memory] :
             {std::pair{"dq", &dq}, {"dk", &dk}, {"dq_rope", &dq_rope}, {"dk_rope", &dk_rope}}) {
            judge.compare(name, *memory, gradients.at(name), largest_term, true);
        }
        if (!from.shares_kv) judge.compare("dv", dv, gradients.at("dv"), largest_term, true);
        if (from.sink) judge.compare("dsink", dsink, gradients.at("dsink"), largest_term);
    }
}

// --------------------------------------------------------------------------------------------------------- the indexer

Index index_of(const IndexCase &from, Dtype dtype, std::mt19937 &random) {
    const Counts rows(from.lengths);
    Index x{from.heads,
            from.dim,
            RowMemory(dtype, from.heads, from.dim, rows.queries),
            RowMemory(dtype, 1, from.dim, rows.keys),
            RowMemory(dtype, 1, from.heads, rows.queries),
            RowMemory(Dtype::float32, 1, 1, rows.queries),
            RowMemory(Dtype::float32, 1, 1, rows.queries)};
    for (RowMemory *m : {&x.q, &x.k, &x.weights}) m->fill(random, 0.6);
    return x;
}

SparseProblem problem_of(const IndexCase &from, Dtype dtype, Long count) {
    return {from.heads, 1, from.dim, 0, 0, dtype, 1.0, false, false, count, 1, true, dtype};
}

SparseOperands operands_of(Index &x) {
    SparseOperands o;
    o.q = x.q.view(), o.k = {x.k.view()}, o.weights = x.weights.view(), o.max = x.max.view(), o.sum = x.sum.view();
    return o;
}

// Whole numbers, whose scores are exact: the largest by descending score, equal ones by ascending key.
void test_choice(Report &report, const IndexCase &from, Dtype dtype) {
    std::mt19937 random(43);
    Index x = index_of(from, dtype, random);
    for (RowMemory *m : {&x.q, &x.k, &x.weights}) {
        m->each([&](Long b, Long h, Long t, Long d) { m->set(b, h, t, d, static_cast<int>(random() % 5) - 2); });
    }
    const Counts rows(from.lengths);
    std::vector<fusion::Sequence> sequences;
    sequences.reserve(from.lengths.size());
    for (const auto &[q_len, kv_len] : from.lengths) {
        sequences.push_back({q_len, kv_len, -everything, kv_len - q_len + 1, 0, 0});
    }
    Lists selection(1, from.count, rows.queries);
    SparseOperands o = operands_of(x);
    o.indices = selection.view();
    Judge judge(report, from.name, dtype, 1);
    for (const fusion::Built &built : with_own_sparse_part(report, dtype)) {
        judge.begin(built.name, "", false);
        Elements before;
        for (int threads : {3, 8, 1}) {
            selection.poison();
            fusion::IndexerPlan(built.variant->sparse, problem_of(from, dtype, from.count), sequences).run(o, threads);
            if (threads != 3) judge.require_same("indices", before, selection.elements());
            before = selection.elements();
        }
        x.max.each([&](Long b, Long, Long i, Long) {
            std::vector<std::pair<double, Long>> keys;
            for (Long j = 0; j < std::min(sequences[b].kv_len, i + sequences[b].hi); ++j) {
                keys.emplace_back(-index_score(x, b, i, j).total.value, j);
            }
            std::sort(keys.begin(), keys.end());
            for (Long slot = 0; slot < from.count; ++slot) {
                const double want = slot < static_cast<Long>(keys.size()) ? keys[slot].second : -1;
                judge.check("index", selection.get(b, 0, i, slot), want, 0, 0, false);
            }
        });
    }
}

struct IndexGradients {
    RowMemory dq, dk, dweights;
    explicit IndexGradients(const Index &x) : dq(x.q), dk(x.k), dweights(x.weights) {
        for (RowMemory *m : {&dq, &dk, &dweights}) m->poison();
    }
    void view(SparseOperands &o) { o.dq = dq.view(), o.dk = dk.view(), o.dweights = dweights.view(); }
    void compare(Judge &judge, const Results &want, double largest) const {
        judge.compare("dq", dq, want.at("dq"), largest, true);
        judge.compare("dk", dk, want.at("dk"), largest, true);
        judge.compare("dweights", dweights, want.at("dweights"), largest, true);
    }
};

// An indexer and the attention that it learns from, to lists or to the band up to the diagonal, and what is expected.
struct LossCall {
    Case attended;
    Selection s;
    Index x;
    double largest = 0;
    Results statistics, want;

    LossCall(const IndexCase &from, Dtype dtype) : attended(attention_of(from)), s(attended, dtype) {
        std::mt19937 random(47);
        x = index_of(from, dtype, random);
        const Results saved = forward(s.c, largest);
        for (auto [name, memory] : {std::pair{"max", &s.c.max}, {"sum", &s.c.sum}}) {
            Long at = 0;
            memory->each([&](Long b, Long h, Long t, Long d) { memory->set(b, h, t, d, saved.at(name).value[at++]); });
        }
        statistics = {{"max", Sums(x.max.size())}, {"sum", Sums(x.sum.size())}};
        x.max.each([&](Long b, Long, Long i, Long) {
            const Softmax softmax = index_softmax(x, index_keys(s.c, b, i), b, i, largest);
            statistics["max"].add(place(x.max, b, 0, i), softmax.peak, std::fabs(softmax.peak));
            statistics["sum"].add(place(x.max, b, 0, i), softmax.sum, softmax.sum);
        });
        want = index_loss(s.c, x, largest);
    }

    static Case attention_of(const IndexCase &from) {
        const Long diagonal = from.lengths[0].second - from.lengths[0].first + 1;
        return {.name = from.name,
                .heads_q = 3,
                .dim_qk = 16,
                .dim_rope = 3,
                .lengths = from.lengths,
                .count = from.count,
                .sink = from.sink,
                .hi = from.count ? everything : diagonal};
    }
    SparseProblem attention() const {
        SparseProblem p = s.problem(attended);
        p.dim_v = 0, p.select_count = 0;
        return p;
    }
};

void test_loss(Report &report, const IndexCase &from, Dtype dtype) {
    LossCall call(from, dtype);
    Index &x = call.x;
    const std::vector<fusion::Sequence> &sequences = call.s.c.sequences;
    Judge judge(report, from.name, dtype, most_terms(call.s.c));
    for (const fusion::Built &built : with_own_sparse_part(report, dtype)) {
        judge.begin(built.name, "", built.variant->sparse.as_pairs.attend);
        SparseOperands operands = operands_of(x);
        operands.indices = call.s.lists.view();
        if (!from.count) {
            x.max.poison(), x.sum.poison();
            fusion::IndexerPlan(built.variant->sparse, problem_of(from, dtype, 0), sequences).run(operands, 3);
            judge.compare("max", x.max, call.statistics.at("max"), call.largest, false, true);
            judge.compare("sum", x.sum, call.statistics.at("sum"), call.largest, false);
        }
        const fusion::SparsePlan plan(built.variant->sparse, problem_of(from, dtype, from.count), sequences,
                                      call.attention());
        std::vector<float> loss(1), other(1);
        IndexGradients alone(x);
        alone.view(operands);
        plan.run(operands, call.s.operands(), loss.data(), 1);
        for (int threads : {3, 8}) {
            IndexGradients together(x);
            together.view(operands);
            plan.run(operands, call.s.operands(), other.data(), threads);
            judge.require_same("dq", alone.dq.elements, together.dq.elements);
            judge.require_same("dk", alone.dk.elements, together.dk.elements);
        }
        judge.compare("loss", loss, call.want.at("loss"), call.largest);
        alone.compare(judge, call.want, call.largest);
    }
}

// Gradients of the scores that were chosen.
void test_chosen(Report &report, const IndexCase &from, Dtype dtype) {
    Selection s({.name = from.name, .lengths = from.lengths, .count = from.count}, dtype);
    std::mt19937 random(53);
    Index x = index_of(from, dtype, random);
    RowMemory dvalues(dtype, 1, from.count, Counts(from.lengths).queries);
    dvalues.fill(random, 1.0);
    Results want = empty_gradients(x);
    double largest = 0;
    x.max.each([&](Long b, Long, Long i, Long) {
        const std::vector<Long> keys = index_keys(s.c, b, i);
        for (std::size_t slot = 0; slot < keys.size(); ++slot) {
            const double dscore = dvalues.get(b, 0, i, static_cast<Long>(slot));
            add_index_gradient(x, b, i, keys[slot], dscore, std::fabs(dscore), want);
            largest = std::max(largest, index_score(x, b, i, keys[slot]).total.size);
        }
    });
    Judge judge(report, from.name, dtype, most_terms(s.c));
    for (const fusion::Built &built : with_own_sparse_part(report, dtype)) {
        judge.begin(built.name, "chosen, ", built.variant->sparse.as_pairs.attend);
        IndexGradients gradients(x);
        SparseOperands o = operands_of(x);
        o.indices = s.lists.view(), o.dout = dvalues.view();
        gradients.view(o);
        fusion::SparsePlan(built.variant->sparse, problem_of(from, dtype, from.count), s.c.sequences, true).run(o, 3);
        gradients.compare(judge, want, largest);
    }
}

}  // namespace

void test_sparse(Report &report) {
    for (Dtype dtype : dtypes) {
        for (const Case &one : selections) test_selection(report, one, dtype);
        for (const IndexCase &one : choices) test_choice(report, one, dtype);
        for (const IndexCase &one : losses) test_loss(report, one, dtype);
        test_chosen(report, losses[0], dtype);
    }
}

}  // namespace check
