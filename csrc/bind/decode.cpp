// The Python bindings of DecodePlan: arguments are integers, int64 arrays and page tables; results are written to the
// memory of the caller's views.

#include "bind/arguments.h"
#include "plan/decode.h"
#include "plan/forward.h"

namespace {

using fusion::Cache;

// The view of a cache: (pointer, bytes per element, address, stride_head, stride_token, dim), or for pages (pointer,
// bytes per element, table, table_stride, page_size, stride_page, stride_head, stride_token, dim). Rows of fragments
// have two more values: the elements of a fragment, and the stride of fragments. dim 0: the problem has no such
// operand.
Cache cache_of(Views &from, std::size_t i, const char *name, std::int64_t dim, std::size_t sequences) {
    const nb::tuple t = from.view(i, name, dim != 0, {6, 9, 11});
    Cache cache;
    if (t.empty()) return cache;
    const bool paged = t.size() > 6;
    if (item<std::int64_t>(t, paged ? 8 : 5) != dim) {
        refuse(std::string(name) + " has rows of another length than the problem");
    }
    cache.base = static_cast<const char *>(pointer(t));
    cache.item = item<std::int64_t>(t, 1);
    if (!paged) {
        cache.address = from.longs(t[2], name, sequences), cache.stride_head = from.longs(t[3], name, sequences);
        cache.stride_token = item<std::int64_t>(t, 4);
        return cache;
    }
    cache.table = reinterpret_cast<const std::int32_t *>(item<std::uintptr_t>(t, 2));
    cache.table_stride = item<std::int64_t>(t, 3);
    cache.page_size = item<std::int64_t>(t, 4);
    cache.stride_page = item<std::int64_t>(t, 5);
    cache.page_stride_head = item<std::int64_t>(t, 6);
    cache.stride_token = item<std::int64_t>(t, 7);
    if (cache.page_size < 1) refuse(std::string(name) + " has pages without tokens");
    if (t.size() == 11) cache.fragment = item<std::int64_t>(t, 9), cache.stride_fragment = item<std::int64_t>(t, 10);
    if (cache.fragment < 0) refuse(std::string(name) + " has pieces without elements");
    return cache;
}

// The scale of keys or values, and their offset, which is optional.
fusion::Quantised quantised_of(Views &from, std::size_t i, fusion::Dequant kind, const char *scale, const char *offset,
                               std::int64_t dim, std::size_t n) {
    if (kind != fusion::Dequant::channel) dim = kind == fusion::Dequant::token ? 1 : 0;
    return {kind, cache_of(from, i, scale, dim, n), cache_of(from, i + 1, offset, from.lacks(i + 1) ? 0 : dim, n)};
}

fusion::PerChannel per_channel(const Views &from, std::size_t i, const char *name, bool expected) {
    const nb::tuple t = from.view(i, name, expected, {3});
    if (t.empty()) return {};
    return {static_cast<const float *>(pointer(t)), item<std::int64_t>(t, 1), item<std::int64_t>(t, 2)};
}

// The problem of forward and decode, and additional fields of decode.
struct Kinds {
    fusion::DecodeProblem problem;
    fusion::Dequant keys, values;
};

Kinds kinds_of(const nb::tuple &base, const nb::tuple &more) {
    Kinds k{};
    fusion::DecodeProblem &p = k.problem;
    read_fields(more, "a decode has 7 fields beside its problem", p.storage, k.keys, k.values, p.rounding, p.shares_kv,
                p.common_keys, p.has_row_scale);
    read_problem(base, p);
    if (p.storage < fusion::Storage::int8 && static_cast<int>(p.storage) != static_cast<int>(p.dtype)) {
        refuse("keys are stored in another dtype than the problem's");
    }
    return k;
}

// Operands and results of a decode.
Arguments<fusion::DecodeOperands> operands_of(const nb::tuple &values, const Kinds &kinds, std::size_t n) {
    const fusion::DecodeProblem &p = kinds.problem;
    Views from(values, 21, "operands are 21 values", n);
    fusion::DecodeOperands o;
    o.q = from.rows(0, "q", p.dim_qk), o.out = from.rows(1, "out", p.dim_v);
    o.max = from.rows(2, "max", 1), o.sum = from.rows(3, "sum", 1), o.q_rope = from.rows(4, "q_rope", p.dim_rope);
    o.bias = from.matrix(5, "bias", has_matrix(p));
    o.slopes = from.address<const float>(6, "slopes", has_slopes(p));
    o.blocked = from.matrix(7, "blocked", p.has_blocked);
    o.sink = from.address<const float>(8, "sink", p.has_sink);
    o.keys = cache_of(from, 9, "k", p.dim_qk, n), o.values = cache_of(from, 10, "v", p.dim_v, n);
    o.key_ropes = cache_of(from, 11, "k_rope", p.dim_rope, n);
    o.quantised_keys = quantised_of(from, 12, kinds.keys, "scale of k", "offset of k", p.dim_qk, n);
    o.quantised_values = quantised_of(from, 14, kinds.values, "scale of v", "offset of v", p.dim_v, n);
    const bool rounds = p.rounding != fusion::Rounding::none;
    o.out_scale = per_channel(from, 16, "out_scale", rounds);
    o.out_offset = per_channel(from, 17, "out_offset", rounds && !from.lacks(17));
    o.common_keys = cache_of(from, 18, "common k", p.common_keys ? p.dim_qk : 0, 1);
    o.common_values = cache_of(from, 19, "common v", p.common_keys ? p.dim_v : 0, 1);
    o.row_scale = from.rows(20, "row_scale", p.has_row_scale);
    return {std::move(from), o};
}

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
    Arguments<fusion::DecodeOperands> arguments(const nb::tuple &values) const {
        return operands_of(values, kinds_, plan_.sequences());
    }

    std::int64_t compute(const fusion::DecodeOperands &operands, int threads) const {
        const Running running(runs_);
        const nb::gil_scoped_release released;
        return plan_.run(operands, threads);
    }

    // Runs the call by the plan of the dense forward for the same sequences.
    std::int64_t run_dense(const fusion::ForwardPlan &dense, int threads, const nb::tuple &operands) const {
        require_threads(threads);
        if (dense.sequences() != plan_.sequences()) refuse("the dense plan is one for other sequences");
        const auto given = arguments(operands);
        const nb::gil_scoped_release released;
        return dense.run(kinds_.problem, given.operands, threads);
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

struct DecodeForm {
    using Plan = Decode;
    using Operands = fusion::DecodeOperands;

    static Arguments<Operands> arguments(const Plan &plan, const nb::tuple &values) { return plan.arguments(values); }
    // Keys, values and factors of a cache share one page table.
    template <class Visit> static void each(Operands &o, Visit visit) {
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
    }
    static std::int64_t compute(const Plan &plan, const Operands &operands, int threads) {
        return plan.compute(operands, threads);
    }
};

}  // namespace

void bind_decode(nb::module_ &m) {
    nb::class_<Decode>(m, "DecodePlan", "The forward of few query rows over long, paged or quantised keys.")
        .def(nb::init<const nb::tuple &, const nb::tuple &, const nb::tuple &, const nb::object &>(), "problem"_a,
             "more"_a, "extents"_a, "variant"_a = nb::none())
        .def("update", &Decode::update, "kv_len"_a, "lo"_a, "hi"_a)
        .def("workspace_bytes", &Decode::workspace_bytes, "threads"_a)
        .def_prop_ro("variant", &Decode::variant)
        .def("run", &run_once<DecodeForm>, "threads"_a, "operands"_a)
        .def("run_dense", &Decode::run_dense, "dense"_a, "threads"_a, "operands"_a)
        .def("prepare", &Prepared<DecodeForm>::prepare, "operands"_a, "names"_a);
    Prepared<DecodeForm>::bind(m, "PreparedDecode");
}
