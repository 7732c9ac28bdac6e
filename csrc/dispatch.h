// Which variants this module holds, which of them this CPU can run, and the one chosen.
//
// The choice is made once, when the module is imported; nothing else in the core asks what CPU it is on.

#pragma once

#include "data/variant.h"
#include "data/variant_sparse.h"

#include <vector>

namespace fusion {

struct Built {
    const Variant *variant;  // null when the CPU cannot run it: even its table is then left alone
    const char *name;
    const SparseVariant *sparse;  // its other half
};

const std::vector<Built> &built_variants();  // weakest first
const Variant &chosen_variant();             // the strongest that runs

}  // namespace fusion
