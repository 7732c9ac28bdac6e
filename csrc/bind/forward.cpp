// The Python bindings of ForwardPlan: arguments are integers and int64 arrays; results are written to the memory of the
// caller's views.

#include "bind/arguments.h"
#include "plan/forward.h"

namespace {

void construct_forward(fusion::ForwardPlan *self, const nb::tuple &problem, const nb::tuple &extents,
                       const nb::tuple &tiles, const nb::object &variant) {
    using fusion::Tile;
    if (tiles.size() != 5) refuse("tiles are five arrays");
    const fusion::Problem p = problem_of(problem);
    std::vector<fusion::Sequence> sequences = sequences_of(extents, p.heads_q);
    std::vector<Tile> list(length_of(tiles[0]));
    read_arrays(tiles, 0, list,
                {{"seq", &Tile::seq},
                 {"row0", &Tile::row0},
                 {"row1", &Tile::row1},
                 {"begin", &Tile::begin},
                 {"end", &Tile::end}});
    new (self) fusion::ForwardPlan(variant_named(variant), p, std::move(sequences), std::move(list));
}

struct Forward {
    using Plan = fusion::ForwardPlan;
    using Operands = fusion::Operands;

    static Arguments<Operands> arguments(const Plan &plan, const nb::tuple &values) {
        return operands_of(values, plan.problem(), plan.sequences());
    }
    template <class Visit> static void each(Operands &o, Visit visit) {
        each_place(o, visit);
        visit("k", o.k.base), visit("v", o.v.base), visit("k_rope", o.k_rope.base);
    }
    static std::int64_t compute(const Plan &plan, const Operands &operands, int threads) {
        const nb::gil_scoped_release released;
        return plan.run(operands, threads);
    }
};

}  // namespace

void bind_forward(nb::module_ &m) {
    m.attr("TILE_ROWS") = fusion::tile_rows;
    nb::class_<fusion::ForwardPlan>(m, "ForwardPlan", "The forward of one problem on given lengths.")
        .def("__init__", &construct_forward, "problem"_a, "extents"_a, "tiles"_a, "variant"_a = nb::none())
        .def("workspace_bytes", &fusion::ForwardPlan::workspace_bytes, "threads"_a)
        .def_prop_ro("variant", &fusion::ForwardPlan::variant)
        .def("run", &run_once<Forward>, "threads"_a, "operands"_a)
        .def("prepare", &Prepared<Forward>::prepare, "operands"_a, "names"_a);
    Prepared<Forward>::bind(m, "PreparedForward");
}
