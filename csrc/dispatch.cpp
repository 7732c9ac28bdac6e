// Compiled for the baseline instruction set. Asks cpuid and the operating system (xgetbv) directly:
// __builtin_cpu_supports knows the x86-64 levels only in newer compilers than we support.

#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fusion {
namespace {

enum class Level { base, v3, v4, v4_avx512bf16 };

#if defined(__x86_64__)

struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf = 0) {
    Registers r;
    if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return Registers{};
    return r;
}

constexpr unsigned bit(int position) { return 1u << position; }

constexpr bool has(unsigned word, unsigned mask) { return (word & mask) == mask; }

unsigned enabled_state() {  // XCR0: the register files that the operating system saves
    unsigned low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

Level cpu_level() {
    constexpr unsigned ymm_state = bit(1) | bit(2);
    constexpr unsigned zmm_state = ymm_state | bit(5) | bit(6) | bit(7);
    // leaf 1 ecx: SSE3, SSSE3, FMA, CMPXCHG16B, SSE4.1, SSE4.2, MOVBE, POPCNT, OSXSAVE, AVX, F16C
    constexpr unsigned v3_leaf1 =
        bit(0) | bit(9) | bit(12) | bit(13) | bit(19) | bit(20) | bit(22) | bit(23) | bit(27) | bit(28) | bit(29);
    constexpr unsigned v3_leaf7 = bit(3) | bit(5) | bit(8);  // leaf 7 ebx: BMI1, AVX2, BMI2
    constexpr unsigned v3_extended = bit(0) | bit(5);        // leaf 0x80000001 ecx: LAHF, LZCNT
    // leaf 7 ebx: AVX512F, AVX512DQ, AVX512CD, AVX512BW, AVX512VL
    constexpr unsigned v4_leaf7 = bit(16) | bit(17) | bit(28) | bit(30) | bit(31);
    constexpr unsigned avx512bf16 = bit(5);   // leaf 7, subleaf 1, eax
    constexpr unsigned avx512vnni = bit(11);  // leaf 7, ecx: every CPU with AVX512_BF16 has it

    const Registers leaf7 = cpuid(7);
    if (!has(cpuid(1).c, v3_leaf1) || !has(leaf7.b, v3_leaf7) || !has(cpuid(0x80000001u).c, v3_extended)) {
        return Level::base;
    }
    const unsigned state = enabled_state();  // legal only now: OSXSAVE was among the bits just seen
    if (!has(state, ymm_state)) return Level::base;
    if (!has(leaf7.b, v4_leaf7) || !has(state, zmm_state)) return Level::v3;
    // leaf 7's eax is its highest subleaf
    if (leaf7.a < 1 || !has(cpuid(7, 1).a, avx512bf16) || !has(leaf7.c, avx512vnni)) return Level::v4;
    return Level::v4_avx512bf16;
}

#else

Level cpu_level() { return Level::base; }

#endif

std::vector<Built> list_variants() {
    const Level level = cpu_level();
    std::vector<Built> out;
    const auto add = [&](Level needed, const char *name, const Variant *(*entry)(), const SparseVariant *(*sparse)()) {
        // An entry point is itself compiled for its variant, so it is called only on a CPU that can run it.
        out.push_back({level >= needed ? entry() : nullptr, name, level >= needed ? sparse() : nullptr});
    };
    add(Level::base, "base", fusion_variant_base, fusion_variant_base_sparse);
#if defined(FUSION_HAS_V3)
    add(Level::v3, "v3", fusion_variant_v3, fusion_variant_v3_sparse);
#endif
#if defined(FUSION_HAS_V4)
    add(Level::v4, "v4", fusion_variant_v4, fusion_variant_v4_sparse);
#endif
#if defined(FUSION_HAS_V4_AVX512BF16)
    add(Level::v4_avx512bf16, "v4+avx512bf16", fusion_variant_v4_avx512bf16, fusion_variant_v4_avx512bf16_sparse);
#endif
    return out;
}

}  // namespace

const std::vector<Built> &built_variants() {
    static const std::vector<Built> built = list_variants();
    return built;
}

const Variant &chosen_variant() {
    const Variant *best = nullptr;
    for (const Built &built : built_variants()) {
        if (built.variant) best = built.variant;
    }
    return *best;  // base always runs
}

}  // namespace fusion
