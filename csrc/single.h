// The kernels of the format Single by a problem's dtype; for the two files that are compiled once per variant.

#pragma once

#include "data/problem.h"

// Returns name<Single, storage> of the arguments, which stand in brackets. Where there are kernels of Pair, bfloat16
// never comes here, and no kernel is compiled for it.
#if defined(__AVX512BF16__)
#define FUSION_SINGLE(name, arguments)                            \
    switch (job.problem->dtype) {                                 \
        case Dtype::float16: return name<Single, Half> arguments; \
        default: return name<Single, float> arguments;            \
    }
#else
#define FUSION_SINGLE(name, arguments)                              \
    switch (job.problem->dtype) {                                   \
        case Dtype::float16: return name<Single, Half> arguments;   \
        case Dtype::bfloat16: return name<Single, Brain> arguments; \
        default: return name<Single, float> arguments;              \
    }
#endif
