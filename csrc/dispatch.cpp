// Compiled for the baseline instruction set.

#include "dispatch.h"

#include "cpu_features.h"
#include "data/tiles.h"
#include "tile_memory.h"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <stdexcept>

namespace fusion {
namespace {

typedef const DenseVariant *Dense();
typedef const DecodeKernels *Decode();
typedef const SparseVariant *Sparse();

}  // namespace
}  // namespace fusion

#define FUSION_DECLARE(variant)                       \
    fusion::Dense fusion_variant_##variant##_dense;   \
    fusion::Decode fusion_variant_##variant##_decode; \
    fusion::Sparse fusion_variant_##variant##_sparse;

extern "C" {
FUSION_DECLARE(base)
FUSION_DECLARE(v3)
FUSION_DECLARE(v4)
FUSION_DECLARE(v4_avx512vnni)
FUSION_DECLARE(v4_avx512bf16)
FUSION_DECLARE(asimddp)
FUSION_DECLARE(asimddp_bf16)
FUSION_DECLARE(v4_amx)
FUSION_DECLARE(amx_model)
}

namespace fusion {
namespace {

using Names = std::vector<std::string>;

Names operator+(Names a, const Names &b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// A variant's name, what it needs, and where its parts are. Dot products of bytes are decode's alone, so a variant that
// has nothing else of its own is another one's with another decode.
struct Parts {
    const char *name;
    Names needs;
    Dense *dense;
    Decode *decode;
    Sparse *sparse;
    Dense *pair_dense = nullptr;  // kernels of pairs in place of those parts', where they multiply tiles
    Sparse *pair_sparse = nullptr;
};

#define FUSION_PARTS(dense, decode) \
    fusion_variant_##dense##_dense, fusion_variant_##decode##_decode, fusion_variant_##dense##_sparse
#define FUSION_PAIR_PARTS(tiles) fusion_variant_##tiles##_dense, fusion_variant_##tiles##_sparse

std::vector<Parts> list_parts() {  // weakest first
    [[maybe_unused]] const Names v3 = {"pni", "ssse3", "cx16", "sse4_1", "sse4_2", "movbe", "popcnt", "lahf_lm",
                                       "abm", "bmi1",  "bmi2", "avx",    "f16c",   "fma",   "avx2"};
    [[maybe_unused]] const Names v4 = v3 + Names{"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"};
    [[maybe_unused]] const Names armv82 = {"crc32", "atomics", "asimdrdm"};  // what compilers may use of it
    std::vector<Parts> out = {{"base", {}, FUSION_PARTS(base, base)}};
#if defined(FUSION_HAS_V3)
    out.push_back({"v3", v3, FUSION_PARTS(v3, v3)});
#endif
#if defined(FUSION_HAS_V4)
    out.push_back({"v4", v4, FUSION_PARTS(v4, v4)});
#if defined(FUSION_HAS_V4_AVX512VNNI)
    out.push_back({"v4+avx512vnni", v4 + Names{"avx512_vnni"}, FUSION_PARTS(v4, v4_avx512vnni)});
#endif
#endif
#if defined(FUSION_HAS_V4_AVX512BF16)
    out.push_back(
        {"v4+avx512bf16", v4 + Names{"avx512_vnni", "avx512_bf16"}, FUSION_PARTS(v4_avx512bf16, v4_avx512bf16)});
#endif
#if defined(FUSION_HAS_V4_AMX)
    out.push_back({"v4+amx", v4 + Names{"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
                   FUSION_PARTS(v4_avx512bf16, v4_avx512bf16), FUSION_PAIR_PARTS(v4_amx)});
#endif
#if defined(FUSION_HAS_ASIMDDP)
    out.push_back({"asimddp", armv82 + Names{"asimddp"}, FUSION_PARTS(base, asimddp)});
#endif
#if defined(FUSION_HAS_ASIMDDP_BF16)
    out.push_back({"asimddp+bf16", armv82 + Names{"asimddp", "bf16"}, FUSION_PARTS(asimddp_bf16, asimddp_bf16)});
#endif
#if defined(FUSION_HAS_AMX_MODEL)  // slow, and for tests: only who names it has it
    if (forced_variant() == "amx_model") {
        out.push_back({"amx_model", {}, FUSION_PARTS(base, base), FUSION_PAIR_PARTS(amx_model)});
    }
#endif
    return out;
}

bool has(const Names &here, const std::string &name) { return std::find(here.begin(), here.end(), name) != here.end(); }

bool runs_on(const Names &here, const Parts &parts) {
    return std::all_of(parts.needs.begin(), parts.needs.end(),
                       [&](const std::string &name) { return has(here, name); }) &&
           (!has(parts.needs, "amx_tile") || tile_refusal().empty());
}

// The features of this CPU, or those of them that the forced variant needs.
Names visible_features() {
    Names here = find_features();
    const std::string forced = forced_variant();
    if (forced.empty()) return here;
    std::string runnable;
    for (const Parts &parts : list_parts()) {
        if (!runs_on(here, parts)) continue;
        if (forced == parts.name) {
            Names out;
            std::copy_if(here.begin(), here.end(), std::back_inserter(out),
                         [&](const std::string &name) { return has(parts.needs, name); });
            return out;
        }
        runnable += (runnable.empty() ? "" : ", ") + std::string(parts.name);
    }
    const bool refused = has(here, "amx_tile") && forced.find("amx") != std::string::npos && !tile_refusal().empty();
    throw std::invalid_argument("FUSION_ATTENTION_CPU: expected a variant that this machine runs (" + runnable +
                                "), got '" + forced + "'" + (refused ? ": " + tile_refusal() : ""));
}

// A variant's parts put together; plans keep references to them.
Built assemble(const Parts &parts) {
    static std::deque<Variant> dense;
    static std::deque<SparseVariant> sparse;
    dense.push_back({*parts.dense(), parts.name, *parts.decode(), second_level_cache()});
    if (!parts.pair_dense) return {&dense.back(), parts.name, parts.sparse()};
    const DenseVariant &tiles = *parts.pair_dense();
    dense.back().as_pairs = tiles.as_pairs;
    dense.back().gradients_as_pairs = tiles.gradients_as_pairs;
    sparse.push_back(
        {parts.sparse()->as_float, parts.pair_sparse ? parts.pair_sparse()->as_pairs : parts.sparse()->as_pairs});
    return {&dense.back(), parts.name, &sparse.back()};
}

std::vector<Built> list_variants() {
    std::vector<Built> out;
    for (const Parts &parts : list_parts()) {
        // An entry point is itself compiled for its variant, so it is called only on a CPU that can run it.
        if (runs_on(cpu_features(), parts)) {
            out.push_back(assemble(parts));
        } else {
            out.push_back({nullptr, parts.name, nullptr});
        }
    }
    return out;
}

}  // namespace

#if defined(FUSION_HAS_AMX_MODEL)
__thread TileCounts tile_counts;
#endif

std::string forced_variant() {
    const char *name = std::getenv("FUSION_ATTENTION_CPU");
    return name ? name : "";
}

const std::vector<std::string> &cpu_features() {
    static const std::vector<std::string> found = visible_features();
    return found;
}

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
