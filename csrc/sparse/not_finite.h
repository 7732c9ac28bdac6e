// Gradients of lists with non-finite elements. A key with a score of -inf is hidden, and one with a score <= 0 does not
// pass the indexer's ReLU; but products multiply their weights of 0 too, and 0 * inf is NaN. So weights of rows with
// such elements are computed separately, heads of dq that are NaN are computed again, key by key, and contributions to
// sums of keys are multiplied without these elements, which are then added separately.

#pragma once

#include "sparse/gather.h"

namespace fusion {
namespace {

// True if an operand or a product is not finite. A non-finite element makes all products of its row non-finite, so it
// is enough to check, in products [key][pitch], one vector of heads and one key.
inline bool meets_nonfinite(const float *products, std::int64_t pitch, std::int64_t count, std::int64_t heads) {
    Floats nans = {};
    for (std::int64_t i = 0; i < count; ++i) nans += load<Floats>(products + i * pitch) * Floats{};
    for (std::int64_t h = 0; h < heads; h += lanes) nans += load<Floats>(products + h) * Floats{};
    return any((Words)(nans != nans));
}

// Replaces non-finite elements of heads, packed by pack_across(), by zeros; returns true if there was one.
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
    Words nans = {};
    for (std::int64_t d = 0; d < n; d += lanes) {
        const Floats x = load_floats(row + d, n - d);
        nans |= (Words)(x != x);
    }
    return any(nans);
}

// The product of one row of q and one key, including rope.
template <class T>
float score_of(const SparseProblem &p, const SparseOperands &o, std::int64_t seq, std::int64_t head, std::int64_t row,
               std::int64_t head_kv, std::int64_t key) {
    const auto dot = [&](const Rows &rows, const Keys &keys, std::int64_t n) {
        return sum_of(dot_rows(row_of<const T>(rows, seq, head, row), row_of<T>(keys, seq, head_kv, key), n));
    };
    return p.dim_rope ? dot(o.q, o.k, p.dim_qk) + dot(o.q_rope, o.k_rope, p.dim_rope) : dot(o.q, o.k, p.dim_qk);
}

// Adds weight * row, either all elements (All) or only the non-finite ones.
template <bool All, class T> void add_row(const T *row, std::int64_t n, float weight, float *to) {
    for (std::int64_t d = 0; d < n; d += lanes) {
        const Floats value = load_floats(row + d, n - d);
        const Words term = bits_of(value * weight);
        const Words some = All ? term : term & not_finite(bits_of(value));
        store(to + d, load<Floats>(to + d) + floats_of(some));
    }
}

}  // namespace
}  // namespace fusion
