// The machine's own limits, measured: arithmetic of one variant, and reading memory.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "dispatch.h"
#include "variant.h"

namespace nb = nanobind;
using namespace nb::literals;

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

double gflops(double (*work)(std::int64_t, float *), int threads) {
    constexpr std::int64_t turns = 5'000'000;
    double operations = 0;
    float result = 0;
    const double seconds = best_seconds([&] {
        operations = 0;
#pragma omp parallel num_threads(threads) reduction(+ : operations, result)
        operations += work(turns, &result);
    });
    return result == result ? operations / seconds / 1e9 : 0;
}

double read_gigabytes(int threads) {
    const std::vector<std::uint64_t> memory(std::size_t{1} << 26, 1);  // 512 MiB: more than any cache
    const auto count = static_cast<std::int64_t>(memory.size());
    std::uint64_t sum = 0;
    const double seconds = best_seconds([&] {
        sum = 0;
#pragma omp parallel for simd num_threads(threads) reduction(+ : sum)
        for (std::int64_t i = 0; i < count; ++i) sum += memory[i];
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

}  // namespace

void bind_peak(nb::module_ &m) {
    m.def("machine_peak", &machine_peak, "threads"_a,
          "GFLOP/s that the chosen variant's multiply-adds reach per operand dtype, and GB/s that reading memory reaches;\n"
          "measured now, about a second. For benchmarks.");
}
