// Whole cache lines that are written past the caches: results that are not read soon, and that are larger than what a
// cache would keep for who does. A plain store would first fetch each line.

#pragma once

#include "simd/vec.h"

namespace fusion {
namespace {

// Two vectors of results, where they fill lines; else nothing is written. A writer fences before others read.
template <class T> FUSION_INLINE bool write_lines(T *to, Floats low, Floats high) {
#if defined(__AVX512F__)
    if (reinterpret_cast<std::uintptr_t>(to) % 64) return false;
    if constexpr (sizeof(T) == 4) {
        _mm512_stream_ps(to, (__m512)low);
        _mm512_stream_ps(to + lanes, (__m512)high);
    } else {
        const Halves line[] = {from_floats(T{}, low), from_floats(T{}, high)};
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to), load<__m512i>(line));
    }
    return true;
#elif defined(FUSION_AVX2)
    if constexpr (sizeof(T) == 4) {  // of 16 bits two vectors are half a line
        if (reinterpret_cast<std::uintptr_t>(to) % 64) return false;
        _mm256_stream_ps(to, (__m256)low);
        _mm256_stream_ps(to + lanes, (__m256)high);
        return true;
    }
    return false;
#else
    (void)to, (void)low, (void)high;
    return false;
#endif
}

// A line's worth of results: past the caches where they are to go there and fill a line.
FUSION_INLINE void write_line(void *to, Words line, bool streamed) {
#if defined(__AVX512F__)
    if (streamed && reinterpret_cast<std::uintptr_t>(to) % 64 == 0) {
        return _mm512_stream_si512(static_cast<__m512i *>(to), (__m512i)line);
    }
#endif
    (void)streamed;
    store(to, line);
}

}  // namespace
}  // namespace fusion
