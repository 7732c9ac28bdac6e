// The Python bindings of pooling.

#include "bind/arguments.h"
#include "plan/pool.h"

namespace {

// A call with its operands; keeps references to the arrays of the views.
struct PoolArgument {
    fusion::PoolCall call;
    RowsArgument kv, gate, out, dkv, dgate;  // out: also the gradient of it

    PoolArgument(const nb::tuple &problem, const nb::tuple &lengths, const nb::tuple &operands, bool backward,
                 const nb::object &variant)
        : call(made(problem, lengths, variant)), kv(at(operands, 0), "kv", call.problem.channels(), count()),
          gate(at(operands, 1), "gate", call.problem.channels(), count()),
          out(at(operands, 3), "out", call.problem.dim, count()),
          dkv(at(operands, 4), "dkv", backward ? call.problem.channels() : 0, count()),
          dgate(at(operands, 5), "dgate", backward ? call.problem.channels() : 0, count()) {
        call.check();
    }

    static nb::object at(const nb::tuple &t, std::size_t i) {
        if (t.size() != 7) refuse("operands of pooling are 7 values");
        return nb::borrow(t[i]);
    }

private:
    std::size_t count() const { return call.sequences.size(); }

    static fusion::PoolCall made(const nb::tuple &t, const nb::tuple &lengths, const nb::object &variant) {
        if (t.size() != 5 || lengths.size() != 4) refuse("a pooling has 5 fields, and 4 arrays of lengths");
        const fusion::PoolProblem problem = {item<std::int64_t>(t, 0), item<std::int64_t>(t, 1),
                                             item<std::int64_t>(t, 2), item<bool>(t, 3),
                                             static_cast<Dtype>(choice(t[4], "dtype", 3))};
        const std::size_t n = length_of(lengths[0]);
        const Longs rows(lengths[0], "rows", n), results(lengths[1], "results", n), before(lengths[2], "before", n),
            room(lengths[3], "room", n);
        std::vector<fusion::PoolSequence> sequences(n);
        for (std::size_t b = 0; b < n; ++b) {
            sequences[b] = {rows.data()[b], results.data()[b], before.data()[b], room.data()[b]};
        }
        const fusion::PoolKernels &kernels = built_variant(variant).pool->kernels[static_cast<int>(problem.dtype)];
        return {kernels, problem, std::move(sequences)};
    }
};

void pool(int threads, const nb::tuple &problem, const nb::tuple &lengths, const nb::tuple &operands,
          const nb::object &variant) {
    require_threads(threads);
    const PoolArgument given(problem, lengths, operands, false, variant);
    fusion::PoolOperands o;
    o.kv = given.kv.rows, o.gate = given.gate.rows, o.out = given.out.rows;
    o.bias = reinterpret_cast<const float *>(item<std::uintptr_t>(operands, 2));
    const nb::gil_scoped_release released;
    given.call.forward(o, threads);
}

void pool_gradients(int threads, const nb::tuple &problem, const nb::tuple &lengths, const nb::tuple &operands,
                    const nb::object &variant) {
    require_threads(threads);
    const PoolArgument given(problem, lengths, operands, true, variant);
    fusion::PoolOperands o;
    o.kv = given.kv.rows, o.gate = given.gate.rows, o.dout = given.out.rows;
    o.dkv = given.dkv.rows, o.dgate = given.dgate.rows;
    o.bias = reinterpret_cast<const float *>(item<std::uintptr_t>(operands, 2));
    o.dbias = reinterpret_cast<float *>(item<std::uintptr_t>(operands, 6));
    const nb::gil_scoped_release released;
    given.call.backward(o, threads);
}

}  // namespace

void bind_pool(nb::module_ &m) {
    m.def("pool", &pool, "threads"_a, "problem"_a, "lengths"_a, "operands"_a, "variant"_a = nb::none(),
          "Pools windows of rows.");
    m.def("pool_gradients", &pool_gradients, "threads"_a, "problem"_a, "lengths"_a, "operands"_a,
          "variant"_a = nb::none(), "The gradients of pool().");
}
