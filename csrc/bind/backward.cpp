// The Python bindings of BackwardPlan.

#include "plan/backward.h"
#include "bind/arguments.h"

namespace {

// dout, dlse (or None), dq, dk, dv, dq_rope, dk_rope, dbias (or None if not requested), the address of dsink, and true
// if dbias is written in its dtype, false if it accumulates in float32.
struct GradientsArgument {
    RowsArgument dout, dlse, dq, dk, dv, dq_rope, dk_rope;
    MatrixArgument dbias;
    fusion::Gradients gradients;

    GradientsArgument(const nb::tuple &t, const fusion::Problem &p, std::size_t n)
        : dout(at(t, 0), "dout", p.dim_v, n), dlse(at(t, 1), "dlse", at(t, 1).is_none() ? 0 : 1, n),
          dq(at(t, 2), "dq", p.dim_qk, n), dk(at(t, 3), "dk", p.dim_qk, n), dv(at(t, 4), "dv", p.dim_v, n),
          dq_rope(at(t, 5), "dq_rope", p.dim_rope, n), dk_rope(at(t, 6), "dk_rope", p.dim_rope, n),
          dbias(at(t, 7), "dbias", wants_dbias(t, p), n) {
        const auto dsink = item<std::uintptr_t>(t, 8);
        if (p.has_sink != (dsink != 0)) refuse(p.has_sink ? "dsink is missing" : "dsink belongs to no operand");
        gradients = {dout.rows,
                     dlse.rows,
                     dq.rows,
                     dk.rows,
                     dv.rows,
                     dq_rope.rows,
                     dk_rope.rows,
                     dbias.matrix,
                     reinterpret_cast<float *>(dsink),
                     item<bool>(t, 9) && dbias.matrix.base};
        if (gradients.owns_dbias && p.bias != fusion::Bias::matrix) refuse("dbias cannot be written once");
    }

private:
    static nb::object at(const nb::tuple &t, std::size_t i) {
        if (t.size() != 10) refuse("gradients are ten values");
        return nb::borrow(t[i]);
    }
    static bool wants_dbias(const nb::tuple &t, const fusion::Problem &p) {
        return (p.bias == fusion::Bias::matrix || p.bias == fusion::Bias::table) && !at(t, 7).is_none();
    }
};

void construct(fusion::BackwardPlan *self, const nb::tuple &problem, const nb::tuple &extents,
               const nb::object &variant) {
    const fusion::Problem p = problem_of(problem);
    new (self) fusion::BackwardPlan(variant_named(variant), p, sequences_of(extents, p.heads_q));
}

std::int64_t run(const fusion::BackwardPlan &self, int threads, const nb::tuple &operands, const nb::tuple &gradients) {
    require_threads(threads);
    const OperandsArgument read(operands, self.problem(), self.sequences());
    const GradientsArgument written(gradients, self.problem(), self.sequences());
    const nb::gil_scoped_release released;
    return self.run(read.operands, written.gradients, threads);
}

}  // namespace

void bind_backward(nb::module_ &m) {
    nb::class_<fusion::BackwardPlan>(m, "BackwardPlan", "The backward of one problem on given lengths.")
        .def("__init__", &construct, "problem"_a, "extents"_a, "variant"_a = nb::none())
        .def("workspace_bytes", &fusion::BackwardPlan::workspace_bytes, "threads"_a)
        .def_prop_ro("variant", &fusion::BackwardPlan::variant)
        .def("run", &run, "threads"_a, "operands"_a, "gradients"_a);
}
