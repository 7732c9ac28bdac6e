// The Python bindings of DecodePlan: arguments are integers, int64 arrays and page tables; results are written to the
// memory of the caller's views.

#include "bind/arguments.h"
#include "plan/decode.h"
#include "plan/forward.h"

#include <nanobind/stl/unique_ptr.h>

#include <memory>

namespace {

using fusion::Cache;

// (pointer, bytes per element, address, stride_head, stride_token, dim), or for pages (pointer, bytes per element,
// table, table_stride, page_size, stride_page, stride_head, stride_token, dim), or None if the problem has no such
// operand. Rows of fragments have two more values: the elements of a fragment, and the stride of fragments.
struct CacheArgument {
    Longs address, stride_head;
    Cache cache;

    CacheArgument(const nb::object &from, const char *name, std::int64_t dim, std::size_t sequences,
                  bool optional = false) {
        if (from.is_none() && (optional || dim == 0)) return;
        if (from.is_none() || dim == 0) refuse(std::string(name) + (dim ? " is missing" : " belongs to no operand"));
        const auto t = nb::cast<nb::tuple>(from);
        const bool paged = t.size() == 9 || t.size() == 11;
        if (!paged && t.size() != 6) refuse(std::string(name) + " is no view");
        if (item<std::int64_t>(t, paged ? 8 : 5) != dim) {
            refuse(std::string(name) + " has rows of another length than the problem");
        }
        cache.base = static_cast<const char *>(pointer(t));
        cache.item = item<std::int64_t>(t, 1);
        if (paged) {
            cache.table = reinterpret_cast<const std::int32_t *>(item<std::uintptr_t>(t, 2));
            cache.table_stride = item<std::int64_t>(t, 3);
            cache.page_size = item<std::int64_t>(t, 4);
            cache.stride_page = item<std::int64_t>(t, 5);
            cache.page_stride_head = item<std::int64_t>(t, 6);
            cache.stride_token = item<std::int64_t>(t, 7);
            if (cache.page_size < 1) refuse(std::string(name) + " has pages without tokens");
            if (t.size() == 11) cache.piece = item<std::int64_t>(t, 9), cache.stride_piece = item<std::int64_t>(t, 10);
            if (cache.piece < 0) refuse(std::string(name) + " has pieces without elements");
            return;
        }
        address.hold(t[2], name, sequences);
        stride_head.hold(t[3], name, sequences);
        cache.address = address.data();
        cache.stride_head = stride_head.data();
        cache.stride_token = item<std::int64_t>(t, 4);
    }
};

std::int64_t scale_dim(fusion::Dequant kind, std::int64_t dim) {
    return kind == fusion::Dequant::none ? 0 : kind == fusion::Dequant::token ? 1 : dim;
}

fusion::PerChannel per_channel(const nb::object &from, const char *name, bool allowed, bool expected) {
    if (from.is_none()) {
        if (expected) refuse(std::string(name) + " is missing");
        return {};
    }
    if (!allowed) refuse(std::string(name) + " belongs to no operand");
    const auto t = nb::cast<nb::tuple>(from);
    if (t.size() != 3) refuse(std::string(name) + " is no view");
    return {static_cast<const float *>(pointer(t)), item<std::int64_t>(t, 1), item<std::int64_t>(t, 2)};
}

// The problem of forward and decode, and additional fields of decode.
struct Kinds {
    fusion::DecodeProblem problem;
    fusion::Dequant keys, values;
};

Kinds kinds_of(const nb::tuple &base, const nb::tuple &more) {
    if (more.size() != 7) refuse("a decode has 7 fields beside its problem");
    Kinds k{};
    static_cast<fusion::Problem &>(k.problem) = problem_of(base);
    k.problem.storage = static_cast<fusion::Storage>(choice(more[0], "storage", 5));
    k.keys = static_cast<fusion::Dequant>(choice(more[1], "dequant of keys", 3));
    k.values = static_cast<fusion::Dequant>(choice(more[2], "dequant of values", 3));
    k.problem.rounding = static_cast<fusion::Rounding>(choice(more[3], "rounding", 3));
    k.problem.shares_kv = item<bool>(more, 4);
    k.problem.common_keys = item<std::int64_t>(more, 5);
    k.problem.has_row_scale = item<bool>(more, 6);
    const bool stored = k.problem.storage >= fusion::Storage::int8;
    if (!stored && static_cast<int>(k.problem.storage) != static_cast<int>(k.problem.dtype)) {
        refuse("keys are stored in another dtype than the problem's");
    }
    return k;
}

// Operands and results of a decode, in the order of the Python tuple; keeps references to the arrays of the views.
struct DecodeArgument {
    RowsArgument q, out, max, sum, q_rope;
    MatrixArgument bias, blocked;
    CacheArgument k, v, k_rope, k_scale, k_offset, v_scale, v_offset, k_common, v_common;
    RowsArgument row_scale;
    fusion::DecodeOperands operands;

    DecodeArgument(const nb::tuple &t, const Kinds &kinds, std::size_t n)
        : DecodeArgument(t, kinds.problem, kinds, n) {}

private:
    DecodeArgument(const nb::tuple &t, const fusion::DecodeProblem &p, const Kinds &kinds, std::size_t n)
        : q(at(t, 0), "q", p.dim_qk, n), out(at(t, 1), "out", p.dim_v, n), max(at(t, 2), "max", 1, n),
          sum(at(t, 3), "sum", 1, n), q_rope(at(t, 4), "q_rope", p.dim_rope, n),
          bias(at(t, 5), "bias", p.bias == fusion::Bias::matrix || p.bias == fusion::Bias::table, n),
          blocked(at(t, 7), "blocked", p.has_blocked, n), k(at(t, 9), "k", p.dim_qk, n), v(at(t, 10), "v", p.dim_v, n),
          k_rope(at(t, 11), "k_rope", p.dim_rope, n),
          k_scale(at(t, 12), "scale of k", scale_dim(kinds.keys, p.dim_qk), n),
          k_offset(at(t, 13), "offset of k", scale_dim(kinds.keys, p.dim_qk), n, true),
          v_scale(at(t, 14), "scale of v", scale_dim(kinds.values, p.dim_v), n),
          v_offset(at(t, 15), "offset of v", scale_dim(kinds.values, p.dim_v), n, true),
          k_common(at(t, 18), "common k", p.common_keys ? p.dim_qk : 0, 1),
          v_common(at(t, 19), "common v", p.common_keys ? p.dim_v : 0, 1),
          row_scale(at(t, 20), "row_scale", p.has_row_scale, n) {
        fusion::DecodeOperands &o = operands;
        o.q = q.rows, o.out = out.rows, o.max = max.rows, o.sum = sum.rows, o.q_rope = q_rope.rows;
        o.bias = bias.matrix, o.blocked = blocked.matrix;
        o.slopes = reinterpret_cast<const float *>(item<std::uintptr_t>(t, 6));
        o.sink = reinterpret_cast<const float *>(item<std::uintptr_t>(t, 8));
        if (p.has_sink != (o.sink != nullptr)) refuse(p.has_sink ? "sink is missing" : "sink belongs to no operand");
        if ((p.bias > fusion::Bias::table) != (o.slopes != nullptr))
            refuse("slopes are missing, or belong to no operand");
        o.keys = k.cache, o.values = v.cache, o.key_ropes = k_rope.cache;
        o.common_keys = k_common.cache, o.common_values = v_common.cache, o.row_scale = row_scale.rows;
        o.quantised_keys = {kinds.keys, k_scale.cache, k_offset.cache};
        o.quantised_values = {kinds.values, v_scale.cache, v_offset.cache};
        const bool rounds = p.rounding != fusion::Rounding::none;
        o.out_scale = per_channel(at(t, 16), "out_scale", rounds, rounds);
        o.out_offset = per_channel(at(t, 17), "out_offset", rounds, false);
    }

    static nb::object at(const nb::tuple &t, std::size_t i) {
        if (t.size() != 21) refuse("operands are 21 values");
        return nb::borrow(t[i]);
    }
};

class Decode {
public:
    Decode(const nb::tuple &problem, const nb::tuple &more, const nb::tuple &extents, const nb::object &variant)
        : kinds_(kinds_of(problem, more)), plan_(variant_named(variant), kinds_.problem, sequences_of(extents)) {}

    void update(const nb::object &kv_len, const nb::object &lo, const nb::object &hi) {
        if (runs_)
            refuse(
                "a plan cannot be updated while it runs, by another thread or beneath a signal handler: make a plan "
                "for each");
        const std::size_t n = plan_.sequences();
        const Longs lengths(kv_len, "kv_len", n), first(lo, "lo", n), last(hi, "hi", n);
        plan_.update(lengths.data(), first.data(), last.data());
    }

    std::size_t workspace_bytes(int threads) const { return plan_.workspace_bytes(threads); }
    const char *variant() const { return plan_.variant(); }
    const Kinds &kinds() const { return kinds_; }
    const fusion::DecodePlan &plan() const { return plan_; }

    std::int64_t run(int threads, const nb::tuple &operands) const {
        require_threads(threads);
        const DecodeArgument given(operands, kinds_, plan_.sequences());
        return compute(given.operands, threads);
    }

    // Runs the call by the plan of the dense forward for the same sequences.
    std::int64_t run_dense(const fusion::ForwardPlan &dense, int threads, const nb::tuple &operands) const {
        require_threads(threads);
        if (dense.sequences() != plan_.sequences()) refuse("the dense plan is one for other sequences");
        const DecodeArgument given(operands, kinds_, plan_.sequences());
        const nb::gil_scoped_release released;
        return dense.run(kinds_.problem, given.operands, threads);
    }

    std::int64_t compute(const fusion::DecodeOperands &operands, int threads) const {
        const Running running(runs_);
        const nb::gil_scoped_release released;
        return plan_.run(operands, threads);
    }

private:
    struct Running {  // counts active runs with the GIL held
        int &runs;

        explicit Running(int &runs_) : runs(runs_) { ++runs; }
        ~Running() { --runs; }
        Running(const Running &) = delete;
        Running &operator=(const Running &) = delete;
    };

    Kinds kinds_;
    fusion::DecodePlan plan_;
    mutable int runs_ = 0;  // number of active runs
};

// Visits the pointers of operands; keys, values and factors of a cache share one page table.
constexpr auto each_cache = [](fusion::DecodeOperands &o, auto visit) {
    each_place(o, visit);
    const auto cache = [&](const char *name, Cache &c) {
        visit(name, c.base);
        visit("table", c.table);
    };
    cache("k", o.keys), cache("v", o.values), cache("k_rope", o.key_ropes);
    cache("k_scale", o.quantised_keys.scale), cache("k_offset", o.quantised_keys.offset);
    cache("v_scale", o.quantised_values.scale), cache("v_offset", o.quantised_values.offset);
    cache("k_common", o.common_keys), cache("v_common", o.common_values);
    visit("out_scale", o.out_scale.base), visit("out_offset", o.out_offset.base);
};

// A plan with the memory layout of its operands; a call passes only their addresses.
struct PreparedDecode {
    nb::object plan;
    DecodeArgument given;
    Places places;

    PreparedDecode(nb::object plan_, const Decode &of, const nb::tuple &operands, const nb::tuple &names)
        : plan(std::move(plan_)), given(operands, of.kinds(), of.plan().sequences()),
          places(given.operands, names, each_cache) {}
};

std::unique_ptr<PreparedDecode> prepare(nb::object self, const nb::tuple &operands, const nb::tuple &names) {
    const auto &of = nb::cast<const Decode &>(self);
    return std::make_unique<PreparedDecode>(std::move(self), of, operands, names);
}

// Runs a prepared call on tensors in the order of the names; None for statistics that are not read.
std::int64_t run_prepared(const PreparedDecode &self, int threads, const nb::args &tensors) {
    require_threads(threads);
    const auto &of = nb::cast<const Decode &>(self.plan);
    fusion::DecodeOperands operands = self.given.operands;
    self.places.set(operands, tensors, each_cache);
    return of.compute(operands, threads);
}

}  // namespace

void bind_decode(nb::module_ &m) {
    nb::class_<Decode>(m, "DecodePlan", "The forward of few query rows over long, paged or quantised keys.")
        .def(nb::init<const nb::tuple &, const nb::tuple &, const nb::tuple &, const nb::object &>(), "problem"_a,
             "more"_a, "extents"_a, "variant"_a = nb::none())
        .def("update", &Decode::update, "kv_len"_a, "lo"_a, "hi"_a)
        .def("workspace_bytes", &Decode::workspace_bytes, "threads"_a)
        .def_prop_ro("variant", &Decode::variant)
        .def("run", &Decode::run, "threads"_a, "operands"_a)
        .def("run_dense", &Decode::run_dense, "dense"_a, "threads"_a, "operands"_a)
        .def("prepare", &prepare, "operands"_a, "names"_a);
    nb::class_<PreparedDecode>(m, "PreparedDecode", "A plan with the views of its operands.")
        .def("run", &run_prepared, "threads"_a, "tensors"_a);
}
