// The register tile that products are made of: sum[M][N] += A[M][k] * B[k][N], M rows by N vectors of columns.
//
// Who multiplies says where A's words and B's vectors lie and what becomes of the sums. Instructions that multiply
// whole tiles would take the place of RegisterTile::add() alone.

#pragma once

#include "simd/types.h"

namespace fusion {
namespace {

template <class Word> struct RowMajor {  // A with rows `stride` words apart
    const Word *first;
    std::int64_t stride;
    FUSION_INLINE Word operator()(int i, std::int64_t k) const { return first[i * stride + k]; }
};

template <class Word> struct ColumnMajor {  // A transposed: a broadcast does not mind where its words lie
    const Word *first;
    std::int64_t stride;
    FUSION_INLINE Word operator()(int i, std::int64_t k) const { return first[k * stride + i]; }
};

template <int N> struct InPanels {  // B in panels of N vectors, `apart` words from each other
    std::int64_t apart = N * lanes;
    FUSION_INLINE std::int64_t operator()(int j) const { return j / N * apart + j % N * lanes; }
};

template <class Format, int M, int N> struct RegisterTile {
    using Word = typename Format::Word;
    Floats sum[M][N];

    FUSION_INLINE RegisterTile() {
        FUSION_UNROLL for (int i = 0; i < M; ++i) { FUSION_UNROLL for (int j = 0; j < N; ++j) sum[i][j] = Floats{}; }
    }

    // Adds words [k, end) of A times as many rows of B, which are `step` words apart, to vectors [from, to) of sums;
    // returns where B goes on. left(i, k): a word of A; place(j): where a row's vector j lies.
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

    // use(i, j, sum) for every vector of sums.
    template <class Use> FUSION_INLINE void each(Use use) const {
        FUSION_UNROLL for (int i = 0; i < M; ++i) { FUSION_UNROLL for (int j = 0; j < N; ++j) use(i, j, sum[i][j]); }
    }
};

// C[M][N vectors] = A[M][depth] * B, whose rows are Stride vectors apart; with Add and fade, fade[i] * C[i] is added.
// Every key tile is summed from zero: one sum over all keys would lose bits.
template <class Format, int M, int N, int Stride, bool Add, class Left = RowMajor<typename Format::Word>>
FUSION_INLINE void multiply(const typename Format::Word *a, std::int64_t a_stride, const typename Format::Word *b,
                            std::int64_t depth, float *c, std::int64_t c_stride, const float *fade) {
    RegisterTile<Format, M, N> tile;
    tile.add(0, depth, Left{a, a_stride}, b, Stride * lanes);
    tile.each([&](int i, int j, Floats sum) __attribute__((always_inline)) {
        float *at = c + i * c_stride + j * lanes;
        if (Add && fade) sum += load<Floats>(at) * all(fade[i]);
        store(at, sum);
    });
}

// body(vectors) for what is left of so many columns behind whole panels, if anything is.
template <class Body> FUSION_INLINE void narrow_panel(std::int64_t columns, Body body) {
    const std::int64_t vectors = columns % panel / lanes;
    if (vectors == 1) body(std::integral_constant<int, 1>{});
    if constexpr (panel_vectors > 2) {
        if (vectors == 2) body(std::integral_constant<int, 2>{});
        if (vectors == 3) body(std::integral_constant<int, 3>{});
    }
}

// body(vectors, first column) for every panel of so many columns, of which the last may be narrow.
template <class Body> FUSION_INLINE void for_panels(std::int64_t columns, Body body) {
    std::int64_t at = 0;
    for (; at + panel <= columns; at += panel) body(std::integral_constant<int, panel_vectors>{}, at);
    narrow_panel(columns, [&](auto vectors) __attribute__((always_inline)) { body(vectors, at); });
}

// body(height) with the least of a third, two thirds and all of `whole` rows that holds so many.
template <int whole = block_rows, class Body> FUSION_INLINE void with_height(std::int64_t rows, Body body) {
    constexpr int third = whole / 3;
    if (rows > 2 * third) return body(std::integral_constant<int, whole>{});
    if (rows > third) return body(std::integral_constant<int, 2 * third>{});
    body(std::integral_constant<int, third>{});
}

}  // namespace
}  // namespace fusion
