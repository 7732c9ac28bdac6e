// Denormal numbers count as zero while this lives, on this thread: they would cost a hundred times a normal number.

#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace fusion {

class FlushDenormals {
public:
#if defined(__SSE__)
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }  // FTZ and DAZ
    ~FlushDenormals() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
    FlushDenormals() : before_(get()) { set(before_ | std::uint64_t{1} << 24); }  // FZ
    ~FlushDenormals() { set(before_); }
#else
    FlushDenormals() : before_(0) {}
#endif
    FlushDenormals(const FlushDenormals &) = delete;
    FlushDenormals &operator=(const FlushDenormals &) = delete;

private:
#if defined(__aarch64__)
    static std::uint64_t get() {
        std::uint64_t value;
        __asm__ volatile("mrs %0, fpcr" : "=r"(value));
        return value;
    }
    static void set(std::uint64_t value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
    std::uint64_t before_;
#else
    [[maybe_unused]] unsigned before_;
#endif
};

}  // namespace fusion
