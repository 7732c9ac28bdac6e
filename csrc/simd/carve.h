// Lengths of packed rows, and the division of scratch memory into arrays.

#pragma once

#include "simd/row_addresses.h"

namespace fusion {
namespace {

// Number of words of n elements over which a product sums, rounded up to Format::step.
template <class Format> FUSION_INLINE std::int64_t words_of(std::int64_t n) {
    return round_up<std::int64_t>((n + Format::depth - 1) / Format::depth, Format::step);
}

template <class Format> struct Sizes {
    std::int64_t main_words, words, value_words;        // of rows of q and k without and with rope, and of v
    std::int64_t main_columns, columns, value_columns;  // the same in elements, rounded up to vectors

    template <class P>
    explicit Sizes(const P &p)
        : main_words(words_of<Format>(p.dim_qk)), words(main_words + words_of<Format>(p.dim_rope)),
          value_words(words_of<Format>(p.dim_v)), main_columns(round_up<std::int64_t>(p.dim_qk, lanes)),
          columns(main_columns + round_up<std::int64_t>(p.dim_rope, lanes)),
          value_columns(round_up<std::int64_t>(p.dim_v, lanes)) {}
};

class Carver {  // divides memory into arrays aligned to cache lines; with a null pointer, only counts bytes
public:
    explicit Carver(void *memory) : start_(static_cast<char *>(memory)), at_(start_) {}

    template <class T> FUSION_INLINE void take(T *&array, std::int64_t count) {
        array = reinterpret_cast<T *>(at_);
        at_ += round_up<std::size_t>(count * sizeof(T), 64);
    }
    FUSION_INLINE std::size_t bytes() const { return at_ - start_; }

private:
    char *start_, *at_;
};

}  // namespace
}  // namespace fusion
