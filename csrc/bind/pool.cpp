// The Python bindings of pooling.

#include "bind/arguments.h"
#include "plan/pool.h"

namespace {

fusion::PoolCall call_of(const nb::tuple &from, const nb::tuple &lengths, const nb::object &variant) {
    using fusion::PoolSequence;
    fusion::PoolProblem p{};
    read_fields(from, "a pooling has 5 fields", p.heads, p.dim, p.ratio, p.overlap, p.dtype);
    if (lengths.size() != 4) refuse("a pooling has 4 arrays of lengths");
    std::vector<PoolSequence> sequences(length_of(lengths[0]));
    read_arrays(lengths, 0, sequences,
                {{"rows", &PoolSequence::rows},
                 {"results", &PoolSequence::results},
                 {"before", &PoolSequence::before},
                 {"room", &PoolSequence::room}});
    const fusion::PoolKernels &kernels = variant_named(variant).pool.kernels[static_cast<int>(p.dtype)];
    return {kernels, p, std::move(sequences)};
}

// kv, gate, bias, out (or its gradient), dkv, dgate, dbias.
void run(bool backward, int threads, const nb::tuple &problem, const nb::tuple &lengths, const nb::tuple &operands,
         const nb::object &variant) {
    require_threads(threads);
    const fusion::PoolCall call = call_of(problem, lengths, variant);
    call.check();
    const std::int64_t channels = call.problem.channels(), written = backward ? channels : 0;
    Views from(operands, 7, "operands of pooling are 7 values", call.sequences.size());
    fusion::PoolOperands o;
    o.kv = from.rows(0, "kv", channels), o.gate = from.rows(1, "gate", channels);
    o.bias = reinterpret_cast<const float *>(from.get<std::uintptr_t>(2));
    (backward ? o.dout : o.out) = from.rows(3, "out", call.problem.dim);
    o.dkv = from.rows(4, "dkv", written), o.dgate = from.rows(5, "dgate", written);
    o.dbias = reinterpret_cast<float *>(from.get<std::uintptr_t>(6));
    const nb::gil_scoped_release released;
    backward ? call.backward(o, threads) : call.forward(o, threads);
}

template <bool Backward>
void pool(int threads, const nb::tuple &problem, const nb::tuple &lengths, const nb::tuple &operands,
          const nb::object &variant) {
    run(Backward, threads, problem, lengths, operands, variant);
}

}  // namespace

void bind_pool(nb::module_ &m) {
    m.def("pool", &pool<false>, "threads"_a, "problem"_a, "lengths"_a, "operands"_a, "variant"_a = nb::none(),
          "Pools windows of rows.");
    m.def("pool_gradients", &pool<true>, "threads"_a, "problem"_a, "lengths"_a, "operands"_a, "variant"_a = nb::none(),
          "The gradients of pool().");
}
