// The Python bindings of ForwardPlan: arguments are integers and int64 arrays; results are written to the memory of the
// caller's views.

#include "bind/arguments.h"
#include "plan/forward.h"

#include <nanobind/stl/unique_ptr.h>

#include <memory>

namespace {

void construct(fusion::ForwardPlan *self, const nb::tuple &problem, const nb::tuple &extents, const nb::tuple &tiles,
               const nb::object &variant) {
    if (tiles.size() != 5) refuse("tiles are five arrays");
    const fusion::Problem p = problem_of(problem);
    std::vector<fusion::Sequence> sequences = sequences_of(extents, p.heads_q);
    const std::size_t tile_count = length_of(tiles[0]);
    const Longs seq(tiles[0], "seq", tile_count), row0(tiles[1], "row0", tile_count),
        row1(tiles[2], "row1", tile_count), begin(tiles[3], "begin", tile_count), end(tiles[4], "end", tile_count);
    std::vector<fusion::Tile> list(tile_count);
    for (std::size_t i = 0; i < tile_count; ++i) {
        list[i] = {seq.data()[i], row0.data()[i], row1.data()[i], begin.data()[i], end.data()[i]};
    }
    new (self) fusion::ForwardPlan(variant_named(variant), p, std::move(sequences), std::move(list));
}

std::int64_t run(const fusion::ForwardPlan &self, int threads, const nb::tuple &operands) {
    require_threads(threads);
    const OperandsArgument given(operands, self.problem(), self.sequences());
    const nb::gil_scoped_release released;
    return self.run(given.operands, threads);
}

constexpr auto each_row = [](fusion::Operands &o, auto visit) {
    each_place(o, visit);
    visit("k", o.k.base), visit("v", o.v.base), visit("k_rope", o.k_rope.base);
};

// A plan with the memory layout of its operands; a call passes only their addresses.
struct PreparedForward {
    nb::object plan;
    OperandsArgument given;
    Places places;

    PreparedForward(nb::object plan_, const fusion::ForwardPlan &of, const nb::tuple &operands, const nb::tuple &names)
        : plan(std::move(plan_)), given(operands, of.problem(), of.sequences()),
          places(given.operands, names, each_row) {}
};

std::unique_ptr<PreparedForward> prepare(nb::object self, const nb::tuple &operands, const nb::tuple &names) {
    const auto &plan = nb::cast<const fusion::ForwardPlan &>(self);
    return std::make_unique<PreparedForward>(std::move(self), plan, operands, names);
}

// Runs a prepared call on tensors in the order of the names; None for statistics that are not read.
std::int64_t run_prepared(const PreparedForward &self, int threads, const nb::args &tensors) {
    require_threads(threads);
    const auto &plan = nb::cast<const fusion::ForwardPlan &>(self.plan);
    fusion::Operands operands = self.given.operands;
    self.places.set(operands, tensors, each_row);
    const nb::gil_scoped_release released;
    return plan.run(operands, threads);
}

}  // namespace

void bind_forward(nb::module_ &m) {
    m.attr("TILE_ROWS") = fusion::tile_rows;
    nb::class_<fusion::ForwardPlan>(m, "ForwardPlan", "The forward of one problem on given lengths.")
        .def("__init__", &construct, "problem"_a, "extents"_a, "tiles"_a, "variant"_a = nb::none())
        .def("workspace_bytes", &fusion::ForwardPlan::workspace_bytes, "threads"_a)
        .def_prop_ro("variant", &fusion::ForwardPlan::variant)
        .def("run", &run, "threads"_a, "operands"_a)
        .def("prepare", &prepare, "operands"_a, "names"_a);
    nb::class_<PreparedForward>(m, "PreparedForward", "A plan with the views of its operands.")
        .def("run", &run_prepared, "threads"_a, "tensors"_a);
}
