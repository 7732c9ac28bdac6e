// Kernels that take time instead of computing: tables of functions as a variant's, which touch no operand. Sizes are
// those of 512-bit bfloat16 and float32, since plans decide by them.

#pragma once

#include "data/variant.h"
#include "data/variant_sparse.h"

namespace schedule {

const fusion::Variant &variant();
const fusion::SparseVariant &sparse_variant();

}  // namespace schedule
