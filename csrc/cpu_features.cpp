// Compiled for the baseline instruction set. Asks cpuid and the operating system directly: __builtin_cpu_supports knows
// some of these names only in newer compilers than we support.

#include "cpu_features.h"

#include "system.h"

#include <algorithm>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fusion {
namespace {

#if defined(__x86_64__)

struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

// Registers of cpuid; zeros if the leaf (or, for leaf 7, the subleaf) is beyond the highest, where answers are
// undefined.
Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r;
    if (subleaf && cpuid(leaf, 0).a < subleaf) return r;
    if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return {};
    return r;
}

std::uint64_t saved_registers() {  // XCR0: the register files that the operating system saves
    constexpr unsigned osxsave = 1u << 27;
    if (!(cpuid(1, 0).c & osxsave)) return 0;
    unsigned low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low | std::uint64_t{high} << 32;
}

constexpr std::uint64_t none = 0, ymm = 0x6, zmm = ymm | 0xe0, tiles = 0x60000;  // bits of XCR0

struct Bit {
    const char *name;
    unsigned leaf, subleaf;
    unsigned Registers::*word;
    int position;
    std::uint64_t saved;
};

constexpr Bit bits[] = {
    {"pni", 1, 0, &Registers::c, 0, none},  // SSE3
    {"ssse3", 1, 0, &Registers::c, 9, none},
    {"cx16", 1, 0, &Registers::c, 13, none},
    {"sse4_1", 1, 0, &Registers::c, 19, none},
    {"sse4_2", 1, 0, &Registers::c, 20, none},
    {"movbe", 1, 0, &Registers::c, 22, none},
    {"popcnt", 1, 0, &Registers::c, 23, none},
    {"lahf_lm", 0x80000001, 0, &Registers::c, 0, none},
    {"abm", 0x80000001, 0, &Registers::c, 5, none},  // LZCNT
    {"bmi1", 7, 0, &Registers::b, 3, none},
    {"bmi2", 7, 0, &Registers::b, 8, none},
    {"avx", 1, 0, &Registers::c, 28, ymm},
    {"f16c", 1, 0, &Registers::c, 29, ymm},
    {"fma", 1, 0, &Registers::c, 12, ymm},
    {"avx2", 7, 0, &Registers::b, 5, ymm},
    {"avx_vnni", 7, 1, &Registers::a, 4, ymm},
    {"avx512f", 7, 0, &Registers::b, 16, zmm},
    {"avx512dq", 7, 0, &Registers::b, 17, zmm},
    {"avx512cd", 7, 0, &Registers::b, 28, zmm},
    {"avx512bw", 7, 0, &Registers::b, 30, zmm},
    {"avx512vl", 7, 0, &Registers::b, 31, zmm},
    {"avx512_vnni", 7, 0, &Registers::c, 11, zmm},
    {"avx512_bf16", 7, 1, &Registers::a, 5, zmm},
    {"avx512_fp16", 7, 0, &Registers::d, 23, zmm},
    {"amx_tile", 7, 0, &Registers::d, 24, tiles},
    {"amx_int8", 7, 0, &Registers::d, 25, tiles},
    {"amx_bf16", 7, 0, &Registers::d, 22, tiles},
    {"amx_fp16", 7, 1, &Registers::a, 21, tiles},
};

bool is_here(const Bit &bit, std::uint64_t saved) {
    return (saved & bit.saved) == bit.saved && (cpuid(bit.leaf, bit.subleaf).*bit.word >> bit.position & 1);
}

#endif

}  // namespace

std::vector<std::string> find_features() {
#if defined(__x86_64__)
    std::vector<std::string> names;
    const std::uint64_t saved = saved_registers();
    for (const Bit &bit : bits) {
        if (is_here(bit, saved)) names.emplace_back(bit.name);
    }
    return names;
#else
    return system::arm_features();
#endif
}

bool has_slow_pairs() {
#if defined(__x86_64__)
    return cpuid(0, 0).b == signature_INTEL_ebx;
#else
    return false;
#endif
}

std::size_t second_level_cache() {
    constexpr std::size_t unit = 512 << 10;
    const std::size_t bytes = system::second_level_cache();
    return bytes ? std::clamp(bytes, unit, 4 * unit) : 2 * unit;
}

}  // namespace fusion
