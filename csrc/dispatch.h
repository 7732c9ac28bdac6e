// Which variants this module holds, which of them this CPU can run, and the one chosen.
//
// The choice is made once, when the module is imported; nothing else in the core asks what CPU it is on.

#pragma once

#include "data/variant.h"
#include "data/variant_sparse.h"

#include <string>
#include <vector>

namespace fusion {

struct Built {  // a row of the table in CMakeLists.txt
    const char *name;
    int lanes;
    std::vector<std::string> parts, needs;
    const DenseVariant *(*dense)();  // where its parts, or those of others that it takes, begin
    const DecodeKernels *(*decode)();
    const SparseVariant *(*sparse_part)();
    const Variant *variant = nullptr;  // null when the CPU cannot run it: even its tables are then left alone
    const SparseVariant *sparse = nullptr;
};

// The variant that FUSION_ATTENTION_CPU names, or "". The CPU then counts as one that has what this variant needs and
// no more. cpu_features() throws std::invalid_argument for a name that is unknown or does not run here.
std::string forced_variant();

const std::vector<std::string> &cpu_features();  // by the names of /proc/cpuinfo
const std::vector<Built> &built_variants();      // weakest first
const Variant &chosen_variant();                 // the strongest that runs

}  // namespace fusion
