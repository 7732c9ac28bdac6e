// What the model of tiles counts. Tile registers themselves: simd/tiles.h.

#pragma once

#include <cstdint>

namespace fusion {

struct TileCounts {  // of instructions
    std::int64_t loads, stores, products;
};

// Of the calling thread, since it began. No thread_local: in other files that needs a function, which a variant may not
// show.
extern __thread TileCounts tile_counts;

}  // namespace fusion
