// Kernels that take time instead of computing: tables of functions as a variant's, which touch no operand. Sizes are
// those of 512-bit bfloat16 and float32, since plans decide by them.

#pragma once

#include "data/variant.h"
#include "data/variant_sparse.h"

#include <cstdint>
#include <unordered_map>

namespace schedule {

// In which order threads add to places: a backward's kernels find one behind Gradients::dq.
class Order {
public:
    // Ends the program where someone whose turn comes later has added there before.
    void add(std::int64_t place, std::int64_t turn);

private:
    std::unordered_map<std::int64_t, std::int64_t> last_;
};

const fusion::Variant &variant();
const fusion::SparseVariant &sparse_variant();

}  // namespace schedule
