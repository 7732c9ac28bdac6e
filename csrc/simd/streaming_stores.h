// Streaming stores of complete cache lines, for results that are not read soon and exceed the caches. An ordinary store
// would load each line first.

#pragma once

#include "simd/vec.h"

namespace fusion {
namespace {

// Streams two vectors of results if they fill cache lines; else writes nothing and returns false. The writer must
// execute a fence before other threads read.
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
    if constexpr (sizeof(T) == 4) {  // two vectors of 16-bit elements are half a line
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

// Stores a cache line of results; streams it if `streamed` and the address is aligned.
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
