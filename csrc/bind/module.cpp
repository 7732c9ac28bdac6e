// The Python interface of the native core: converts and checks arguments, then calls the chosen variant.
// Compiled for the baseline instruction set; a call with bad arguments ends in a Python exception, never in a crash.

#include "plan/arena.h"
#include "plan/team.h"
#include "plan/thread_pool.h"
#include "dispatch.h"
#include "amx_permission.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Names = std::vector<std::string>;

Names names_of(bool runnable) {  // of the variants that this CPU can run, or of all that are built
    Names out;
    for (const fusion::Built &built : fusion::built_variants()) {
        if (!runnable || built.variant) out.emplace_back(built.name);
    }
    return out;
}

bool contains(const Names &names, const std::string &name) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

std::string joined(const Names &names) {
    std::string out;
    for (const std::string &name : names) out += (out.empty() ? "" : ", ") + name;
    return out.empty() ? "none" : out;
}

[[noreturn]] void refuse(const char *param, const Names &expected, const std::string &got, const char *why) {
    throw nb::value_error(("variant_probe: " + std::string(param) + ": expected one of " + joined(expected) +
                           ", got \"" + got + "\" (" + why + ")")
                              .c_str());
}

const fusion::Variant &find_variant(const std::string &name, const std::optional<Names> &within) {
    const Names built = names_of(false);
    Names allowed = names_of(true);
    if (within) {
        for (const std::string &other : *within) {
            if (!contains(built, other)) refuse("within", built, other, "no such variant is built into this module");
        }
        std::erase_if(allowed, [&](const std::string &other) { return !contains(*within, other); });
    }
    if (!contains(built, name)) refuse("variant", built, name, "no such variant is built into this module");
    if (!contains(allowed, name)) {
        refuse("variant", allowed, name,
               "built in, but this CPU lacks instructions that it needs; choose a runnable one");
    }
    const auto &all = fusion::built_variants();
    return *std::find_if(all.begin(), all.end(), [&](const fusion::Built &b) { return name == b.name; })->variant;
}

// Runs one product of a variant on small integers and returns its results for a comparison at import: every product and
// sum is exact in float32 and every input in bfloat16, so the results do not depend on the number of lanes.
nb::dict variant_probe(const std::string &name, const std::optional<Names> &within) {
    const fusion::Variant &variant = find_variant(name, within);
    constexpr int count = 1003;  // not a multiple of any vector, so the tail is exercised too
    std::vector<float> x, y;
    std::vector<std::uint16_t> x_bf16, y_bf16;
    std::vector<std::uint8_t> x_bytes;
    std::vector<std::int8_t> y_bytes;
    const auto bf16 = [](float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); };
    for (int i = 0; i < count; ++i) {
        x.push_back(static_cast<float>(i * 7 % 17 - 8));
        y.push_back(static_cast<float>(i * 5 % 13 - 6));
        x_bf16.push_back(bf16(x.back()));
        y_bf16.push_back(bf16(y.back()));
        x_bytes.push_back(static_cast<std::uint8_t>(i * 7 % 17));
        y_bytes.push_back(static_cast<std::int8_t>(i * 5 % 13 - 6));
    }
    nb::dict out;
    out["variant"] = variant.name;
    out["lanes"] = variant.lanes;
    out["checksum"] = variant.dot(x.data(), y.data(), x.size());
    out["checksum_bf16"] = variant.dot_bf16(x_bf16.data(), y_bf16.data(), x_bf16.size());
    out["checksum_int8"] = variant.decode.dot_bytes(x_bytes.data(), y_bytes.data(), x_bytes.size());
    return out;
}

nb::dict cpu_features() {
    nb::dict out;
    out["built"] = names_of(false);
    out["chosen"] = fusion::chosen_variant().name;
    out["features"] = fusion::cpu_features();
    out["forced"] = fusion::forced_variant();
    out["forked"] = fusion::is_forked();
    out["runnable"] = names_of(true);
    const auto &features = fusion::cpu_features();
    const bool tiles = std::find(features.begin(), features.end(), "amx_tile") != features.end();
    const bool uses_tiles = contains(names_of(false), "v4+amx");
    out["tiles_refused"] = !tiles ? "" : uses_tiles ? fusion::tile_refusal() : "this build has no kernels for it";
    nb::dict lanes, parts, needs;
    for (const fusion::Built &built : fusion::built_variants()) {
        lanes[built.name] = built.lanes;
        parts[built.name] = built.parts;
        needs[built.name] = built.needs;
    }
    out["lanes"] = lanes;
    out["parts"] = parts;
    out["needs"] = needs;
    return out;
}

// The thread in which Python runs signal handlers, as determined at import.
unsigned long main_thread = 0;

// Runs handlers of pending signals, as Python does between two instructions; returns true if one has raised. Called
// without the GIL, which another thread may hold for milliseconds, and which is therefore only acquired to run
// handlers.
bool signals_stop() {
    if (PyThread_get_thread_ident() != main_thread) return false;
    const nb::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
}

void watch_signals() {
    main_thread = nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
    fusion::asks_to_stop = &signals_stop;
    nb::register_exception_translator([](const std::exception_ptr &thrown, void *) {
        try {
            std::rethrow_exception(thrown);
        } catch (const fusion::Interrupted &) {
            // The exception of the handler is set in Python.
        }
    });
}

}  // namespace

void bind_forward(nb::module_ &m);    // bind/forward.cpp
void bind_backward(nb::module_ &m);   // bind/backward.cpp
void bind_decode(nb::module_ &m);     // bind/decode.cpp
void bind_peak(nb::module_ &m);       // bind/peak.cpp
void bind_sparse(nb::module_ &m);     // bind/sparse.cpp
void bind_pool(nb::module_ &m);       // bind/pool.cpp
void bind_signature(nb::module_ &m);  // bind/call_cache_key.cpp

NB_MODULE(_native, m) {
    m.doc() = "The native CPU core of fusion_attention.";
    fusion::built_variants();  // detects the CPU's features once
    watch_signals();
    // Plans are in a Python cache until the interpreter ends, which may not release them.
    nb::set_leak_warnings(false);

    m.def(
        "cpu_features", &cpu_features,
        "The instruction-set variants built in (weakest first), those this CPU can run, and the one chosen; the CPU's\n"
        "features that a variant or a note asks about, by the names of /proc/cpuinfo; the variant that\n"
        "FUSION_ATTENTION_CPU names; whether this process is a child of fork(), which has one thread; of each variant "
        "its lanes, its own parts and the features that it needs.");
    m.def("variant_probe", &variant_probe, "variant"_a, nb::kw_only(), "within"_a = nb::none(),
          "Run one variant's code on a fixed input and return its vector width and checksums.\n\n"
          "within: treat only these variants as runnable, as a weaker CPU would; it never adds one.\n"
          "Raises ValueError when the variant is unknown or cannot run here.");
    m.def(
        "poison_scratch", [](bool on) { fusion::lease_poison = on ? 0xff : -1; }, "on"_a,
        "From now on the scratch memory of every run begins as NaN, or as it was left; a run that writes behind it "
        "aborts.\n"
        "For tests.");
    bind_forward(m);
    bind_peak(m);
    bind_backward(m);
    bind_decode(m);
    bind_sparse(m);
    bind_pool(m);
    bind_signature(m);
}
