// ForwardPlan as Python sees it: integers and int64 arrays in, results written where the caller's views point.

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

// A plan with the views of its operands, which say how rows lie: a call brings only where they begin.
struct PreparedForward {
    nb::object plan;
    OperandsArgument given;

    PreparedForward(nb::object plan_, const fusion::ForwardPlan &of, const nb::tuple &operands)
        : plan(std::move(plan_)), given(operands, of.problem(), of.sequences()) {}
};

std::unique_ptr<PreparedForward> prepare(nb::object self, const nb::tuple &operands) {
    const auto &plan = nb::cast<const fusion::ForwardPlan &>(self);
    const fusion::Problem &p = plan.problem();
    if (p.dim_rope || p.bias != fusion::Bias::none || p.has_blocked || p.has_blocked_tiles || p.has_sink ||
        p.dropout != fusion::Dropout::none) {
        refuse("only q, k and v can be laid elsewhere");
    }
    return std::make_unique<PreparedForward>(std::move(self), plan, operands);
}

// Tensors, or None for statistics that are not read; packed keys have no table of pages.
std::int64_t run_prepared(const PreparedForward &self, int threads, nb::handle q, nb::handle k, nb::handle v,
                          nb::handle table, nb::handle out, nb::handle max, nb::handle sum) {
    require_threads(threads);
    if (!table.is_none()) refuse("a table belongs to a cache of pages");
    const auto &plan = nb::cast<const fusion::ForwardPlan &>(self.plan);
    fusion::Operands operands = self.given.operands;
    operands.q.base = place_of(q), operands.k.base = place_of(k), operands.v.base = place_of(v);
    operands.out.base = place_of(out), operands.max.base = place_of(max), operands.sum.base = place_of(sum);
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
        .def("prepare", &prepare, "operands"_a);
    nb::class_<PreparedForward>(m, "PreparedForward", "A plan with the views of its operands.")
        .def("run", &run_prepared, "threads"_a, "q"_a, "k"_a, "v"_a, "table"_a.none(), "out"_a, "max"_a.none(),
             "sum"_a.none());
}
