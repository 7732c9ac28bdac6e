// Compiled for the baseline instruction set.

#include "dispatch.h"

#include "cpu_features.h"
#include "data/amx_counts.h"
#include "amx_permission.h"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <iterator>
#include <stdexcept>

#if __has_include("variants.h")  // the rows of CMakeLists.txt's table that are built
#include "variants.h"
#else  // where only this file is read, or one variant compiled
#define FUSION_VARIANTS(X) X("base", 4, "dense decode sparse pool", "", base, base, base, base)
#endif

#define FUSION_DECLARE(name, lanes, parts, needs, dense, decode, sparse, pool) \
    const fusion::DenseVariant *fusion_variant_##dense##_dense();              \
    const fusion::DecodeKernels *fusion_variant_##decode##_decode();           \
    const fusion::SparseVariant *fusion_variant_##sparse##_sparse();           \
    const fusion::PoolVariant *fusion_variant_##pool##_pool();
extern "C" {
FUSION_VARIANTS(FUSION_DECLARE)
}

namespace fusion {
namespace {

using Names = std::vector<std::string>;

// Splits text at blanks. It uses no stream, because locales of streams need symbols of a newer glibc.
Names words_of(const std::string &text) {
    Names words;
    for (std::size_t from = 0, end; from < text.size(); from = end + 1) {
        end = std::min(text.find(' ', from), text.size());
        if (end > from) words.push_back(text.substr(from, end - from));
    }
    return words;
}

std::vector<Built> list_rows() {
#define FUSION_ROW(name, lanes, parts, needs, dense, decode, sparse, pool) \
    {name,                                                                 \
     words_of(parts),                                                      \
     words_of(needs),                                                      \
     fusion_variant_##dense##_dense,                                       \
     fusion_variant_##decode##_decode,                                     \
     fusion_variant_##sparse##_sparse,                                     \
     fusion_variant_##pool##_pool},
    return {FUSION_VARIANTS(FUSION_ROW)};
}

bool has(const Names &here, const std::string &name) { return std::find(here.begin(), here.end(), name) != here.end(); }

bool runs_on(const Names &here, const Built &row) {
    return std::all_of(row.needs.begin(), row.needs.end(), [&](const std::string &name) { return has(here, name); }) &&
           (!has(row.needs, "amx_tile") || tile_refusal().empty());
}

// The features of this CPU; with a forced variant, those of them that it needs.
Names visible_features() {
    Names here = find_features();
    const std::string forced = forced_variant();
    if (forced.empty()) return here;
    if (forced == "amx_model") here.push_back(forced);  // a software model; no processor has this feature
    std::string runnable;
    for (const Built &row : list_rows()) {
        if (!runs_on(here, row)) continue;
        if (forced == row.name) {
            Names out;
            std::copy_if(here.begin(), here.end(), std::back_inserter(out),
                         [&](const std::string &name) { return has(row.needs, name); });
            return out;
        }
        runnable += (runnable.empty() ? "" : ", ") + std::string(row.name);
    }
    const bool refused = has(here, "amx_tile") && forced.find("amx") != std::string::npos && !tile_refusal().empty();
    throw std::invalid_argument("FUSION_ATTENTION_CPU: expected a variant that this machine runs (" + runnable +
                                "), got '" + forced + "'" + (refused ? ": " + tile_refusal() : ""));
}

// Take the kernels that a variant leaves out, because its instructions do not change them, from the one before.
void complete(DenseVariant &combined, const DenseVariant &before) {
    if (combined.as_float.attend) return;
    combined.as_float = before.as_float, combined.gradients_as_float = before.gradients_as_float;
    combined.float_work = before.float_work;
}
void complete(DecodeKernels &combined, const DecodeKernels &before) {
    for (std::size_t i = 0; i < std::size(combined.attend); ++i) {
        if (!combined.attend[i]) combined.attend[i] = before.attend[i];
    }
}
void complete(SparseVariant &combined, const SparseVariant &before) {
    if (!combined.as_float.attend) combined.as_float = before.as_float;
}
void complete(PoolVariant &combined, const PoolVariant &before) {
    for (std::size_t i = 0; i < std::size(combined.kernels); ++i) {
        if (!combined.kernels[i].forward) combined.kernels[i] = before.kernels[i];
    }
}

// Combines a variant from its parts. Plans keep references to the result.
void assemble(Built &row, const Variant *before) {
    static std::deque<Variant> all;
    Variant &combined = all.emplace_back(
        Variant{*row.dense(), row.name, *row.decode(), *row.sparse(), *row.pool(), second_level_cache()});
    if (before) {
        complete(combined, *before);
        complete(combined.decode, before->decode);
        complete(combined.sparse, before->sparse);
        complete(combined.pool, before->pool);
    }
    row.variant = &combined;
}

std::vector<Built> list_variants() {
    std::vector<Built> out = list_rows();
    const Variant *before = nullptr;
    for (Built &row : out) {
        // An entry point is itself compiled for its variant, so it is called only on a CPU that can run it.
        if (!runs_on(cpu_features(), row)) continue;
        assemble(row, before);
        before = row.variant;
    }
    return out;
}

}  // namespace

__thread TileCounts tile_counts;

std::string forced_variant() {
    const char *name = std::getenv("FUSION_ATTENTION_CPU");
    return name ? name : "";
}

const std::vector<std::string> &cpu_features() {
    static const std::vector<std::string> features = visible_features();
    return features;
}

const std::vector<Built> &built_variants() {
    static const std::vector<Built> built = list_variants();
    return built;
}

const Variant &fastest(const std::vector<Built> &rows, bool slow_pairs) {
    const Variant *best = nullptr;
    for (const Built &row : rows) {
        if (row.variant && !(slow_pairs && row.name == std::string("v4+avx512bf16"))) best = row.variant;
    }
    return *best;  // base always runs
}

const Variant &chosen_variant() { return fastest(built_variants(), has_slow_pairs() && forced_variant().empty()); }

}  // namespace fusion
