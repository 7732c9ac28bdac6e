// The Python bindings of SparsePlan and IndexerPlan.

#include "bind/arguments.h"
#include "plan/indexer.h"
#include "plan/sparse.h"

#include <nanobind/stl/unique_ptr.h>

#include <memory>

namespace {

using fusion::SparseProblem;

// Rows, or rows of a paged cache, whose tuple has, after the five values of rows (address and stride_head as arrays),
// the address of the page table, its stride, page_size and stride_page.
struct KeysArgument {
    RowsArgument rows;
    fusion::KeySource keys;

    KeysArgument(const nb::object &from, const char *name, std::int64_t dim, std::size_t sequences)
        : rows(plain(from), name, dim, sequences) {
        keys.rows = rows.rows;
        if (from.is_none()) return;
        const auto t = nb::cast<nb::tuple>(from);
        if (t.size() == 5) return;
        if (t.size() != 9) refuse(std::string(name) + " is no view");
        keys.table = reinterpret_cast<const std::int32_t *>(item<std::uintptr_t>(t, 5));
        keys.stride_table = item<std::int64_t>(t, 6);
        keys.page_size = item<std::int64_t>(t, 7);
        keys.stride_page = item<std::int64_t>(t, 8);
        // A page table without columns has no address; no sequence has a key then, and nothing is read.
        if (keys.page_size < 1) refuse(std::string(name) + " has no pages");
    }

private:
    static nb::object plain(const nb::object &from) {
        if (from.is_none()) return from;
        const auto t = nb::cast<nb::tuple>(from);
        if (t.size() < 5) return from;
        return nb::make_tuple(t[0], t[1], t[2], t[3], t[4]);
    }
};

SparseProblem sparse_problem_of(const nb::tuple &t) {
    if (t.size() != 16) refuse("a problem of selected keys has 16 fields");
    SparseProblem p{};
    p.heads_q = item<std::int64_t>(t, 0);
    p.heads_kv = item<std::int64_t>(t, 1);
    p.dim_qk = item<std::int64_t>(t, 2);
    p.dim_v = item<std::int64_t>(t, 3);
    p.dim_rope = item<std::int64_t>(t, 4);
    p.dtype = static_cast<Dtype>(choice(t[5], "dtype", 3));
    p.scale = item<double>(t, 6);
    p.has_sink = item<bool>(t, 7);
    p.shares_kv = item<bool>(t, 8);
    p.select_count = item<std::int64_t>(t, 9);
    p.select_block = item<std::int64_t>(t, 10);
    p.indexes = item<bool>(t, 11);
    p.weights_dtype = static_cast<Dtype>(choice(t[12], "weights_dtype", 3));
    p.wide_values = item<bool>(t, 13);
    p.compressed_ratio = item<std::int64_t>(t, 14);
    p.ratio = item<std::int64_t>(t, 15);
    return p;
}

// Operands and results of a call, in the order of the Python tuple; keeps references to the arrays of the views.
struct SparseArgument {
    bool writes;  // true if gradients are written
    RowsArgument q, q_rope, indices;
    KeysArgument k, k_rope, v;
    RowsArgument out, max, sum, weights, values, dout, dlse, dq, dq_rope, dk, dk_rope, dv, dweights;
    KeysArgument k_compressed, v_compressed;  // of a second source
    RowsArgument dk_compressed, dv_compressed, target;
    fusion::SparseOperands operands;

    enum class Of { forward, backward, loss };  // a loss has no incoming gradient, and its attention is a forward

    SparseArgument(const nb::tuple &t, const SparseProblem &p, Of of, std::size_t n)
        : writes(of != Of::forward), q(at(t, 0), "q", p.dim_qk, n), q_rope(at(t, 1), "q_rope", p.dim_rope, n),
          indices(at(t, 2), "indices", p.select_count, n), k(at(t, 3), "k", p.dim_qk, n),
          k_rope(at(t, 4), "k_rope", p.dim_rope, n), v(at(t, 5), "v", p.dim_v, n), out(at(t, 6), "out", p.dim_v, n),
          max(at(t, 7), "max", has_statistics(p), n), sum(at(t, 8), "sum", has_statistics(p), n),
          weights(at(t, 9), "weights", p.indexes ? p.heads_q : 0, n), values(at(t, 10), "values",
                                                                             of == Of::loss        ? width_of(t, 10)
                                                                             : at(t, 10).is_none() ? 0
                                                                                                   : p.select_count,
                                                                             n),
          dout(at(t, 11), "dout",
               of != Of::backward ? 0
               : p.indexes        ? p.select_count
                                  : p.dim_v,
               n),
          dlse(at(t, 12), "dlse", at(t, 12).is_none() ? 0 : 1, n), dq(at(t, 13), "dq", writes ? p.dim_qk : 0, n),
          dq_rope(at(t, 14), "dq_rope", writes ? p.dim_rope : 0, n), dk(at(t, 15), "dk", writes ? p.dim_qk : 0, n),
          dk_rope(at(t, 16), "dk_rope", writes ? p.dim_rope : 0, n),
          dv(at(t, 17), "dv", writes && !p.shares_kv ? p.dim_v : 0, n),
          dweights(at(t, 18), "dweights", writes && p.indexes ? p.heads_q : 0, n),
          k_compressed(at(t, 22), "k_compressed", p.compressed_ratio ? p.dim_qk : 0, n),
          v_compressed(at(t, 23), "v_compressed", p.compressed_ratio ? p.dim_v : 0, n),
          dk_compressed(at(t, 24), "dk_compressed", p.compressed_ratio && writes ? p.dim_qk : 0, n),
          dv_compressed(at(t, 25), "dv_compressed", p.compressed_ratio && writes && !p.shares_kv ? p.dim_v : 0, n),
          target(at(t, 26), "target", of == Of::loss ? width_of(t, 26) : 0, n) {
        const auto sink = item<std::uintptr_t>(t, 19), dsink = item<std::uintptr_t>(t, 20);
        if (p.has_sink != (sink != 0)) refuse(p.has_sink ? "sink is missing" : "sink belongs to no operand");
        if ((p.has_sink && of == Of::backward) != (dsink != 0)) refuse("dsink is missing, or belongs to no operand");
        operands = {q.rows,
                    q_rope.rows,
                    indices.rows,
                    {k.keys, k_compressed.keys},
                    {k_rope.keys},
                    {v.keys, v_compressed.keys},
                    out.rows,
                    max.rows,
                    sum.rows,
                    reinterpret_cast<const float *>(sink),
                    weights.rows,
                    values.rows,
                    dout.rows,
                    dlse.rows,
                    dq.rows,
                    dq_rope.rows,
                    dk.rows,
                    dk_rope.rows,
                    dv.rows,
                    dweights.rows,
                    dk_compressed.rows,
                    dv_compressed.rows,
                    target.rows,
                    reinterpret_cast<float *>(dsink),
                    item<bool>(t, 21)};
    }

    // True if the problem has softmax statistics: not an indexer with lists, nor an attention without heads.
    static bool has_statistics(const SparseProblem &p) { return p.heads_q && !(p.indexes && p.select_count); }

    // The number of elements of rows whose length is not a size of the problem; 0 if the operand is missing.
    static std::int64_t width_of(const nb::tuple &t, std::size_t i) {
        const nb::object from = at(t, i);
        return from.is_none() ? 0 : item<std::int64_t>(nb::cast<nb::tuple>(from), 4);
    }

private:
    static nb::object at(const nb::tuple &t, std::size_t i) {
        if (t.size() != 27) refuse("operands of selected keys are 27 values");
        return nb::borrow(t[i]);
    }
};

void construct_sparse(fusion::SparsePlan *self, const nb::tuple &problem, const nb::tuple &extents, bool backward,
                      const nb::object &variant) {
    new (self)
        fusion::SparsePlan(*built_variant(variant).sparse, sparse_problem_of(problem), sequences_of(extents), backward);
}

void run_sparse(const fusion::SparsePlan &self, int threads, const nb::tuple &operands) {
    require_threads(threads);
    if (self.attention()) refuse("a loss reads an attention too");
    const auto of = self.backward() ? SparseArgument::Of::backward : SparseArgument::Of::forward;
    const SparseArgument given(operands, self.problem(), of, self.sequences());
    const nb::gil_scoped_release released;
    self.run(given.operands, threads);
}

void construct_loss(fusion::SparsePlan *self, const nb::tuple &problem, const nb::tuple &attention,
                    const nb::tuple &extents, bool unit_target, const nb::object &variant) {
    SparseProblem own = sparse_problem_of(problem);
    own.unit_target = unit_target;
    new (self)
        fusion::SparsePlan(*built_variant(variant).sparse, own, sequences_of(extents), sparse_problem_of(attention));
}

void run_loss(const fusion::SparsePlan &self, int threads, const nb::tuple &operands, const nb::tuple &attended,
              std::uintptr_t loss) {
    require_threads(threads);
    if (!self.attention() || !loss) refuse("this is the plan of no loss, or the loss has no place");
    const SparseArgument given(operands, self.problem(), SparseArgument::Of::loss, self.sequences());
    const std::int64_t target = SparseArgument::width_of(operands, 26), values = SparseArgument::width_of(operands, 10);
    if (self.given_target() ? target < self.target_width() : target)
        refuse("target is missing, too short, or no operand");
    if (values && values < self.target_width()) refuse("values are too short");
    SparseArgument read(attended, *self.attention(), SparseArgument::Of::forward, self.sequences());
    read.operands.v = read.operands.k;
    const nb::gil_scoped_release released;
    self.run(given.operands, read.operands, reinterpret_cast<float *>(loss), threads);
}

void construct_indexer(fusion::IndexerPlan *self, const nb::tuple &problem, const nb::tuple &extents,
                       const nb::object &variant) {
    new (self) fusion::IndexerPlan(*built_variant(variant).sparse, sparse_problem_of(problem), sequences_of(extents));
}

void run_indexer(const fusion::IndexerPlan &self, int threads, const nb::tuple &operands) {
    require_threads(threads);
    const SparseArgument given(operands, self.problem(), SparseArgument::Of::forward, self.sequences());
    const nb::gil_scoped_release released;
    self.run(given.operands, threads);
}

// Visits the pointers of operands and results of a forward.
constexpr auto each_selected = [](fusion::SparseOperands &o, auto visit) {
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
};

// A plan of a forward with the memory layout of its operands; a call passes only their addresses.
template <class Plan> struct Prepared {
    nb::object plan;
    SparseArgument given;
    Places places;

    Prepared(nb::object plan_, const Plan &of, const nb::tuple &operands, const nb::tuple &names)
        : plan(std::move(plan_)), given(operands, of.problem(), SparseArgument::Of::forward, of.sequences()),
          places(given.operands, names, each_selected) {}
};

template <class Plan>
std::unique_ptr<Prepared<Plan>> prepare(nb::object self, const nb::tuple &operands, const nb::tuple &names) {
    const auto &plan = nb::cast<const Plan &>(self);
    return std::make_unique<Prepared<Plan>>(std::move(self), plan, operands, names);
}

std::unique_ptr<Prepared<fusion::SparsePlan>> prepare_sparse(nb::object self, const nb::tuple &operands,
                                                             const nb::tuple &names) {
    const auto &plan = nb::cast<const fusion::SparsePlan &>(self);
    if (plan.attention() || plan.backward()) refuse("only a forward can be prepared");
    return prepare<fusion::SparsePlan>(std::move(self), operands, names);
}

// Runs a prepared call on tensors in the order of the names; every row is written.
template <class Plan>
std::int64_t run_prepared(const Prepared<Plan> &self, int threads, const nb::args &tensors) {
    require_threads(threads);
    const auto &plan = nb::cast<const Plan &>(self.plan);
    fusion::SparseOperands operands = self.given.operands;
    self.places.set(operands, tensors, each_selected);
    const nb::gil_scoped_release released;
    plan.run(operands, threads);
    return 0;
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
        .def("prepare", &prepare<fusion::IndexerPlan>, "operands"_a, "names"_a)
        .def("run", &run_indexer, "threads"_a, "operands"_a);
    nb::class_<Prepared<fusion::SparsePlan>>(m, "PreparedSparse", "A plan with the views of its operands.")
        .def("run", &run_prepared<fusion::SparsePlan>, "threads"_a, "tensors"_a);
    nb::class_<Prepared<fusion::IndexerPlan>>(m, "PreparedIndexer", "A plan with the views of its operands.")
        .def("run", &run_prepared<fusion::IndexerPlan>, "threads"_a, "tensors"_a);
}
