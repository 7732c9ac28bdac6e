// The Python bindings of BackwardPlan.

#include "plan/backward.h"
#include "bind/arguments.h"

namespace {

// dout, dlse (or None), dq, dk, dv, dq_rope, dk_rope, dbias (or None if not requested), the address of dsink, and true
// if dbias is written in its dtype, false if it accumulates in float32.
Arguments<fusion::Gradients> gradients_of(const nb::tuple &values, const fusion::Problem &p, std::size_t n) {
    Views from(values, 10, "gradients are ten values", n);
    fusion::Gradients g;
    g.dout = from.rows(0, "dout", p.dim_v), g.dlse = from.rows(1, "dlse", from.lacks(1) ? 0 : 1);
    g.dq = from.rows(2, "dq", p.dim_qk), g.dk = from.rows(3, "dk", p.dim_qk), g.dv = from.rows(4, "dv", p.dim_v);
    g.dq_rope = from.rows(5, "dq_rope", p.dim_rope), g.dk_rope = from.rows(6, "dk_rope", p.dim_rope);
    g.dbias = from.matrix(7, "dbias", has_matrix(p) && !from.lacks(7));
    g.dsink = from.address<float>(8, "dsink", p.has_sink);
    g.owns_dbias = from.get<bool>(9) && g.dbias.base;
    if (g.owns_dbias && p.bias != fusion::Bias::matrix) refuse("dbias cannot be written once");
    return {std::move(from), g};
}

void construct_backward(fusion::BackwardPlan *self, const nb::tuple &problem, const nb::tuple &extents,
                        const nb::object &variant) {
    const fusion::Problem p = problem_of(problem);
    new (self) fusion::BackwardPlan(variant_named(variant), p, sequences_of(extents, p.heads_q));
}

std::int64_t run_backward(const fusion::BackwardPlan &self, int threads, const nb::tuple &operands,
                          const nb::tuple &gradients) {
    require_threads(threads);
    const auto read = operands_of(operands, self.problem(), self.sequences());
    const auto written = gradients_of(gradients, self.problem(), self.sequences());
    const nb::gil_scoped_release released;
    return self.run(read.operands, written.operands, threads);
}

}  // namespace

void bind_backward(nb::module_ &m) {
    nb::class_<fusion::BackwardPlan>(m, "BackwardPlan", "The backward of one problem on given lengths.")
        .def("__init__", &construct_backward, "problem"_a, "extents"_a, "variant"_a = nb::none())
        .def("workspace_bytes", &fusion::BackwardPlan::workspace_bytes, "threads"_a)
        .def_prop_ro("variant", &fusion::BackwardPlan::variant)
        .def("run", &run_backward, "threads"_a, "operands"_a, "gradients"_a);
}
