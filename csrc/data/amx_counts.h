// Counters of the software model of tile registers (simd/tiles_model.h).

#pragma once

#include <cstdint>

namespace fusion {

struct TileCounts {  // numbers of instructions
    std::int64_t loads, stores, products;
};

// Counts of the calling thread since its start. Not thread_local, because access from other files would call a function
// that a variant may not export.
extern __thread TileCounts tile_counts;

}  // namespace fusion
