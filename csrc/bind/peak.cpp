// Measurements of the machine's limits: arithmetic of one variant, and reading memory.

#include "bind/arguments.h"
#include "plan/team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

namespace {

constexpr int repeats = 3;

template <class Body> double best_seconds(Body body) {
    double best = 1e30;
    for (int i = 0; i < repeats; ++i) {
        const auto start = std::chrono::steady_clock::now();
        body();
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
}

double operations(double (*work)(std::int64_t, float *), int threads, std::int64_t turns) {
    std::atomic<double> done = 0;
    fusion::run_team(threads, fusion::never_alone, [&](const fusion::Team &) {
        float result = 0;
        const double completed = work(turns, &result);
        if (result == result) done += completed;
    });
    return done;
}

double gflops(double (*work)(std::int64_t, float *), int threads) {
    double done = 0;
    const double seconds = best_seconds([&] { done = operations(work, threads, 5'000'000); });
    return done / seconds / 1e9;
}

double read_gigabytes(int threads) {
    const std::vector<std::uint64_t> memory(std::size_t{1} << 26, 1);  // 512 MiB: more than any cache
    const auto count = static_cast<std::int64_t>(memory.size());
    std::atomic<std::uint64_t> sum = 0;
    const double seconds = best_seconds([&] {
        fusion::run_team(threads, fusion::never_alone, [&](const fusion::Team &team) {
            const std::int64_t end = count * (team.thread + 1) / team.size;
            std::uint64_t subtotal = 0;
            for (std::int64_t i = count * team.thread / team.size; i < end; ++i) subtotal += memory[i];
            sum += subtotal;
        });
    });
    return sum ? static_cast<double>(count) * sizeof(std::uint64_t) / seconds / 1e9 : 0;
}

nb::dict machine_peak(int threads) {
    threads = std::clamp(threads, 1, 1024);
    const fusion::Variant &variant = fusion::chosen_variant();
    double single = 0, pairs = 0, read = 0;
    {
        nb::gil_scoped_release release;
        single = gflops(variant.float_work, threads);
        pairs = variant.pair_work ? gflops(variant.pair_work, threads) : single;
        read = read_gigabytes(threads);
    }
    nb::dict out;
    out["float32"] = single;
    out["float16"] = single;  // computed as float32
    out["bfloat16"] = pairs;
    out["read"] = read;
    return out;
}

double multiply_adds(const std::string &dtype, int threads, std::int64_t turns, const nb::object &name) {
    require_threads(threads);
    const fusion::Variant &variant = variant_named(name);
    const nb::gil_scoped_release release;
    return operations(dtype == "bfloat16" && variant.pair_work ? variant.pair_work : variant.float_work, threads,
                      turns);
}

}  // namespace

void bind_peak(nb::module_ &m) {
    m.def("machine_peak", &machine_peak, "threads"_a,
          "GFLOP/s that the chosen variant's multiply-adds reach per operand dtype, and GB/s that reading memory "
          "reaches;\n"
          "measured now, about a second. For benchmarks.");
    m.def("multiply_adds", &multiply_adds, "dtype"_a, "threads"_a, "turns"_a, "variant"_a = nb::none(),
          "Runs the multiply-adds that operands of a dtype are computed with, in registers, on every thread; returns "
          "how\n"
          "many operations that was. For benchmarks.");
}
