// Gradients of lists where an element is not finite. A key whose score is -inf is not seen, and one whose score is not
// above 0 does not pass the indexer's ReLU; but products multiply their weights of 0 too, and 0 * inf is NaN. So rows
// that meet such an element are weighed with care, heads of dq that became NaN are formed anew, key by key, and what
// sums of keys receive is multiplied without these elements, which are then added apart.

#pragma once

#include "sparse/gather.h"

namespace fusion {
namespace {

// Whether something that was multiplied is not finite, or a product of it: such an element makes all products of its
// row so, and of products [key][pitch] those of one vector of heads and those of one key see every row.
inline bool meets_nonfinite(const float *products, std::int64_t pitch, std::int64_t count, std::int64_t heads) {
    Floats found = {};
    for (std::int64_t i = 0; i < count; ++i) found += load<Floats>(products + i * pitch) * Floats{};
    for (std::int64_t h = 0; h < heads; h += lanes) found += load<Floats>(products + h) * Floats{};
    return any((Words)(found != found));
}

// Zeros in place of what is not finite in so many heads' rows, as pack_across() packs them; whether anything is.
template <class Format>
bool clear_nonfinite(typename Format::Word *words, std::int64_t heads, std::int64_t columns) {
    const std::int64_t count = words_of<Format>(heads) * columns;
    Words nonfinite = {};
    for (std::int64_t i = 0; i < count; i += lanes) {
        store(words + i, checked<Format, true>(load<Words>(words + i), nonfinite));
    }
    return any_nonfinite<Format>(nonfinite);
}

inline bool any_nan(const float *row, std::int64_t n) {
    Words found = {};
    for (std::int64_t d = 0; d < n; d += lanes) {
        const Floats x = load_floats(row + d, n - d);
        found |= (Words)(x != x);
    }
    return any(found);
}

// The product of one row of q and one key, with their ropes.
template <class T>
float score_of(const SparseProblem &p, const SparseOperands &o, std::int64_t seq, std::int64_t head, std::int64_t row,
               std::int64_t head_kv, std::int64_t key) {
    const auto dot = [&](const Rows &rows, const Keys &keys, std::int64_t n) {
        return sum_of(dot_rows(row_of<const T>(rows, seq, head, row), row_of<T>(keys, seq, head_kv, key), n));
    };
    return p.dim_rope ? dot(o.q, o.k, p.dim_qk) + dot(o.q_rope, o.k_rope, p.dim_rope) : dot(o.q, o.k, p.dim_qk);
}

// weight * row; or the part of those elements that are not finite.
template <bool Whole, class T> void add_row(const T *row, std::int64_t n, float weight, float *to) {
    for (std::int64_t d = 0; d < n; d += lanes) {
        const Floats value = load_floats(row + d, n - d);
        const Words term = bits_of(value * weight);
        const Words some = Whole ? term : term & not_finite(bits_of(value));
        store(to + d, load<Floats>(to + d) + floats_of(some));
    }
}

}  // namespace
}  // namespace fusion
