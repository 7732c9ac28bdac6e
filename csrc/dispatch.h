// The variants compiled into this module, those that this CPU can run, and the chosen one.
//
// The choice is made once, when the module is imported; no other code of the core depends on the CPU.

#pragma once

#include "data/variant.h"

#include <string>
#include <vector>

namespace fusion {

struct Built {  // a row of the table in CMakeLists.txt
    const char *name;
    std::vector<std::string> parts, needs;
    const DenseVariant *(*dense)();  // where its parts, or those of others that it takes, begin
    const DecodeKernels *(*decode)();
    const SparseVariant *(*sparse)();
    const PoolVariant *(*pool)();
    const Variant *variant = nullptr;  // null when the CPU cannot run it: even its tables are then left alone
};

// The variant named by FUSION_ATTENTION_CPU, or "". cpu_features() is then limited to the features that this variant
// needs, and throws std::invalid_argument if the name is unknown or the variant does not run here.
std::string forced_variant();

const std::vector<std::string> &cpu_features();  // by the names of /proc/cpuinfo
const std::vector<Built> &built_variants();      // weakest first
// The strongest variant that runs; with slow_pairs, not the one whose only gain are vector products of bfloat16 pairs.
const Variant &fastest(const std::vector<Built> &rows, bool slow_pairs);
const Variant &chosen_variant();

}  // namespace fusion
