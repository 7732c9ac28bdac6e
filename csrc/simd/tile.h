// Blocks of matrix products: sum[M][N] += A[M][k] * B[k][N], M rows by N vectors of columns, in vector registers
// (RegisterTile) or, for Pair, in tile registers if available (SumBlock). Callers supply the addresses of A's words and
// B's vectors, and the destination of sums.

#pragma once

#include "simd/operand_formats.h"
#if defined(FUSION_TILES)
#include "simd/tiles.h"
#endif

namespace fusion {
namespace {

template <class Word> struct RowMajor {  // A with rows `stride` words apart
    const Word *first;
    std::int64_t stride;
    FUSION_INLINE Word operator()(int i, std::int64_t k) const { return first[i * stride + k]; }
};

template <class Word> struct ColumnMajor {  // A transposed; words may be anywhere, because they are broadcast
    const Word *first;
    std::int64_t stride;
    FUSION_INLINE Word operator()(int i, std::int64_t k) const { return first[k * stride + i]; }
};

template <int N> struct InPanels {  // B in panels of N vectors, `apart` words from panel to panel
    std::int64_t apart = N * lanes;
    FUSION_INLINE std::int64_t operator()(int j) const { return j / N * apart + j % N * lanes; }
};

template <class Format, int M, int N> struct RegisterTile {
    using Word = typename Format::Word;
    Floats sum[M][N];

    FUSION_INLINE RegisterTile() {
        FUSION_UNROLL for (int i = 0; i < M; ++i) { FUSION_UNROLL for (int j = 0; j < N; ++j) sum[i][j] = Floats{}; }
    }

    // Adds words [k, end) of A times the same number of rows of B, `step` words apart, to vectors [from, to) of sums;
    // returns the address of B's next row. left(i, k): a word of A; place(j): offset of vector j in a row of B.
    template <class Left, class Place = InPanels<N>>
    FUSION_INLINE const Word *add(std::int64_t k, std::int64_t end, Left left, const Word *b, std::int64_t step,
                                  Place place = {}, int from = 0, int to = N) {
#pragma GCC unroll 2
        for (; k < end; ++k, b += step) {
            Words right[N];
            FUSION_UNROLL for (int j = 0; j < N; ++j) {
                if (j >= from && j < to) right[j] = load<Words>(b + place(j));
            }
            FUSION_UNROLL for (int i = 0; i < M; ++i) {
                FUSION_UNROLL for (int j = 0; j < N; ++j) {
                    if (j >= from && j < to) sum[i][j] = Format::dot(sum[i][j], left(i, k), right[j]);
                }
            }
        }
        return b;
    }

    // Calls use(i, j, sum) for every vector of sums.
    template <class Use> FUSION_INLINE void each(Use use) const {
        FUSION_UNROLL for (int i = 0; i < M; ++i) { FUSION_UNROLL for (int j = 0; j < N; ++j) use(i, j, sum[i][j]); }
    }
};

// Sums in memory, in panels of N vectors.
template <int N, bool Fades = false> struct Sums {
    float *first;
    std::int64_t stride;             // floats from row to row
    std::int64_t apart = N * lanes;  // floats from panel to panel
    bool add = false;                // true: adds to the previous sums
    const float *fade = nullptr;     // with Fades: a factor per row for the previous sums

    FUSION_INLINE float *operator()(int i, int j) const { return first + i * stride + j / N * apart + j % N * lanes; }
};

// A block of M rows by V vectors of sums: add() products, then finish() writes to memory. Registers start from zero if
// that costs nothing, because a single sum over all keys would be less accurate.
template <class Format, int M, int V, int N, bool Fades, bool Tiles = (Format::step > 1)> class SumBlock {
public:
    FUSION_INLINE explicit SumBlock(const Sums<N, Fades> &to) : to_(to) {}

    template <class... Arguments> FUSION_INLINE auto add(Arguments... arguments) { return tile_.add(arguments...); }

    FUSION_INLINE void finish() const {
        tile_.each([&](int i, int j, Floats sum) __attribute__((always_inline)) {
            float *const at = to_(i, j);
            if constexpr (Fades) {
                if (to_.add) sum += load<Floats>(at) * all(to_.fade[i]);
                store(at, sum);
            } else {
                store(at, to_.add ? sum + load<Floats>(at) : sum);
            }
        });
    }

private:
    const Sums<N, Fades> to_;
    RegisterTile<Format, M, V> tile_;
};

#if defined(FUSION_TILES)
// The block in tile registers, two tiles of rows by two of columns. Sums continue from those in memory: each product
// adds 32 terms at once, so there are as few roundings as above. Depths are multiples of Format::step.
template <class Format, int M, int V, int N, bool Fades> class SumBlock<Format, M, V, N, Fades, true> {
    static constexpr int side = tiles::side;
    static_assert(V <= 2 && M % side == 0 && M <= 2 * side && lanes == side && Format::step == side);

public:
    using Word = typename Format::Word;

    FUSION_INLINE explicit SumBlock(const Sums<N, Fades> &to) : to_(to) {
        if (!to.add) {
            each([](auto tile, float *) __attribute__((always_inline)) { tiles::zero<tile()>(); });
            return;
        }
        if constexpr (Fades) {
            for (int i = 0; i < M; ++i) {
                FUSION_UNROLL for (int j = 0; j < V; ++j) {
                    fusion::store(to(i, j), fusion::load<Floats>(to(i, j)) * all(to.fade[i]));
                }
            }
        }
        each([&](auto tile, float *at) __attribute__((always_inline)) { tiles::load<tile()>(at, to.stride * 4); });
    }

    template <class Place = InPanels<V>>
    FUSION_INLINE const Word *add(std::int64_t k, std::int64_t end, RowMajor<Word> left, const Word *b,
                                  std::int64_t step, Place place = {}, int from = 0, int to = V) const {
        tiles::expect(k % side == 0 && end % side == 0);
        const bool low = from == 0 && to > 0, high = V > 1 && from < 2 && to > 1;
        for (; k < end; k += side, b += side * step) {
            const Word *const a = left.first + k;
            if (low) tiles::load<6>(b + place(0), step * 4);
            if (high) tiles::load<7>(b + place(1), step * 4);
            tiles::load<4>(a, left.stride * 4);
            if (low) tiles::multiply<0, 4, 6>();
            if (high) tiles::multiply<1, 4, 7>();
            if constexpr (M > side) {
                tiles::load<5>(a + side * left.stride, left.stride * 4);
                if (low) tiles::multiply<2, 5, 6>();
                if (high) tiles::multiply<3, 5, 7>();
            }
        }
        return b;
    }

    FUSION_INLINE void finish() const {
        each([&](auto tile, float *at) __attribute__((always_inline)) { tiles::store<tile()>(at, to_.stride * 4); });
    }

private:
    // Calls use(tile of sums, its address).
    template <class Use> FUSION_INLINE void each(Use use) const {
        use(std::integral_constant<int, 0>{}, to_(0, 0));
        if constexpr (V > 1) use(std::integral_constant<int, 1>{}, to_(0, 1));
        if constexpr (M > side) use(std::integral_constant<int, 2>{}, to_(side, 0));
        if constexpr (M > side && V > 1) use(std::integral_constant<int, 3>{}, to_(side, 1));
    }

    const Sums<N, Fades> to_;
};
#endif

// A block of products that are read before they are stored: sums()(i, j) is vector j of row i.
template <class Format, int M, int N, bool Tiles = (Format::step > 1)> class StagedBlock {
public:
    template <class... Arguments> FUSION_INLINE auto add(Arguments... arguments) { return tile_.add(arguments...); }

    FUSION_INLINE auto sums() const {
        return [this](int i, int j) __attribute__((always_inline)) { return tile_.sum[i][j]; };
    }
    template <class Use> FUSION_INLINE void each(Use use) const { tile_.each(use); }

private:
    RegisterTile<Format, M, N> tile_;
};

#if defined(FUSION_TILES)
template <class Format, int M, int N> class StagedBlock<Format, M, N, true> {
public:
    FUSION_INLINE StagedBlock() : block_({place(), N * lanes}) {}

    template <class... Arguments> FUSION_INLINE auto add(Arguments... arguments) { return block_.add(arguments...); }

    FUSION_INLINE auto sums() const {
        block_.finish();
        return [this](int i, int j)
                   __attribute__((always_inline)) { return fusion::load<Floats>(staged_ + (i * N + j) * lanes); };
    }
    template <class Use> FUSION_INLINE void each(Use use) const {
        const auto staged = sums();
        for (int i = 0; i < M; ++i) {
            FUSION_UNROLL for (int j = 0; j < N; ++j) use(i, j, staged(i, j));
        }
    }

private:
    FUSION_INLINE float *place() {
        float *first = staged_;
        __asm__("" : "+r"(first));  // separates it from stack traffic, which a test searches for
        return first;
    }

    alignas(64) float staged_[M * N * lanes];
    SumBlock<Format, M, N, N, false> block_;
};
#endif

// The state that products need while a kernel runs: configured tile registers, or nothing.
struct NoRegion {};
#if defined(FUSION_TILES)
template <class Format> using ProductRegion = std::conditional_t<(Format::step > 1), TileRegion, NoRegion>;
#else
template <class Format> using ProductRegion = NoRegion;
#endif

// C[M][N vectors] = A[M][depth] * B, with rows of B Stride vectors apart; with Add and fade, plus fade[i] * C[i].
template <class Format, int M, int N, int Stride, bool Add, class Left = RowMajor<typename Format::Word>>
FUSION_INLINE void multiply(const typename Format::Word *a, std::int64_t a_stride, const typename Format::Word *b,
                            std::int64_t depth, float *c, std::int64_t c_stride, const float *fade) {
    SumBlock<Format, M, N, N, Add> block({c, c_stride, N * lanes, Add && fade, fade});
    block.add(0, depth, Left{a, a_stride}, b, Stride * lanes);
    block.finish();
}

// Calls body(vectors) for the columns after the last complete panel, if any.
template <class Body> FUSION_INLINE void narrow_panel(std::int64_t columns, Body body) {
    const std::int64_t vectors = columns % panel / lanes;
    if (vectors == 1) body(std::integral_constant<int, 1>{});
    if constexpr (panel_vectors > 2) {
        if (vectors == 2) body(std::integral_constant<int, 2>{});
        if (vectors == 3) body(std::integral_constant<int, 3>{});
    }
}

// Calls body(vectors, first column) for every panel of `columns` columns; the last may be narrower.
template <class Body> FUSION_INLINE void for_panels(std::int64_t columns, Body body) {
    std::int64_t at = 0;
    for (; at + panel <= columns; at += panel) body(std::integral_constant<int, panel_vectors>{}, at);
    narrow_panel(columns, [&](auto vectors) __attribute__((always_inline)) { body(vectors, at); });
}

// Calls body(height) with the least compiled height, a fraction of `full` rows, that is at least `rows`.
template <int full = block_rows, class Body> FUSION_INLINE void with_height(std::int64_t rows, Body body) {
    constexpr int unit = full / block_parts;
    static_assert(block_parts == 2 || block_parts == 3);
    if (rows > (block_parts - 1) * unit) return body(std::integral_constant<int, full>{});
    if constexpr (block_parts == 3) {
        if (rows > unit) return body(std::integral_constant<int, 2 * unit>{});
    }
    body(std::integral_constant<int, unit>{});
}

}  // namespace
}  // namespace fusion
