// The pooling part of an instruction-set variant; compiled like variant_dense.cpp, with the same restrictions.

#include "kernel_table.h"
#include "sparse/pool.h"

extern "C" const fusion::PoolKernels *FUSION_ENTRY(_pool)() { return &fusion::pool_kernels; }
