// The Python bindings of SparsePlan and IndexerPlan.

#include "bind/arguments.h"
#include "plan/indexer.h"
#include "plan/sparse.h"

namespace {

using fusion::SparseOperands;
using fusion::SparseProblem;

// Rows, or rows of a paged cache, whose view has, after the five values of rows (address and stride_head as arrays),
// the address of the page table, its stride, page_size and stride_page. dim 0: the problem has no such operand.
fusion::KeySource keys_of(Views &from, std::size_t i, const char *name, std::int64_t dim) {
    const nb::tuple t = from.view(i, name, dim != 0, {5, 9});
    fusion::KeySource keys;
    if (t.empty()) return keys;
    keys.rows = from.rows_of(t, name, dim);
    if (t.size() == 5) return keys;
    keys.table = reinterpret_cast<const std::int32_t *>(item<std::uintptr_t>(t, 5));
    keys.stride_table = item<std::int64_t>(t, 6);
    keys.page_size = item<std::int64_t>(t, 7);
    keys.stride_page = item<std::int64_t>(t, 8);
    // A page table without columns has no address; no sequence has a key then, and nothing is read.
    if (keys.page_size < 1) refuse(std::string(name) + " has no pages");
    return keys;
}

SparseProblem sparse_problem_of(const nb::tuple &from) {
    SparseProblem p{};
    read_fields(from, "a problem of selected keys has 16 fields", p.heads_q, p.heads_kv, p.dim_qk, p.dim_v, p.dim_rope,
                p.dtype, p.scale, p.has_sink, p.shares_kv, p.select_count, p.select_block, p.indexes, p.weights_dtype,
                p.wide_values, p.compressed_ratio, p.ratio);
    return p;
}

enum class Of { forward, backward, loss };  // a loss has no incoming gradient, and its attention is a forward

constexpr std::size_t values_at = 10, target_at = 26;  // operands whose rows have any length

// The number of elements of rows whose length is not a size of the problem; 0 if the operand is missing.
std::int64_t width_of(const Views &from, std::size_t i, const char *name) {
    return from.lacks(i) ? 0 : item<std::int64_t>(from.view(i, name, true, {5}), 4);
}

// Operands and results of a call.
Arguments<SparseOperands> operands_of(const nb::tuple &values, const SparseProblem &p, Of of, std::size_t n) {
    Views from(values, 27, "operands of selected keys are 27 values", n);
    const bool writes = of != Of::forward;  // gradients
    // An indexer with lists has no softmax statistics, nor has an attention without heads.
    const std::int64_t one = p.heads_q && !(p.indexes && p.select_count) ? 1 : 0,
                       index_heads = p.indexes ? p.heads_q : 0;
    const auto written = [&](std::int64_t dim) { return writes ? dim : 0; };
    const auto second = [&](std::int64_t dim) { return p.compressed_ratio ? dim : 0; };
    const std::int64_t own_dim_v = p.shares_kv ? 0 : p.dim_v;
    const std::int64_t value_width = of == Of::loss          ? width_of(from, values_at, "values")
                                     : from.lacks(values_at) ? 0
                                                             : p.select_count;
    SparseOperands o;
    o.q = from.rows(0, "q", p.dim_qk), o.q_rope = from.rows(1, "q_rope", p.dim_rope);
    o.indices = from.rows(2, "indices", p.select_count);
    o.k = {keys_of(from, 3, "k", p.dim_qk), keys_of(from, 22, "k_compressed", second(p.dim_qk))};
    o.k_rope = {keys_of(from, 4, "k_rope", p.dim_rope)};
    o.v = {keys_of(from, 5, "v", p.dim_v), keys_of(from, 23, "v_compressed", second(p.dim_v))};
    o.out = from.rows(6, "out", p.dim_v), o.max = from.rows(7, "max", one), o.sum = from.rows(8, "sum", one);
    o.weights = from.rows(9, "weights", index_heads), o.values = from.rows(values_at, "values", value_width);
    o.dout = from.rows(11, "dout", of != Of::backward ? 0 : p.indexes ? p.select_count : p.dim_v);
    o.dlse = from.rows(12, "dlse", from.lacks(12) ? 0 : 1);
    o.dq = from.rows(13, "dq", written(p.dim_qk)), o.dq_rope = from.rows(14, "dq_rope", written(p.dim_rope));
    o.dk = from.rows(15, "dk", written(p.dim_qk)), o.dk_rope = from.rows(16, "dk_rope", written(p.dim_rope));
    o.dv = from.rows(17, "dv", written(own_dim_v)), o.dweights = from.rows(18, "dweights", written(index_heads));
    o.sink = from.address<const float>(19, "sink", p.has_sink);
    o.dsink = from.address<float>(20, "dsink", p.has_sink && of == Of::backward);
    o.wide_keys = from.get<bool>(21);
    o.dk_compressed = from.rows(24, "dk_compressed", second(written(p.dim_qk)));
    o.dv_compressed = from.rows(25, "dv_compressed", second(written(own_dim_v)));
    o.target = from.rows(target_at, "target", of == Of::loss ? width_of(from, target_at, "target") : 0);
    return {std::move(from), o};
}

void construct_sparse(fusion::SparsePlan *self, const nb::tuple &problem, const nb::tuple &extents, bool backward,
                      const nb::object &variant) {
    new (self)
        fusion::SparsePlan(variant_named(variant).sparse, sparse_problem_of(problem), sequences_of(extents), backward);
}

void run_sparse(const fusion::SparsePlan &self, int threads, const nb::tuple &operands) {
    require_threads(threads);
    if (self.attention()) refuse("a loss reads an attention too");
    const auto given =
        operands_of(operands, self.problem(), self.backward() ? Of::backward : Of::forward, self.sequences());
    const nb::gil_scoped_release released;
    self.run(given.operands, threads);
}

void construct_loss(fusion::SparsePlan *self, const nb::tuple &problem, const nb::tuple &attention,
                    const nb::tuple &extents, bool unit_target, const nb::object &variant) {
    SparseProblem adjusted = sparse_problem_of(problem);
    adjusted.unit_target = unit_target;
    new (self) fusion::SparsePlan(variant_named(variant).sparse, adjusted, sequences_of(extents),
                                  sparse_problem_of(attention));
}

void run_loss(const fusion::SparsePlan &self, int threads, const nb::tuple &operands, const nb::tuple &attended,
              std::uintptr_t loss) {
    require_threads(threads);
    if (!self.attention() || !loss) refuse("this is the plan of no loss, or the loss has no place");
    const auto given = operands_of(operands, self.problem(), Of::loss, self.sequences());
    const std::int64_t target = width_of(given.views, target_at, "target"),
                       values = width_of(given.views, values_at, "values");
    if (self.given_target() ? target < self.target_width() : target)
        refuse("target is missing, too short, or no operand");
    if (values && values < self.target_width()) refuse("values are too short");
    auto read = operands_of(attended, *self.attention(), Of::forward, self.sequences());
    read.operands.v = read.operands.k;
    const nb::gil_scoped_release released;
    self.run(given.operands, read.operands, reinterpret_cast<float *>(loss), threads);
}

void construct_indexer(fusion::IndexerPlan *self, const nb::tuple &problem, const nb::tuple &extents,
                       const nb::object &variant) {
    new (self) fusion::IndexerPlan(variant_named(variant).sparse, sparse_problem_of(problem), sequences_of(extents));
}

// A forward of either plan.
template <class AnyPlan> struct Selected {
    using Plan = AnyPlan;
    using Operands = SparseOperands;

    static Arguments<Operands> arguments(const Plan &plan, const nb::tuple &values) {
        return operands_of(values, plan.problem(), Of::forward, plan.sequences());
    }
    template <class Visit> static void each(Operands &o, Visit visit) {
        const auto keys = [&](const char *name, const char *compressed, fusion::Keys &k) {
            visit(name, k.rows.base);
            visit("table", k.table);
            visit(compressed, k.compressed.rows.base);
            visit("compressed_table", k.compressed.table);
        };
        visit("q", o.q.base), visit("q_rope", o.q_rope.base), visit("indices", o.indices.base);
        keys("k", "k_compressed", o.k), keys("k_rope", "k_rope", o.k_rope), keys("v", "v_compressed", o.v);
        visit("out", o.out.base), visit("max", o.max.base), visit("sum", o.sum.base), visit("sink", o.sink);
        visit("weights", o.weights.base), visit("values", o.values.base);
    }
    static std::int64_t compute(const Plan &plan, const Operands &operands, int threads) {  // every row is written
        const nb::gil_scoped_release released;
        plan.run(operands, threads);
        return 0;
    }
};
using Attention = Selected<fusion::SparsePlan>;
using Indexer = Selected<fusion::IndexerPlan>;

std::unique_ptr<Prepared<Attention>> prepare_sparse(nb::object self, const nb::tuple &operands,
                                                    const nb::tuple &names) {
    const auto &plan = nb::cast<const fusion::SparsePlan &>(self);
    if (plan.attention() || plan.backward()) refuse("only a forward can be prepared");
    return Prepared<Attention>::prepare(std::move(self), operands, names);
}

void run_indexer(const fusion::IndexerPlan &self, int threads, const nb::tuple &operands) {
    run_once<Indexer>(self, threads, operands);
}

}  // namespace

void bind_sparse(nb::module_ &m) {
    nb::class_<fusion::SparsePlan>(m, "SparsePlan",
                                   "Attention to selected keys, a backward, or the indexer's loss, on given lengths.")
        .def("__init__", &construct_sparse, "problem"_a, "extents"_a, "backward"_a, "variant"_a = nb::none())
        .def("workspace_bytes", &fusion::SparsePlan::workspace_bytes, "threads"_a)
        .def("prepare", &prepare_sparse, "operands"_a, "names"_a)
        .def("__init__", &construct_loss, "problem"_a, "attention"_a, "extents"_a, "unit_target"_a = false,
             "variant"_a = nb::none())
        .def("run", &run_sparse, "threads"_a, "operands"_a)
        .def("run", &run_loss, "threads"_a, "operands"_a, "attended"_a, "loss"_a);
    nb::class_<fusion::IndexerPlan>(m, "IndexerPlan", "The lightning indexer's forward on given lengths.")
        .def("__init__", &construct_indexer, "problem"_a, "extents"_a, "variant"_a = nb::none())
        .def("workspace_bytes", &fusion::IndexerPlan::workspace_bytes, "threads"_a)
        .def("prepare", &Prepared<Indexer>::prepare, "operands"_a, "names"_a)
        .def("run", &run_indexer, "threads"_a, "operands"_a);
    Prepared<Attention>::bind(m, "PreparedSparse");
    Prepared<Indexer>::bind(m, "PreparedIndexer");
}
