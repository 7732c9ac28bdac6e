// Tile registers (AMX): eight tiles of 16 rows by 64 bytes, for bfloat16 pairs or float32 sums.
//
// Tiles must be configured before use. TileRegion configures them for a thread while a kernel runs, so that no thread
// keeps a tile configuration afterwards, and signal handlers or other libraries may use tiles between kernels.

#pragma once

#include "simd/vector_types.h"

#if defined(FUSION_TILES_MODEL)
#include "simd/tiles_model.h"
#endif

namespace fusion {
namespace {
namespace tiles {

constexpr int side = 16;  // rows of a tile, and words of a row

struct alignas(64) Config {  // the memory format of ldtilecfg
    std::uint8_t palette = 0, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};
static_assert(sizeof(Config) == 64);

#if !defined(FUSION_TILES_MODEL)
// Instructions as inline assembly, because the built-in functions of GCC 12 do not declare that they access memory.
FUSION_INLINE void load_config(const Config &from) { __asm__ volatile("ldtilecfg %0" ::"m"(from) : "memory"); }
FUSION_INLINE void store_config(Config &to) { __asm__ volatile("sttilecfg %0" : "=m"(to)::"memory"); }
FUSION_INLINE void release() { __asm__ volatile("tilerelease" ::: "memory"); }
template <int Tile> FUSION_INLINE void zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(Tile)); }
template <int Tile> FUSION_INLINE void load(const void *from, std::int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile> FUSION_INLINE void store(void *to, std::int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
}
FUSION_INLINE void expect(bool) {}
template <int Sums, int A, int B> FUSION_INLINE void multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
}
#else
FUSION_INLINE void load_config(const Config &from) { model::configure(from.palette == 1, from.row_bytes, from.rows); }
FUSION_INLINE void store_config(Config &to) {
    to = {};
    to.palette = model::configured;
    model::describe(to.row_bytes, to.rows);
}
FUSION_INLINE void release() { load_config({}); }
template <int Tile> FUSION_INLINE void zero() { model::zero(Tile); }
template <int Tile> FUSION_INLINE void load(const void *from, std::int64_t stride) { model::load(Tile, from, stride); }
template <int Tile> FUSION_INLINE void store(void *to, std::int64_t stride) { model::store(Tile, to, stride); }
FUSION_INLINE void expect(bool holds) { model::require(holds); }
template <int Sums, int A, int B> FUSION_INLINE void multiply() { model::multiply(Sums, A, B); }
#endif

}  // namespace tiles

// Configures the tiles of this thread during its lifetime; then restores the previous configuration or releases them.
class TileRegion {
public:
    FUSION_INLINE TileRegion() {
        tiles::store_config(before_);
        tiles::Config all;
        all.palette = 1;
        for (int i = 0; i < 8; ++i) all.row_bytes[i] = 4 * tiles::side, all.rows[i] = tiles::side;
        tiles::load_config(all);
    }
    FUSION_INLINE ~TileRegion() {
        if (before_.palette) tiles::load_config(before_);
        else tiles::release();
    }
    TileRegion(const TileRegion &) = delete;
    TileRegion &operator=(const TileRegion &) = delete;

private:
    tiles::Config before_;
};

}  // namespace
}  // namespace fusion
