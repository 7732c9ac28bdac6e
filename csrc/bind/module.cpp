// The Python interface of the native core: converts and checks arguments, then calls the chosen variant.
// Compiled for the baseline instruction set; a call with bad arguments ends in a Python exception, never in a crash.

#include "plan/arena.h"
#include "plan/team.h"
#include "plan/thread_pool.h"
#include "dispatch.h"
#include "amx_permission.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
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

nb::dict cpu_features() {
    nb::dict out;
    const Names built = names_of(false);
    out["built"] = built;
    out["chosen"] = fusion::chosen_variant().name;
    out["features"] = fusion::cpu_features();
    out["forced"] = fusion::forced_variant();
    out["forked"] = fusion::is_forked();
    out["runnable"] = names_of(true);
    const auto &features = fusion::cpu_features();
    const bool tiles = std::find(features.begin(), features.end(), "amx_tile") != features.end();
    const bool uses_tiles = std::find(built.begin(), built.end(), "v4+amx") != built.end();
    out["tiles_refused"] = !tiles ? "" : uses_tiles ? fusion::tile_refusal() : "this build has no kernels for it";
    nb::dict parts, needs;
    for (const fusion::Built &row : fusion::built_variants()) {
        parts[row.name] = row.parts;
        needs[row.name] = row.needs;
    }
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
        "its own parts and the features that it needs.");
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
